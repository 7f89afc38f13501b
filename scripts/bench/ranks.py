"""Ranks of a gloo job as forks of this process, which has imported what they need."""

from __future__ import annotations

import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any


def on_ranks(world: int, do: Callable[..., Any], *arguments: Any, timeout: float) -> Any:
    """`do(*arguments)` in `world` processes with torchrun's environment; what rank 0 returned."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    fork = multiprocessing.get_context("fork")
    ours: list[Any] = []  # their ends of the pipes
    processes = []
    for rank in range(world):
        end, theirs = fork.Pipe(duplex=False)
        process = fork.Process(target=_run, args=(rank, world, port, theirs, do, arguments), daemon=True)
        process.start()
        theirs.close()
        ours.append(end)
        processes.append(process)
    results: dict[int, Any] = {}
    try:
        while len(results) < world:
            ready = wait([end for rank, end in enumerate(ours) if rank not in results], timeout)
            if not ready:
                raise SystemExit(f"error: the benchmark's ranks have said nothing for {timeout:g} s")
            for end in ready:
                rank = ours.index(end)
                failed, value = ours[rank].recv()
                if failed:
                    raise SystemExit(f"error: rank {rank} of the benchmark failed:\n{value}")
                results[rank] = value
    finally:
        for process in processes:
            process.kill()
            process.join()
    return results[0]


def _run(
    rank: int, world: int, port: int, told: Connection, do: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world), GROUP_RANK="0",
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo",
    )  # fmt: skip
    try:
        told.send((False, do(*arguments)))
    except BaseException:
        told.send((True, traceback.format_exc()))
