"""A job of torchrun on several hosts, started as a user starts it: one command on each of them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.support.hosts import Host
from tests.support.jobs import OURS, ROOT, wait_until

BIN = Path(sys.executable).parent


@dataclass
class OnHost:
    """The part of a job on one host."""

    host: Host
    process: subprocess.Popen[str]
    output: Path
    started: float

    @property
    def said(self) -> str:
        """On both streams."""
        return self.output.read_text()

    def wait(self, timeout: float) -> int:
        """Its exit code."""
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.host.name} has not ended after {timeout:g} s:\n{self.said[-4000:]}") from None

    def wait_for_line(self, text: str, seconds: float) -> None:
        ended = lambda: self.process.poll() is not None  # noqa: E731
        wait_until(
            lambda: text in self.said or ended(),
            seconds,
            lambda: f"{self.host.name} has not said {text!r}:\n{self.said[-4000:]}",
        )
        assert text in self.said, f"{self.host.name} has not said {text!r}:\n{self.said[-4000:]}"


def make_checkout(folder: Path, mesh: str) -> Path:
    """A folder that looks like a checkout of this repository on storage that all hosts share."""
    folder.mkdir(parents=True)
    for name in ("train_ppo.py", "configs"):
        (folder / name).symlink_to(ROOT / name)
    (folder / "device_mesh.yaml").write_text(mesh)
    return folder


def environment(**further: str) -> dict[str, str]:
    """A user's, without what the tests themselves run under."""
    outer = {name: value for name, value in os.environ.items() if name not in OURS and name != "CUDA_VISIBLE_DEVICES"}
    return outer | {"PATH": f"{BIN}:{os.environ['PATH']}", "PYTHONUNBUFFERED": "1"} | further


def start(host: Host, command: Sequence[str], cwd: Path, env: Mapping[str, str]) -> OnHost:
    output = host.disk / f"output_{time.monotonic_ns()}"
    with output.open("w") as stream:
        process = host.start(
            command, env=environment(**env), cwd=cwd, stdin=subprocess.DEVNULL, stdout=stream,
            stderr=subprocess.STDOUT,
        )  # fmt: skip
    return OnHost(host, process, output, time.monotonic())


Command = tuple[Host, Sequence[str], Mapping[str, str]]
"""On which host, what, and further environment variables."""


@contextmanager
def started(cwd: Path, *commands: Command) -> Iterator[list[OnHost]]:
    """All commands, at the same time. What is left of them at the end is killed."""
    with ExitStack() as closing:
        parts = []
        for host, command, env in commands:
            parts.append(start(host, command, cwd, env))
            closing.callback(_clear, host, parts[-1].process)
        yield parts


def _clear(host: Host, process: subprocess.Popen[str]) -> None:
    for member in host.processes():
        if member.is_running():
            member.send_signal(signal.SIGKILL)
    process.wait(100)
    wait_until(lambda: not host.processes(), 100, lambda: f"still on {host.name}: {host.processes()}")
