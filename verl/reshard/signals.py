"""Single bytes between the ranks that write into memory and those whose engine reads it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from verl.flow.board import Board
from verl.flow.exchange import Posted, post
from verl.reshard.buckets import Buckets, bucket_of
from verl.reshard.layout import Domain
from verl.reshard.plan import Transfer

READY, TAKEN, END, OPEN = 1, 2, 3, 4
"""Tags; messages of weights have those of `verl.reshard.schedule`."""

Filled = Mapping[str, int]
"""Domain -> number of a bucket."""


class Signals:
    """A slot is read when all of its writers are done, and written again when all of its readers are. A rank's own
    parameters are open to other ranks from when its load begins, since it reads them after the load only.

    Every method without a rank is called on all ranks in the same order; it does what this rank has to do. Those of
    `await_` may wait for other ranks, the others do not.
    """

    def __init__(
        self,
        rank: int,
        domains: Sequence[Domain],
        transfers: Sequence[Transfer],
        buckets: Buckets,
        neighbours: Sequence[int],
        group: dist.ProcessGroup,
        board: Board,
    ) -> None:
        """`neighbours`: the ranks that write into this one's parameters."""
        self._rank, self._group, self._board = rank, group, board
        self._domains = {domain.name: domain for domain in domains}
        self._num_buckets = len(buckets)
        self._writers = _writers(transfers, buckets)
        self._neighbours = neighbours
        self._opened: set[int] = set()
        self._posted: list[Posted] = []
        self._loaded = False
        """Whether there is a load whose end is still to be awaited."""

    def tell_open(self) -> None:
        """This rank's engine takes weights from now on."""
        self._opened.clear()
        self._tell(OPEN, self._neighbours)

    def await_open(self, rank: int) -> None:
        """This rank may write into that one's parameters, for the rest of the load."""
        if rank not in self._opened:
            self._hear(OPEN, [rank], "the engine to take weights")
            self._opened.add(rank)

    def tell_written(self, rank: int, tag: int) -> None:
        """The message of this tag is in that rank's parameters."""
        self._tell(tag, [rank])

    def await_slots(self, filled: Filled) -> None:
        """The buckets that were in the slots of these ones have been taken by every reader."""
        for name, bucket in filled.items():
            slots = self._domains[name].slots
            if slots is not None and bucket >= slots and self._rank in self._writers_of(name, bucket):
                self._hear(TAKEN, self._domains[name].readers, "the engines to take weights")

    def tell_ready(self, filled: Filled) -> None:
        """This rank has written its part of these buckets."""
        for name, bucket in filled.items():
            if self._rank in self._writers_of(name, bucket):
                self._tell(READY, self._domains[name].readers)

    def await_ready(self, name: str, bucket: int) -> None:
        """All of a bucket is written."""
        self._hear(READY, self._writers_of(name, bucket), "written weights")

    def tell_taken(self, name: str, bucket: int) -> None:
        """This rank's engine has taken a bucket in; whoever writes the next one into its slot hears of it."""
        slots = self._domains[name].slots
        if slots is not None and bucket + slots < self._num_buckets:
            self._tell(TAKEN, self._writers_of(name, bucket + slots))

    def tell_end(self) -> None:
        """This rank's engine has taken everything in."""
        for name, domain in self._domains.items():
            if self._rank in domain.readers:
                self._tell(END, self._writers_of_any(name))
        self._loaded = True

    def await_end(self) -> None:
        """Every reader has taken in all of the last load, if there was one."""
        if not self._loaded:
            return
        self._loaded = False
        for name, domain in self._domains.items():
            if self._rank in self._writers_of_any(name):
                self._hear(END, domain.readers, "the engines to have read the last weights")
        with self._board.waiting(sorted({posted.dst for posted in self._posted}), "the receipt of the last weights"):
            for posted in self._posted:
                posted.work.wait()
        self._posted.clear()

    def _writers_of(self, name: str, bucket: int) -> Sequence[int]:
        return self._writers.get((name, bucket), ())

    def _writers_of_any(self, name: str) -> Sequence[int]:
        return sorted({rank for (domain, _), ranks in self._writers.items() if domain == name for rank in ranks})

    def _tell(self, tag: int, ranks: Sequence[int]) -> None:
        for dst in ranks:
            if dst != self._rank:
                self._posted.append(post(torch.zeros(1, dtype=torch.uint8), dst, self._group, tag))

    def _hear(self, tag: int, ranks: Sequence[int], what: str) -> None:
        others = [rank for rank in ranks if rank != self._rank]
        with self._board.waiting(others, what):
            for src in others:
                dist.recv(torch.empty(1, dtype=torch.uint8), src, group=self._group, tag=tag)


def _writers(transfers: Sequence[Transfer], buckets: Buckets) -> dict[tuple[str, int], list[int]]:
    """The ranks that write each bucket of each domain."""
    number_of = bucket_of(buckets)
    writers: dict[tuple[str, int], set[int]] = {}
    for t in transfers:
        writers.setdefault((t.domain, number_of[t.name]), set()).add(t.dst)
    return {key: sorted(ranks) for key, ranks in writers.items()}
