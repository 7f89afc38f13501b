"""Carries a reshard plan out: local writes, messages in rounds of buckets, and the signals around a buffer's reuse."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from verl.flow.board import Board
from verl.flow.exchange import Posted, post
from verl.reshard.layout import Domain, Shards, volume, within
from verl.reshard.plan import Transfer, buckets, plan

BUCKET_BYTES = 64 << 20
READY, DONE = 1, 2
"""Tags of the two signals; messages of weights have tag 0."""

Ranks = Mapping[str, Sequence[int]]
"""Ranks by domain."""


@dataclass(frozen=True)
class Traffic:
    """Bytes that this rank moved in one load."""

    wire: int
    local: int


class WeightSync:
    """From the actor's shards to the rollout's memory, again and again by one plan.

    A domain's memory is written only after every reader has said that it is done with the last version.
    """

    def __init__(
        self,
        rank: int,
        shards: Shards,
        domains: Sequence[Domain],
        dtype: torch.dtype,
        group: dist.ProcessGroup,
        board: Board,
    ) -> None:
        """`dtype`: of the messages, the engine's own. `group`: a gloo group of all ranks that carries nothing else."""
        self.rank, self.dtype, self._group, self._board = rank, dtype, group, board
        self._shards, self._domains = shards, {d.name: d for d in domains}
        transfers = plan(shards, domains, dtype.itemsize)
        self._local = [t for t in transfers if t.src == t.dst == rank]
        self._rounds = buckets(transfers, BUCKET_BYTES)
        self.writers: Ranks = {d.name: sorted({t.dst for t in transfers if t.domain == d.name}) for d in domains}
        self.readers: Ranks = {d.name: d.readers for d in domains}
        self._done: list[Posted] | None = None
        """What this rank has said of the last load; its readers say that the memory is free, and nobody waits for that
        before the next one."""
        wire = sum(t.size for t in transfers if t.src == rank != t.dst)
        self.traffic = Traffic(wire, sum(t.size for t in self._local))

    @torch.no_grad()
    def run(
        self,
        sources: Mapping[str, Tensor],
        targets: Mapping[str, Mapping[str, Tensor]],
        read: Callable[[], None],
    ) -> None:
        """One load, on every rank.

        `sources`: this rank's training shards. `targets`: by domain the whole tensors that it writes. `read`, called on
        readers: this rank's engine takes what is in its domain.
        """
        self._await_done()
        for t in self._local:
            self._target(targets, t).copy_(self._source(sources, t))
        for messages in self._rounds:
            self._round(messages, sources, targets)
        told = self._tell(READY, self.writers, self.readers)
        self._hear(READY, self.writers, self.readers, told, "written weights")
        if any(self.rank in readers for readers in self.readers.values()):
            read()
        self._done = self._tell(DONE, self.readers, self.writers)

    def _round(
        self, messages: list[list[Transfer]], sources: Mapping[str, Tensor], targets: Mapping[str, Mapping[str, Tensor]]
    ) -> None:
        sends: list[Posted] = []
        receives: list[tuple[list[Transfer], dist.Work, Tensor]] = []
        for message in messages:
            src, dst = message[0].src, message[0].dst
            if src == self.rank:
                packed = torch.cat([self._source(sources, t).to(self.dtype).flatten().cpu() for t in message])
                sends.append(post(packed, dst, self._group, tag=0))
            elif dst == self.rank:
                buffer = torch.empty(sum(volume(t.box) for t in message), dtype=self.dtype)
                work = dist.irecv(buffer, src, group=self._group)
                assert work is not None
                receives.append((message, work, buffer))
        peers = {message[0].src for message, _, _ in receives} | {posted.dst for posted in sends}
        with self._board.waiting(sorted(peers), "weights"):
            for message, work, buffer in receives:
                work.wait()
                for t, part in zip(message, buffer.split([volume(t.box) for t in message]), strict=True):
                    target = self._target(targets, t)
                    target.copy_(part.view(target.shape))
            for posted in sends:
                posted.work.wait()
        self._board.beat()

    def _source(self, sources: Mapping[str, Tensor], t: Transfer) -> Tensor:
        return sources[t.name][within(t.box, self._shards.boxes[self.rank][t.name])]

    def _target(self, targets: Mapping[str, Mapping[str, Tensor]], t: Transfer) -> Tensor:
        return targets[t.domain][t.name][within(t.box, self._domains[t.domain].boxes[t.name])]

    # -- signals: a byte for each domain from everyone who has done a thing to everyone who waits for it ---------------

    def _tell(self, tag: int, tellers: Ranks, hearers: Ranks) -> list[Posted]:
        told = []
        for name in self._domains:
            if self.rank in tellers[name]:
                for dst in hearers[name]:
                    if dst != self.rank:
                        told.append(post(torch.zeros(1, dtype=torch.uint8), dst, self._group, tag))
        return told

    def _hear(self, tag: int, tellers: Ranks, hearers: Ranks, told: list[Posted], what: str) -> None:
        """Ends when all have spoken to this rank and all have heard what it has `told`."""
        awaited = []
        for name in self._domains:
            if self.rank in hearers[name]:
                awaited += [src for src in tellers[name] if src != self.rank]
        with self._board.waiting(sorted({*awaited, *(p.dst for p in told)}), what):
            for src in awaited:
                dist.recv(torch.empty(1, dtype=torch.uint8), src, group=self._group, tag=tag)
            for posted in told:
                posted.work.wait()

    def _await_done(self) -> None:
        if self._done is not None:
            what = "the engines to have read the last weights"
            self._hear(DONE, self.readers, self.writers, self._done, what)
            self._done = None

    def close(self) -> None:
        """The normal end, on every rank: the last load has been read."""
        self._await_done()
