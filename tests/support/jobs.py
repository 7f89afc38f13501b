"""Real jobs: train_ppo.py as one process or under torchrun, and the processes that belong to them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
import yaml

from verl.config import PPOConfig

ROOT = Path(__file__).resolve().parents[2]
TRAIN_PPO = ROOT / "train_ppo.py"
MARK = "VERL_TEST_JOB"
"""A variable that all processes of a job inherit, and no other."""
OURS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "HYDRA_FULL_ERROR")


@dataclass
class Job:
    """A job that was started."""

    process: subprocess.Popen[str]
    mark: str
    folder: Path

    @property
    def stdout(self) -> str:
        return (self.folder / "stdout").read_text()

    @property
    def stderr(self) -> str:
        return (self.folder / "stderr").read_text()

    def wait(self, timeout: float) -> int:
        """Its exit code."""
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it has not ended after {timeout:g} s:\n{self.stderr[-4000:]}") from None

    def members(self) -> list[psutil.Process]:
        """Its living processes, children of children and those in sessions of their own among them."""
        return [process for process in psutil.process_iter() if _bears(process, self.mark)]

    def find(self, *words: str) -> list[psutil.Process]:
        """Those of its processes that have all the words in their command lines."""
        found = []
        for process in self.members():
            with contextlib.suppress(psutil.Error):
                line = " ".join(process.cmdline())
                if all(word in line for word in words):
                    found.append(process)
        return found

    def assert_nothing_left(self, seconds: float = 100.0) -> None:
        wait_until(lambda: not self.members(), seconds, lambda: f"still there: {self.members()}")

    def wait_for_line(self, text: str, seconds: float) -> None:
        """Waits until the job has said this on either stream."""
        wait_until(
            lambda: text in self.stdout + self.stderr or self.process.poll() is not None,
            seconds,
            lambda: f"it has not said {text!r}:\n{self.stderr[-4000:]}",
        )
        assert text in self.stdout + self.stderr, self.stderr[-4000:]


@contextmanager
def started(
    config: PPOConfig, folder: Path, *further: str, ranks: int | None = None, script: Path = TRAIN_PPO, **environ: str
) -> Iterator[Job]:
    """train_ppo.py with these settings, under torchrun where `ranks` says how many; its output goes into `folder`.

    At the end of the block what is left of it is killed.
    """
    launcher = [] if ranks is None else ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    command = [*launcher, str(script), "--config", str(write_config(config, folder / "config.yaml")), *further]
    with started_command(command, folder, **environ) as job:
        yield job


@contextmanager
def started_command(command: list[str], folder: Path, stdin: str | None = None, **environ: str) -> Iterator[Job]:
    """Python with these arguments, as a job."""
    folder.mkdir(parents=True, exist_ok=True)
    mark = uuid.uuid4().hex
    outer = {name: value for name, value in os.environ.items() if name not in OURS}
    environment = outer | {MARK: mark, "PYTHONUNBUFFERED": "1"} | environ
    given = folder / "stdin"
    given.write_text(stdin or "")
    with given.open() as source, (folder / "stdout").open("w") as out, (folder / "stderr").open("w") as err:
        process = subprocess.Popen(
            [sys.executable, *command],
            cwd=folder, env=environment, stdin=source, stdout=out, stderr=err, text=True, start_new_session=True,
        )  # fmt: skip
    job = Job(process, mark, folder)
    try:
        yield job
    finally:
        for member in job.members():
            with contextlib.suppress(psutil.NoSuchProcess):
                member.send_signal(signal.SIGKILL)
        process.wait()


def write_config(config: PPOConfig, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(json.loads(json.dumps(asdict(config)))))
    return path


def wait_until(condition: Callable[[], bool], seconds: float, complain: Callable[[], str]) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {complain()}"
        time.sleep(0.05)


def _bears(process: psutil.Process, mark: str) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE and process.environ().get(MARK) == mark
    except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
        return False
