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

from verl.processes import die_with

torch.set_num_threads(1)

TIMEOUT = 300.0
GRACE = 90.0
"""Both only catch a hang, on a machine that may be busy."""


def hold_port() -> socket.socket:
    """Bound to a port that nobody else is given while it is open. A server that reuses addresses may listen there."""
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    return held


class RankFailed(AssertionError):
    """A rank raised or died; `tracebacks` by rank."""

    def __init__(self, tracebacks: dict[int, str]) -> None:
        super().__init__("\n".join(f"--- rank {rank}\n{text}" for rank, text in sorted(tracebacks.items())))
        self.tracebacks = tracebacks


def run_ranks(
    world: int, fn: Callable[..., Any], *args: Any, timeout: float = TIMEOUT, grace: float = GRACE
) -> list[Any]:
    """`fn(*args)` in `world` processes with torchrun's environment; what each returned. Raises RankFailed.

    `timeout`: seconds until those that still run are killed. `grace`: the same after one has failed, so that the others
    may fail by themselves; 0 where one hangs, which never would.
    """
    with hold_port() as held, tempfile.TemporaryDirectory() as folder:
        port = held.getsockname()[1]
        pids = {_fork(rank, world, port, fn, args, Path(folder)): rank for rank in range(world)}
        try:
            failed = _wait(pids, time.monotonic() + timeout, grace)
        finally:  # where the test itself is ended
            _kill(pids)
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
    tests = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    code = 0
    try:
        die_with(tests, signal.SIGKILL)
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


def _wait(pids: dict[int, int], deadline: float, grace: float) -> dict[int, str]:
    """Reaps the ranks; how those ended that have failed."""
    failed: dict[int, str] = {}
    while pids:
        for pid in list(pids):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                rank = pids.pop(pid)
                if status:
                    failed[rank] = f"exit status {os.waitstatus_to_exitcode(status)}"
                    deadline = min(deadline, time.monotonic() + grace)
        if pids and time.monotonic() > deadline:
            failed |= dict.fromkeys(pids.values(), "killed: it did not end in time")
            _kill(pids)
        time.sleep(0.005)
    return failed


def _kill(pids: dict[int, int]) -> None:
    for pid in list(pids):
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        del pids[pid]
