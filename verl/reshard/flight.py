"""The messages of one step of a load, from when they are posted until they have been received."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from verl.flow.board import Board
from verl.reshard.schedule import Copy, Message, Place
from verl.reshard.signals import Signals
from verl.reshard.staging import Parts, Region, unpack

Target = Callable[[int], Mapping[str, Tensor]]
"""Number of a bucket -> tensors of a domain, as it has them; those of that bucket at least."""


class Views:
    """What a step's places are, as views of the tensors that this rank has or can write into."""

    def __init__(self, filled: Mapping[str, int], sources: Mapping[str, Tensor], targets: Mapping[str, Target]) -> None:
        self._filled, self._sources, self._targets = filled, sources, targets
        self._shards: dict[str, Tensor] = {}
        self._memory: dict[tuple[str, int], Mapping[str, Tensor]] = {}

    def parts(self, message: Message) -> Parts:
        return [self._view(place, message.domain) for place in message.places]

    def copy(self, copies: Sequence[Copy]) -> None:
        for transfer, source, target in copies:
            here, there = self._view(source, transfer.domain), self._view(target, transfer.domain)
            if here.data_ptr() != there.data_ptr():  # else the engine computes with the trainer's own tensor
                there.copy_(here)

    def forget(self) -> None:
        """The step is over: what was made for it is freed."""
        self._shards.clear()
        self._memory.clear()

    def _view(self, place: Place, domain: str) -> Tensor:
        """`domain`: where the part goes; it tells which bucket it is of."""
        if place.domain is None:
            if place.name not in self._shards:
                self._shards[place.name] = self._sources[place.name]  # once a step: it may be made only now
            tensor = self._shards[place.name]
        else:
            key = place.domain, self._filled[domain]
            if key not in self._memory:
                self._memory[key] = self._targets[place.domain](self._filled[domain])
            tensor = self._memory[key][place.name]
        return tensor[place.index] if place.index else tensor


class _Posted(NamedTuple):
    peer: int
    work: dist.Work
    memory: Tensor
    """Of what is sent or received."""


class _Coming(NamedTuple):
    posted: _Posted
    parts: Parts | None
    """None: it is written where it belongs, and what comes says that it is there."""


class Flight:
    """Posts the messages of a step, and waits for them."""

    def __init__(
        self,
        rank: int,
        group: dist.ProcessGroup,
        board: Board,
        signals: Signals,
        views: Views,
        region: Region,
    ) -> None:
        self._rank, self._group, self._board, self._signals = rank, group, board, signals
        self.views, self._region = views, region
        self._packed: dict[int, Tensor] = {}
        self._coming: list[_Coming] = []
        self._passed_on: list[_Posted] = []
        """Sent from memory that the next step may write."""
        self._left: list[_Posted] = []
        """What else has been sent, and perhaps not been received yet."""

    def post(self, messages: Sequence[Message]) -> None:
        """What is received first, and what is written by this rank last: the rest can be on its way meanwhile."""
        for m in (m for m in messages if m.dst == self._rank and (m.told or not m.direct)):
            parts = None if m.direct else self.views.parts(m)
            memory = torch.empty(1, dtype=torch.uint8) if parts is None else self._region.place(parts)
            self._coming.append(_Coming(self._receive(memory, m.src, m.tag), parts))
        for m in (m for m in messages if m.content is not None):
            (self._left if m.early else self._passed_on).append(self._send(self._pack(m), m.dst, m.tag))
        for m in (m for m in messages if m.direct and m.src == self._rank):
            self._signals.await_open(m.dst)
            self.views.copy(m.copies)
            if m.told:
                self._signals.tell_written(m.dst, m.tag)

    def _pack(self, m: Message) -> Tensor:
        """Once, if it goes to several ranks."""
        assert m.content is not None
        if m.content not in self._packed:
            self._packed[m.content] = self._region.pack(self.views.parts(m))
        return self._packed[m.content]

    def arrive(self) -> None:
        """What has been posted is where it belongs, and what was sent from memory that the next step may write has been
        received too.
        """
        peers = {p.peer for p in self._passed_on} | {coming.posted.peer for coming in self._coming}
        with self._board.waiting(sorted(peers), "weights"):
            for posted, parts in self._coming:
                posted.work.wait()
                if parts is not None:
                    unpack(posted.memory, parts)
            for posted in self._passed_on:
                posted.work.wait()
        self._coming.clear()
        self._passed_on.clear()

    def land(self) -> None:
        """Everything has been received: the memory is free."""
        with self._board.waiting(sorted({posted.peer for posted in self._left}), "weights"):
            for posted in self._left:
                posted.work.wait()
        self._left.clear()

    def _send(self, memory: Tensor, dst: int, tag: int) -> _Posted:
        return _Posted(dst, _in_group(dist.isend(memory, dst, self._group, tag)), memory)

    def _receive(self, memory: Tensor, src: int, tag: int) -> _Posted:
        return _Posted(src, _in_group(dist.irecv(memory, src, self._group, tag)), memory)


def _in_group(work: dist.Work | None) -> dist.Work:
    assert work is not None, "the group has all ranks"
    return work


class Flights:
    """Two steps' messages at a time, as far as there is memory for both."""

    def __init__(self, depart: Callable[[int], Flight], beside: Sequence[bool]) -> None:
        """`depart`: posts what a step may post early. `beside`: whether each step has room beside the one before."""
        self._depart, self._beside = depart, beside
        self._in_air: dict[int, Flight] = {}

    def of(self, number: int) -> Flight:
        """The step's; it may have departed already."""
        if number not in self._in_air:
            self.depart(number)
        return self._in_air[number]

    def depart(self, number: int) -> None:
        oldest = number - 1 if self._beside[number] else number
        for older in [n for n in self._in_air if n < oldest]:
            self._in_air.pop(older).land()
        self._in_air[number] = self._depart(number)

    def depart_early(self, number: int) -> None:
        """Where there is such a step, and room for it."""
        if number < len(self._beside) and self._beside[number]:
            self.depart(number)

    def land(self) -> None:
        for flight in self._in_air.values():
            flight.land()
