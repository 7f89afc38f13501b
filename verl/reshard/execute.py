"""Carries a reshard plan out, bucket by bucket: own copies, messages, and engines that take in what is whole."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from verl.flow.board import Board
from verl.flow.window import Address
from verl.reshard.buckets import Buckets, largest_bucket
from verl.reshard.flight import Flight, Flights, Target, Views
from verl.reshard.layout import Domain, Shards
from verl.reshard.plan import lags, plan
from verl.reshard.schedule import Step, make_steps
from verl.reshard.signals import Signals
from verl.reshard.staging import Staging


class Reader(Protocol):
    """An engine that takes the weights of a domain.

    It is told of buckets where they lie in slots. What is in its own parameters has been taken in.
    """

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
    """To other ranks: sent, or written into their memory."""
    local: int
    """Written from its own shards."""


class WeightSync:
    """From the actor's shards to the rollout's memory, again and again by one plan.

    Parameters of other ranks of its node a rank writes itself, where it has their address; else it sends messages.
    While a step's are on their way, it packs and sends what the next step has of its own shards, as far as the memory
    of two buckets goes. While a domain's readers take one bucket in, its writers fill the next slot. The end of a load
    is awaited at the start of the next one: ranks that only write go on with their work.
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
        on_host: bool = True,
        addresses: Mapping[str, Address] | None = None,
    ) -> None:
        """Collective. `dtype`: of the messages, the engine's own. `group`: a gloo group of all ranks that carries
        nothing else. `on_host`: the domains that this rank is a member of are in host memory. `addresses`: of its own
        parameters, by domain, where other ranks of the node can write what they have of them
        (`verl.reshard.schedule.from_neighbours`); without one it comes by messages.
        """
        self.rank, self._group, self._board = rank, group, board
        self._domains = {domain.name: domain for domain in domains}
        transfers = plan(shards, domains, dtype.itemsize)
        opened = self._gather(addresses or {})
        self._steps = make_steps(rank, transfers, shards, domains, buckets, lags(shards, domains), opened)
        direct = [m for step in self._steps for turn in step.rounds for m in turn if m.direct]
        beyond = {name: opened[name].open() for name in {m.domain for m in direct if m.src == rank}}
        self._beyond: dict[str, Target] = {name: lambda _, found=found: found for name, found in beyond.items()}
        """Other ranks' parameters that this one writes into."""
        neighbours = sorted({m.src for m in direct if m.dst == rank})
        self._signals = Signals(rank, domains, transfers, buckets, neighbours, group, board)
        staged = [step.staged(on_host) for step in self._steps]
        together = [here + before for here, before in zip(staged, [0, *staged], strict=False)]  # none: no steps
        limit = 2 * largest_bucket(buckets, shards.shapes(), dtype.itemsize)
        self._beside = [numel * dtype.itemsize <= limit for numel in together]
        """Whether each step has room beside the one before."""
        needed = [both if fits else here for here, both, fits in zip(staged, together, self._beside, strict=True)]
        self._staging = Staging(dtype, max(needed, default=0))
        self._taking: tuple[str, int] | None = None
        self.traffic = Traffic(
            sum(t.size for t in transfers if t.src == rank != t.dst),
            sum(t.size for t in transfers if t.src == t.dst == rank),
        )

    @property
    def staging_bytes(self) -> int:
        """Memory that this rank keeps for messages that are not sent and received where their tensors lie: of two
        steps, as far as that is no more than two buckets, else of one."""
        return self._staging.num_bytes

    @torch.no_grad()
    def run(self, sources: Mapping[str, Tensor], targets: Mapping[str, Target], reader: Reader | None) -> None:
        """One load, on every rank. When it returns, this rank's reader has taken everything in.

        `sources`: this rank's training shards; each is asked for once in every step that needs it, and may be made only
        then. `targets`: of the domains that it is a member of. `reader`: on ranks that read.
        """
        self._signals.await_end()
        if reader is not None:
            reader.begin_load()
        self._signals.tell_open()
        flights = Flights(partial(self._depart, sources, {**targets, **self._beyond}), self._beside)
        for number, step in enumerate(self._steps):
            self._signals.await_slots(step.filled)
            flight = flights.of(number)
            self._carry_out(step, flight, partial(flights.depart_early, number + 1))
            self._signals.tell_ready(step.filled)
            for name, bucket in step.filled.items():
                domain = self._domains[name]
                if self.rank in domain.readers and domain.slots is not None:
                    assert reader is not None
                    self._signals.await_ready(name, bucket)
                    self._await_taken(reader)
                    reader.take_bucket(bucket)
                    self._taking = name, bucket
            self._board.beat()
        flights.land()
        if reader is not None:
            self._await_taken(reader)
        self._signals.tell_end()

    def close(self) -> None:
        """The normal end, on every rank: the last load has been read."""
        self._signals.await_end()

    def _gather(self, addresses: Mapping[str, Address]) -> dict[str, Address]:
        """Those of all ranks."""
        found: list[Any] = [None] * self._group.size()
        with self._board.waiting([rank for rank in range(len(found)) if rank != self.rank], "start-up"):
            dist.all_gather_object(found, dict(addresses), group=self._group)
        return {name: address for mine in found for name, address in mine.items()}

    def _await_taken(self, reader: Reader) -> None:
        if self._taking is not None:
            reader.await_bucket()
            self._signals.tell_taken(*self._taking)
            self._taking = None

    def _depart(self, sources: Mapping[str, Tensor], targets: Mapping[str, Target], number: int) -> Flight:
        step = self._steps[number]
        views = Views(step.filled, sources, targets)
        flight = Flight(self.rank, self._group, self._board, self._signals, views, self._staging.region(number))
        flight.post([m for turn in step.rounds for m in turn if m.early])
        return flight

    def _carry_out(self, step: Step, flight: Flight, meanwhile: Callable[[], None]) -> None:
        """`meanwhile`: what there is to do while messages are on their way."""
        for number, turn in enumerate(step.rounds or [[]]):
            flight.post([m for m in turn if not m.early])
            if number == 0:
                flight.views.copy(step.copies)
                meanwhile()
            flight.arrive()
        flight.views.forget()
