"""Carries a reshard plan out, bucket by bucket: own copies, messages, and engines that take in what is whole."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from verl.flow.board import Board
from verl.reshard.buckets import Buckets
from verl.reshard.layout import Box, Domain, Shards, within
from verl.reshard.plan import Transfer, lags, plan
from verl.reshard.schedule import Message, Step, make_steps
from verl.reshard.signals import Signals
from verl.reshard.staging import Staging

Target = Callable[[int], Mapping[str, Tensor]]
"""Number of a bucket -> tensors of a domain, as it has them; those of that bucket at least."""


class Reader(Protocol):
    """An engine that takes the weights of a domain."""

    def begin_load(self) -> None:
        """From now on its weights are of no version, until the load is committed."""
        ...

    def take_bucket(self, number: int) -> None:
        """The bucket is whole: begin to take it in, and return."""
        ...

    def await_bucket(self) -> None:
        """Returns when that bucket may be overwritten."""
        ...


@dataclass(frozen=True)
class Traffic:
    """Bytes that this rank moves in one load."""

    wire: int
    """Sent to other ranks."""
    local: int
    """Written from its own shards."""


class WeightSync:
    """From the actor's shards to the rollout's memory, again and again by one plan.

    While a domain's readers take one bucket in, its writers fill the next slot. The end of a load is awaited at the
    start of the next one: ranks that only write go on with their work.
    """

    def __init__(
        self,
        rank: int,
        shards: Shards,
        domains: Sequence[Domain],
        buckets: Buckets,
        dtype: torch.dtype,
        group: dist.ProcessGroup,
        board: Board,
    ) -> None:
        """`dtype`: of the messages, the engine's own. `group`: a gloo group of all ranks that carries nothing else."""
        self.rank, self._group, self._board = rank, group, board
        self._shards, self._domains = shards, {domain.name: domain for domain in domains}
        transfers = plan(shards, domains, dtype.itemsize)
        self._steps = make_steps(rank, transfers, domains, buckets, lags(shards, domains))
        self._signals = Signals(rank, domains, transfers, buckets, group, board)
        self._outgoing, self._incoming = Staging(dtype), Staging(dtype)
        self._taking: tuple[str, int] | None = None
        self.traffic = Traffic(
            sum(t.size for t in transfers if t.src == rank != t.dst),
            sum(t.size for t in transfers if t.src == t.dst == rank),
        )

    @property
    def staging_bytes(self) -> int:
        """Memory that this rank keeps for messages that are not sent and received where their tensors lie: of one
        step, so one bucket at most in each direction."""
        return self._outgoing.num_bytes + self._incoming.num_bytes

    @torch.no_grad()
    def run(self, sources: Mapping[str, Tensor], targets: Mapping[str, Target], reader: Reader | None) -> None:
        """One load, on every rank. When it returns, this rank's reader has taken everything in.

        `sources`: this rank's training shards. `targets`: of the domains that it is a member of. `reader`: on ranks
        that read.
        """
        self._signals.await_end()
        if reader is not None:
            reader.begin_load()
        held = self._shards.boxes.get(self.rank, {})
        for step in self._steps:
            self._signals.await_slots(step.filled)
            self._move(step, _Views(held, self._domains, step.filled, sources, targets))
            self._signals.tell_ready(step.filled)
            for name, bucket in step.filled.items():
                if self.rank in self._domains[name].readers:
                    assert reader is not None
                    self._signals.await_ready(name, bucket)
                    self._await_taken(reader)
                    reader.take_bucket(bucket)
                    self._taking = name, bucket
            self._board.beat()
        if reader is not None:
            self._await_taken(reader)
        self._signals.tell_end()

    def close(self) -> None:
        """The normal end, on every rank: the last load has been read."""
        self._signals.await_end()

    def _await_taken(self, reader: Reader) -> None:
        if self._taking is not None:
            reader.await_bucket()
            self._signals.tell_taken(*self._taking)
            self._taking = None

    # -- one step ------------------------------------------------------------------------------------------------------

    def _move(self, step: Step, views: _Views) -> None:
        messages = [m for turn in step.rounds for m in turn]
        incoming = {m: views.received(m) for m in messages if m.dst == self.rank}
        outgoing = {m.content: views.sent(m) for m in messages if m.src == self.rank}  # to several ranks: packed once
        self._incoming.begin(incoming.values())
        self._outgoing.begin(outgoing.values())
        packed: dict[object, Tensor] = {}
        copies: Sequence[Transfer] = step.copies
        for turn in step.rounds:
            operations = []
            for m in turn:
                if m.dst == self.rank:
                    operations.append(dist.P2POp(dist.irecv, self._incoming.place(incoming[m]), m.src, self._group))
                    continue
                if m.content not in packed:
                    packed[m.content] = self._outgoing.pack(outgoing[m.content])
                operations.append(dist.P2POp(dist.isend, packed[m.content], m.dst, self._group))
            works = dist.batch_isend_irecv(operations) if operations else []
            views.copy(copies)  # while the first messages are on their way
            copies = ()
            with self._board.waiting(sorted({m.src if m.dst == self.rank else m.dst for m in turn}), "weights"):
                for work in works:
                    work.wait()
            for m, operation in zip(turn, operations, strict=True):
                if m.dst == self.rank:
                    self._incoming.unpack(operation.tensor, incoming[m])
        views.copy(copies)


@dataclass(frozen=True)
class _Views:
    """What transfers move, as views of the tensors that this rank has."""

    boxes: Mapping[str, Box]
    """Of its training shards."""
    domains: Mapping[str, Domain]
    filled: Mapping[str, int]
    sources: Mapping[str, Tensor]
    targets: Mapping[str, Target]

    def sent(self, message: Message) -> list[Tensor]:
        return [self._source(t) if t.origin is None else self._part(t, t.origin) for t in message.transfers]

    def received(self, message: Message) -> list[Tensor]:
        return [self._part(t, t.domain) for t in message.transfers]

    def copy(self, copies: Sequence[Transfer]) -> None:
        for t in copies:
            here, there = self._source(t), self._part(t, t.domain)
            if here.data_ptr() != there.data_ptr():  # else the engine computes with the trainer's own tensor
                there.copy_(here)

    def _source(self, t: Transfer) -> Tensor:
        return self.sources[t.name][within(t.box, self.boxes[t.name])]

    def _part(self, t: Transfer, domain: str) -> Tensor:
        tensors = self.targets[domain](self.filled[t.domain])
        return tensors[t.name][within(t.box, self.domains[domain].boxes[t.name])]
