"""Ranks of a job as forks of the test process, which has imported torch already: two start in a tenth of a second."""

from __future__ import annotations

import os
import pickle
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

torch.set_num_threads(1)


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class RankFailed(AssertionError):
    """A rank raised or died; `tracebacks` by rank."""

    def __init__(self, tracebacks: dict[int, str]) -> None:
        super().__init__("\n".join(f"--- rank {rank}\n{text}" for rank, text in sorted(tracebacks.items())))
        self.tracebacks = tracebacks


def run_ranks(world: int, fn: Callable[..., Any], *args: Any, timeout: float = 60.0) -> list[Any]:
    """`fn(*args)` in `world` processes with torchrun's environment; what each returned. Raises RankFailed."""
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        pids = {_fork(rank, world, port, fn, args, Path(folder)): rank for rank in range(world)}
        failed = _wait(pids, time.monotonic() + timeout)
        results, tracebacks = [], {}
        for rank in range(world):
            file = Path(folder) / f"{rank}.pickle"
            ok, value = (
                pickle.loads(file.read_bytes()) if file.exists() else (False, failed.get(rank, "died in silence"))
            )
            results.append(value)
            if not ok or rank in failed:
                tracebacks[rank] = value if not ok else failed[rank]
        if tracebacks:
            raise RankFailed(tracebacks)
        return results


def _fork(rank: int, world: int, port: int, fn: Callable[..., Any], args: tuple[Any, ...], folder: Path) -> int:
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 0
    try:
        os.environ.update(
            RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world), GROUP_RANK="0",
            MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo",
        )  # fmt: skip
        outcome = (True, fn(*args))
    except BaseException:
        outcome, code = (False, traceback.format_exc()), 1
    part = folder / f"{rank}.part"
    part.write_bytes(pickle.dumps(outcome))
    part.rename(folder / f"{rank}.pickle")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _wait(pids: dict[int, int], deadline: float) -> dict[int, str]:
    """Reaps the ranks; a failure gives the others two seconds to fail by themselves."""
    failed: dict[int, str] = {}
    while pids:
        for pid in list(pids):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                rank = pids.pop(pid)
                if status:
                    failed[rank] = f"exit status {os.waitstatus_to_exitcode(status)}"
                    deadline = min(deadline, time.monotonic() + 2.0)
        if pids and time.monotonic() > deadline:
            for pid, rank in pids.items():
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                failed[rank] = "killed: it did not end in time"
            pids = {}
        time.sleep(0.005)
    return failed
