"""sshd on hosts of `tests.support.hosts`, with keys, settings and a port of its own: this machine's are not touched."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.support.hosts import Host
from tests.support.jobs import wait_until

SSHD = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin:/usr/local/sbin")
PORT = 2222
PRIVILEGE_SEPARATION = Path("/run/sshd")
"""A folder that sshd insists on; a start script makes it where sshd runs as a service."""

requires_sshd = pytest.mark.skipif(SSHD is None, reason="needs sshd (openssh-server)")

_SSHD_CONFIG = """
Port {port}
HostKey {folder}/host
AuthorizedKeysFile {folder}/user.pub
PidFile none
UsePAM no
StrictModes no
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin prohibit-password
"""
_SSH_CONFIG = """
Host *
  Port {port}
  IdentityFile {folder}/user
  IdentitiesOnly yes
  UserKnownHostsFile {folder}/known_hosts
  GlobalKnownHostsFile none
"""


@contextmanager
def sshd_on(hosts: Sequence[Host], folder: Path) -> Iterator[Path]:
    """sshd on each host until the end of the block. Gives the client's settings, a file for `ssh -F`."""
    assert SSHD is not None
    PRIVILEGE_SEPARATION.mkdir(exist_ok=True)
    folder.mkdir()
    for key in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / key], check=True)
    host_key = (folder / "host.pub").read_text()
    (folder / "known_hosts").write_text("".join(f"[{host.name}]:{PORT} {host_key}" for host in hosts))
    (folder / "sshd_config").write_text(_SSHD_CONFIG.format(port=PORT, folder=folder))
    (folder / "ssh_config").write_text(_SSH_CONFIG.format(port=PORT, folder=folder))
    daemons = []
    for host in hosts:
        with (folder / f"{host.name}.log").open("w") as log:
            daemon = host.start([SSHD, "-D", "-e", "-f", folder / "sshd_config"], stdout=log, stderr=log)
            daemons.append(daemon)
    logs = [folder / f"{host.name}.log" for host in hosts]
    wait_until(lambda: all("listening on" in log.read_text() for log in logs), 100.0, lambda: "no sshd")
    try:
        yield folder / "ssh_config"
    finally:
        for host in hosts:
            for process in host.processes():
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
        for daemon in daemons:
            daemon.wait(100.0)


def others(host: Host) -> list[psutil.Process]:
    """What lives on a host besides sshd."""
    return [process for process in host.processes() if not _is_sshd(process)]


def sessions(host: Host) -> list[psutil.Process]:
    """sshd's processes for single connections."""
    return [process for process in host.processes() if _is_sshd(process) and "listener" not in " ".join(_line(process))]


def _is_sshd(process: psutil.Process) -> bool:
    return any("sshd" in word for word in _line(process)[:1])


def _line(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:
        return []
