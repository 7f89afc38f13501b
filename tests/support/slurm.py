"""A Slurm of its own on hosts of `tests.support.hosts`: a controller, and a daemon on each, which is a Slurm node."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests.support.hosts import Host
from tests.support.jobs import wait_until

PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "srun", "scontrol", "scancel")
_PATH = f"{os.environ['PATH']}:/usr/sbin:/usr/local/sbin"
_LACKING = [program for program in PROGRAMS if shutil.which(program, path=_PATH) is None]
requires_slurm = pytest.mark.skipif(bool(_LACKING), reason=f"needs Slurm and munge ({', '.join(_LACKING)})")

START_SECONDS = 300.0
REQUEUE_SECONDS = 10
"""How long Slurm holds back a job that was queued again: until its credentials have expired (otherwise two minutes)."""

_CONFIG = """
ClusterName=test
SlurmctldHost={controller}
SlurmUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket,cred_expire={requeue}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/{proctrack}
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
MpiDefault=none
ReturnToService=2
KillWait=20
"""


@dataclass
class Slurm:
    controller: Host
    environment: dict[str, str]

    def run(self, *command: str | Path, cwd: Path | None = None, **environ: str) -> str:
        """What one of Slurm's commands says, called on the first host."""
        process = self.controller.start(
            command, env=self.environment | environ, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        said, _ = process.communicate(timeout=300.0)
        assert process.returncode == 0, f"{command}: {said}"
        return said

    def submit(self, *arguments: str | Path, cwd: Path, **environ: str) -> str:
        """sbatch; the number of the job."""
        return self.run("sbatch", "--parsable", *arguments, cwd=cwd, **environ).strip()

    def show(self, job: str) -> dict[str, str]:
        words = self.run("scontrol", "--oneliner", "show", "job", job).split()
        return dict(word.partition("=")[::2] for word in words)

    def wait(self, job: str, state: str, seconds: float) -> dict[str, str]:
        """Until the job is in this state; what Slurm tells of it then."""
        deadline = time.monotonic() + seconds
        while (shown := self.show(job))["JobState"] != state:
            assert time.monotonic() < deadline, f"not {state} within {seconds:g} s: {shown}"
            time.sleep(0.5)
        return shown


@contextmanager
def slurm_on(
    hosts: Sequence[Host], names: Sequence[str], folder: Path, proctrack: str = "linuxproc"
) -> Iterator[Slurm]:
    """Slurm with a node of each name, until the end of the block."""
    (folder / "state").mkdir(parents=True)
    folder.chmod(0o755)  # munge trusts no folder that others may write to
    key = folder / "munge.key"
    key.write_bytes(secrets.token_bytes(64))
    key.chmod(0o400)
    lines = [
        f"NodeName={name} NodeHostname={host.name} NodeAddr={host.address} CPUs={os.cpu_count()} State=UNKNOWN"
        for name, host in zip(names, hosts, strict=True)
    ]
    config = _CONFIG.format(
        controller=f"{hosts[0].name}({hosts[0].address})",
        folder=folder,
        requeue=REQUEUE_SECONDS,
        proctrack=proctrack,
    )
    (folder / "slurm.conf").write_text(
        "\n".join([config, *lines, "PartitionName=all Nodes=ALL Default=YES State=UP\n"])
    )
    slurm = Slurm(hosts[0], dict(os.environ) | {"SLURM_CONF": str(folder / "slurm.conf"), "PATH": _PATH})
    munge = [
        f"--key-file={key}", f"--socket={folder}/munge.socket", f"--pid-file={folder}/munge.pid",
        f"--log-file={folder}/munge.log", f"--seed-file={folder}/munge.seed",
    ]  # fmt: skip
    daemons: list[subprocess.Popen[str]] = []

    def start(host: Host, *command: str) -> None:
        """A daemon; it has a log of its own."""
        quiet = subprocess.DEVNULL
        daemons.append(host.start(command, env=slurm.environment, stdin=quiet, stdout=quiet, stderr=quiet))

    start(hosts[0], "munged", "--foreground", "--force", *munge)
    wait_until((folder / "munge.socket").exists, START_SECONDS, lambda: "no munged")
    start(hosts[0], "slurmctld", "-D", "-i")
    for host in hosts:
        start(host, "slurmd", "-D")

    def is_up() -> bool:
        assert all(daemon.poll() is None for daemon in daemons), _logs(folder)
        states = slurm.controller.start(
            ["sinfo", "--noheader", "--format=%T"], env=slurm.environment, stdout=subprocess.PIPE
        )
        return states.communicate()[0].split() == ["idle"]

    try:
        wait_until(is_up, START_SECONDS, lambda: _logs(folder))
        yield slurm
    finally:
        for host in hosts:
            for process in host.processes():
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
        for daemon in daemons:
            daemon.wait(100.0)


def _logs(folder: Path) -> str:
    return "\n".join(f"--- {log.name}\n{log.read_text()[-2000:]}" for log in sorted(folder.glob("*.log")))
