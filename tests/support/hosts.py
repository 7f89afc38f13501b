"""Several hosts on one machine: each with its own network, host name, hosts file, processes, /dev/shm and local disk.

A host is a set of Linux namespaces that one waiting process holds, and that process ends when the pipe to it closes:
nothing has a name in the machine's own namespaces, and nothing is left, even where the tests are killed.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import psutil
import pytest

from tests.support.jobs import wait_until

NETWORK = "10.213.7"
TOOLS = ("ip", "unshare", "nsenter", "mount", "hostname")
SHM_MIB = 1024
END_SECONDS = 100.0

# `cat` waits for the end of its input. As process 1 of the host it inherits orphans: with CHLD ignored the kernel
# takes them away when they end. Shell variables come from the environment, so that no path has to be quoted.
_HOLD = "echo ready; exec env --ignore-signal=CHLD cat > /dev/null"
_BOOT = f"""
set -e
hostname "$HOST_NAME"
mount --bind "$HOST_FILES/hosts" /etc/hosts
mount --bind "$HOST_FILES/resolv.conf" /etc/resolv.conf
mount --bind "$HOST_FILES/disk" "$HOST_LOCAL"
mount -t tmpfs -o "size=$HOST_SHM" host-shm /dev/shm
ip link set lo up
{_HOLD}
"""


def _missing() -> str:
    """Why there can be no hosts here, or ''."""
    lacking = [tool for tool in TOOLS if shutil.which(tool) is None]
    if lacking:
        return f"hosts need {', '.join(lacking)}"
    if os.geteuid() != 0:
        return "hosts need root, for network namespaces"
    tried = subprocess.run(
        ["unshare", "--net", "--uts", "--ipc", "--pid", "--fork", "--mount-proc", "sh", "-c",
         "mount -t tmpfs none /dev/shm && ip link add one type bridge && ip link add two type veth peer name three"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    return f"this machine lets nobody make namespaces: {tried.stderr.strip()}" if tried.returncode else ""


requires_hosts = pytest.mark.skipif(bool(_missing()), reason=_missing() or "hosts can be made")


@dataclass
class Host:
    """One host. Its processes end with it."""

    name: str
    address: str
    disk: Path
    """What the host sees as `local`, seen from outside: to put files there and to read them."""
    local: Path
    """The same path on every host, with contents of its own on each, as a local disk has."""
    shared: Path
    """The same folder on all hosts."""
    _init: int
    _space: str
    _switch: _Process
    _started: list[subprocess.Popen[str]] = field(default_factory=list)

    def start(
        self, command: Sequence[str | Path], env: Mapping[str, str] | None = None, cwd: Path | None = None, **popen: Any
    ) -> subprocess.Popen[str]:
        """Runs a command on the host. `env`: the whole environment (TMPDIR is set to a folder of the host's own).

        The process that is returned stands for the command and ends as it does; send signals with `signal`.
        """
        temporary = self.local / "tmp"
        environment = dict(os.environ if env is None else env) | {"TMPDIR": str(temporary)}
        process = subprocess.Popen(
            [*_enter(self._init, "--mount", "--uts", "--ipc", "--net", "--pid"),
             f"--wdns={cwd or self.local}", "--", *map(str, command)],
            env=environment, text=True, **popen,
        )  # fmt: skip
        self._started.append(process)
        return process

    def run(self, *command: str | Path, timeout: float = 300.0, env: Mapping[str, str] | None = None) -> str:
        """What a command says on either stream. Raises AssertionError where it fails."""
        process = self.start(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        said, _ = process.communicate(timeout=timeout)
        assert process.returncode == 0, f"{self.name}: {command} ended with {process.returncode}: {said}"
        return said

    def signal(self, process: subprocess.Popen[str], number: signal.Signals) -> None:
        """To the command that `start` has returned."""
        for child in psutil.Process(process.pid).children():
            child.send_signal(number)

    def processes(self) -> list[psutil.Process]:
        """What lives on the host, as this machine numbers it; not the process that holds it."""
        return [p for p in psutil.process_iter() if p.pid != self._init and _pid_namespace(p.pid) == self._space]

    def link_down(self) -> None:
        """Pulls the cable: what is sent from now on is lost, and nobody is told."""
        self._switch.ip("link", "set", f"port-{self.name}", "down")

    def link_up(self) -> None:
        self._switch.ip("link", "set", f"port-{self.name}", "up")


@dataclass
class _Process:
    """A process that holds namespaces until its input closes."""

    popen: subprocess.Popen[str]
    pid: int

    @classmethod
    def start(cls, script: str, *spaces: str, env: Mapping[str, str] | None = None) -> _Process:
        popen = subprocess.Popen(
            ["unshare", *spaces, "--fork", "--kill-child", "sh", "-c", script],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env=dict(os.environ) | dict(env or {}),
        )  # fmt: skip
        said = _first_line(popen.stdout)
        if said != "ready":
            popen.kill()
            raise RuntimeError(f"a host did not start: {said}{popen.stdout.read() if popen.stdout else ''}")
        (child,) = psutil.Process(popen.pid).children()
        return cls(popen, child.pid)

    def ip(self, *words: str) -> None:
        """The command `ip` in its network."""
        subprocess.run([*_enter(self.pid, "--net"), "--", "ip", *words], check=True, capture_output=True)

    def end(self) -> None:
        """Its processes are killed by the kernel as soon as their first one has ended."""
        assert self.popen.stdin is not None and self.popen.stdout is not None
        self.popen.stdin.close()
        try:
            self.popen.wait(END_SECONDS)
        finally:
            self.popen.kill()
            self.popen.wait()
            self.popen.stdout.close()


@contextmanager
def hosts(count: int, folder: Path, shm_mib: int = SHM_MIB) -> Iterator[list[Host]]:
    """Hosts node1, node2, ... on one network, each knowing the others by name. `folder`: an empty one for their disks.

    At the end of the block all that lives on them is killed, and they are gone.
    """
    shared, local = folder / "shared", folder / "local"
    shared.mkdir(parents=True)
    local.mkdir()
    named = {f"node{number}": f"{NETWORK}.{number}" for number in range(1, count + 1)}
    table = "127.0.0.1 localhost\n" + "".join(f"{address} {name}\n" for name, address in named.items())
    with ExitStack() as closing:
        switch = _Process.start(_HOLD, "--net")
        closing.callback(switch.end)
        switch.ip("link", "add", "switch", "type", "bridge")
        switch.ip("link", "set", "switch", "up")
        made = []
        for name, address in named.items():
            files = folder / name
            disk = files / "disk"
            (disk / "tmp").mkdir(parents=True)
            (files / "hosts").write_text(table)
            (files / "resolv.conf").write_text("")  # no name server: it could not be reached, and asking it takes long
            boot = {"NAME": name, "FILES": str(files), "LOCAL": str(local), "SHM": f"{shm_mib}m"}
            holder = _Process.start(
                _BOOT, "--net", "--uts", "--ipc", "--mount", "--pid", "--mount-proc",
                env={f"HOST_{key}": value for key, value in boot.items()},
            )  # fmt: skip
            host = Host(name, address, disk, local, shared, holder.pid, _pid_namespace(holder.pid), switch)
            closing.callback(_end, host, holder)
            switch.ip("link", "add", f"port-{name}", "type", "veth", "peer", "name", "eth0", "netns", str(holder.pid))
            switch.ip("link", "set", f"port-{name}", "master", "switch", "up")
            holder.ip("address", "add", f"{address}/24", "dev", "eth0")
            holder.ip("link", "set", "eth0", "up")
            made.append(host)
        yield made


def _end(host: Host, holder: _Process) -> None:
    holder.end()
    for process in host._started:
        process.wait(END_SECONDS)
    wait_until(lambda: not host.processes(), END_SECONDS, lambda: f"still on {host.name}: {host.processes()}")


def _enter(pid: int, *spaces: str) -> list[str]:
    return ["nsenter", f"--target={pid}", *spaces]


def _first_line(stream: IO[str] | None) -> str:
    assert stream is not None
    return stream.readline().strip()


def _pid_namespace(pid: int) -> str:
    """'' where the process has ended or is not ours to ask."""
    try:
        return os.readlink(f"/proc/{pid}/ns/pid")
    except OSError:
        return ""
