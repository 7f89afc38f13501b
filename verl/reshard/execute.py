"""Carries a reshard plan out: local writes, messages in rounds of buckets, and the signals around a buffer's reuse."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from verl.flow.board import Board
from verl.reshard.layout import Domain, Shards, volume, within
from verl.reshard.plan import Transfer, buckets, plan

BUCKET_BYTES = 64 << 20
READY, DONE = 1, 2
"""Tags of the two signals; messages of weights have tag 0."""


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
        self.writers = {d.name: sorted({t.dst for t in transfers if t.domain == d.name}) for d in domains}
        self._loads = 0
        wire = sum(t.size for t in transfers if t.src == rank != t.dst)
        self.traffic = Traffic(wire, sum(t.size for t in self._local))

    @property
    def participates(self) -> bool:
        return (
            any(self.rank in d.readers for d in self._domains.values())
            or any(self.rank in (t.src, t.dst) for message in self._rounds for ts in message for t in ts)
            or bool(self._local)
        )

    @torch.no_grad()
    def run(
        self,
        sources: Mapping[str, Tensor],
        targets: Mapping[str, Mapping[str, Tensor]],
        read: Callable[[], None],
    ) -> None:
        """`sources`: this rank's training shards. `targets`: by domain the whole tensors that it writes. `read` makes this
        rank's engine take what is in its domain.
        """
        self._await_done()
        for t in self._local:
            self._target(targets, t).copy_(self._source(sources, t))
        for messages in self._rounds:
            self._round(messages, sources, targets)
        self._signal(READY, self.writers, {d.name: d.readers for d in self._domains.values()}, "written weights")
        mine = [d for d in self._domains.values() if self.rank in d.readers]
        if mine:
            read()
        self._loads += 1
        self._post_done()

    def _round(
        self, messages: list[list[Transfer]], sources: Mapping[str, Tensor], targets: Mapping[str, Mapping[str, Tensor]]
    ) -> None:
        sends: list[tuple[dist.Work | None, Tensor]] = []
        receives: list[tuple[list[Transfer], dist.Work | None, Tensor]] = []
        for ts in messages:
            if ts[0].src == self.rank:
                packed = torch.cat([self._source(sources, t).to(self.dtype).flatten().cpu() for t in ts])
                sends.append((dist.isend(packed, ts[0].dst, group=self._group), packed))
            elif ts[0].dst == self.rank:
                buffer = torch.empty(sum(volume(t.box) for t in ts), dtype=self.dtype)
                receives.append((ts, dist.irecv(buffer, ts[0].src, group=self._group), buffer))
        with self._board.waiting(sorted({ts[0].src for ts, _, _ in receives}), "weights"):
            for ts, work, buffer in receives:
                assert work is not None
                work.wait()
                for t, part in zip(ts, buffer.split([volume(t.box) for t in ts]), strict=True):
                    target = self._target(targets, t)
                    target.copy_(part.view(target.shape))
            for work, _ in sends:
                assert work is not None
                work.wait()
        self._board.beat()

    def _source(self, sources: Mapping[str, Tensor], t: Transfer) -> Tensor:
        return sources[t.name][within(t.box, self._shards.boxes[self.rank][t.name])]

    def _target(self, targets: Mapping[str, Mapping[str, Tensor]], t: Transfer) -> Tensor:
        return targets[t.domain][t.name][within(t.box, self._domains[t.domain].boxes[t.name])]

    # -- signals: a byte from everyone who has done a thing to everyone who waits for it -----------------------------

    def _signal(
        self, tag: int, senders: Mapping[str, Sequence[int]], receivers: Mapping[str, Sequence[int]], what: str
    ) -> None:
        works, awaited = self._post(tag, senders, receivers), []
        for name in self._domains:
            if self.rank in receivers[name]:
                awaited += [src for src in senders[name] if src != self.rank]
        with self._board.waiting(awaited, what):
            for src in awaited:
                dist.recv(torch.empty(1, dtype=torch.uint8), src, group=self._group, tag=tag)
            for work, _ in works:
                work.wait()

    def _post(
        self, tag: int, senders: Mapping[str, Sequence[int]], receivers: Mapping[str, Sequence[int]]
    ) -> list[tuple[dist.Work, Tensor]]:
        works = []
        for name in self._domains:
            if self.rank in senders[name]:
                for dst in receivers[name]:
                    if dst != self.rank:
                        byte = torch.zeros(1, dtype=torch.uint8)
                        work = dist.isend(byte, dst, group=self._group, tag=tag)
                        assert work is not None
                        works.append((work, byte))
        return works

    def _post_done(self) -> None:
        """Readers say that the buffer is free; writers hear it at the start of the next load, so nobody waits now."""
        self._done = self._post(DONE, {d.name: d.readers for d in self._domains.values()}, self.writers)

    def _await_done(self) -> None:
        if self._loads == 0:
            return
        awaited = [
            src
            for d in self._domains.values()
            if self.rank in self.writers[d.name]
            for src in d.readers
            if src != self.rank
        ]
        with self._board.waiting(awaited, "the engines to have read the last weights"):
            for src in awaited:
                dist.recv(torch.empty(1, dtype=torch.uint8), src, group=self._group, tag=DONE)
            for work, _ in self._done:
                work.wait()

    def close(self) -> None:
        self._await_done()
