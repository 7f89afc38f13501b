"""Hangs that are put into ranks, and a watchdog that sees nothing else, however busy the machine is.

A test of a hang has a limit of seconds, and a busy machine may hold up any rank for as long: while it starts, say. So
in these tests a rank blames nobody before the hang has been announced, and before it waits for the rank that hangs, and
all others that it waits for, directly or through others, wait too. From then on nobody needs the machine any more.
"""

from __future__ import annotations

import os

import torch.distributed as dist

from tests.support.jobs import wait_until
from verl.flow import job
from verl.flow.board import Board
from verl.flow.board import _key as _line
from verl.flow.meeting import store_factory

_KEY = "test/hangs"


def watch_for_hangs_alone() -> None:
    """On every rank, before it starts its job."""
    look = Board._fault

    def look_when_settled(board: Board, store: dist.Store) -> str | None:
        fault = look(board, store)  # always: it notes since when a rank has stood still
        return fault if _settled(board, store) else None

    Board._fault = look_when_settled  # type: ignore[method-assign]
    job.BACKSTOP_FACTOR = 1000


def announce_hang(*ranks: int) -> None:
    """These ranks will hang, or are about to wait for each other."""
    _connect().set(_KEY, ",".join(map(str, ranks)))


def withdraw_hang() -> None:
    """What had been announced goes on after all."""
    _connect().set(_KEY, "")


def await_line(rank: int, text: str) -> None:
    """Until a rank's line on the board has this in it."""
    store, key = _connect(), _line(rank)
    wait_until(lambda: store.check([key]) and text.encode() in store.get(key), 300.0, lambda: store.get(key).decode())


def _connect() -> dist.Store:
    connect = store_factory(-1, int(os.environ["WORLD_SIZE"]))
    assert connect is not None
    return connect()


def _settled(board: Board, store: dist.Store) -> bool:
    announced = store.get(_KEY) if store.check([_KEY]) else b""
    if not announced:
        return False
    hung = {int(rank) for rank in announced.split(b",")}
    seen, ahead = set[int](), [board.rank]
    while ahead:
        rank = ahead.pop()
        if rank not in seen:
            seen.add(rank)
            waits_for = board._read(rank, store).waits_for
            if not waits_for and rank not in hung:
                return False
            ahead += waits_for
    return hung <= seen
