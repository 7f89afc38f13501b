"""The messages of one step of a load, from when they are posted until they have been received."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from verl.flow.board import Board
from verl.reshard.schedule import TAKEN_TAGS, Copy, Message, Place
from verl.reshard.staging import Parts, Staging, unpack

Target = Callable[[int], Mapping[str, Tensor]]
"""Number of a bucket -> tensors of a domain, as it has them; those of that bucket at least."""


class Views:
    """What a step's places are, as views of the tensors that this rank has."""

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
    message: Message
    posted: _Posted
    parts: Parts


class Flight:
    """Posts the messages of a step, and waits for them."""

    def __init__(
        self, rank: int, group: dist.ProcessGroup, board: Board, views: Views, staging: Staging, number: int
    ) -> None:
        """`number`: of the step."""
        self._rank, self._group, self._board, self.views = rank, group, board, views
        self._staging, self._region = staging, staging.region(number)
        self._packed: dict[int, Tensor] = {}
        self._coming: list[_Coming] = []
        self._passed_on: list[_Posted] = []
        """Sent from memory that the next step may write."""
        self._left: list[_Posted] = []
        """What else has been sent, and perhaps not been received yet."""

    def post(self, messages: Sequence[Message]) -> None:
        """What is received first: it can come while the rest is packed."""
        for m in sorted(messages, key=lambda m: m.src == self._rank):
            parts = self.views.parts(m)
            if m.content is None:
                memory = torch.empty(1, dtype=torch.int64) if m.shared else self._region.place(parts)
                self._coming.append(_Coming(m, self._receive(memory, m.src, m.tag), parts))
            else:
                self._depart(m, self._pack(m.content, parts, m.shared))

    def _pack(self, content: int, parts: Parts, shared: bool) -> Tensor:
        """Once, if it goes to several ranks. `shared`: it is to lie where another rank can read it."""
        packed = self._packed.get(content)
        if packed is None or (shared and not self._staging.holds(packed)):
            packed = self._packed[content] = self._region.pack(parts, in_place=not shared)
        return packed

    def _depart(self, m: Message, packed: Tensor) -> None:
        if m.shared:
            self._left.append(self._send(self._staging.notice(packed), m.dst, m.tag))
            self._left.append(self._receive(torch.empty(1, dtype=torch.uint8), m.dst, TAKEN_TAGS + m.tag))
        else:
            (self._left if m.early else self._passed_on).append(self._send(packed, m.dst, m.tag))

    def arrive(self) -> None:
        """Puts what has been posted where it belongs as it comes. What was sent from memory that the next step may
        write has been received too.
        """
        peers = {p.peer for p in self._passed_on} | {coming.posted.peer for coming in self._coming}
        with self._board.waiting(sorted(peers), "weights"):
            for m, posted, parts in self._coming:
                posted.work.wait()
                if m.shared:
                    unpack(self._staging.of_peer(m.src, posted.memory, m.numel), parts)
                    self._left.append(self._send(torch.zeros(1, dtype=torch.uint8), m.src, TAKEN_TAGS + m.tag))
                else:
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
