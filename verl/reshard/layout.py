"""Which part of which tensor is where: training shards, and the memory that an engine reads its weights from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

Box = tuple[tuple[int, int], ...]
"""Part of a tensor in global coordinates: [low, high) for each dimension."""


def whole(shape: tuple[int, ...]) -> Box:
    return tuple((0, size) for size in shape)


def volume(box: Box) -> int:
    return prod(high - low for low, high in box)


def intersect(a: Box, b: Box) -> Box | None:
    both = tuple((max(al, bl), min(ah, bh)) for (al, ah), (bl, bh) in zip(a, b, strict=True))
    return None if any(low >= high for low, high in both) else both


def within(box: Box, outer: Box) -> tuple[slice, ...]:
    """`box` as an index into the tensor that holds `outer`."""
    return tuple(slice(low - start, high - start) for (low, high), (start, _) in zip(box, outer, strict=True))


@dataclass(frozen=True)
class Domain:
    """Memory that takes whole weights once, whoever reads them: a node's shared buffer, or one rank's parameters."""

    name: str
    members: tuple[int, ...]
    """Ranks that write into it without a message."""
    readers: tuple[int, ...]
    """Ranks whose engine runs what is in it; the first also takes what comes from other nodes."""
    boxes: Mapping[str, Box]

    @property
    def receiver(self) -> int:
        return self.readers[0]


@dataclass(frozen=True)
class Shards:
    """The training side. Ranks may hold the same box of a parameter; different boxes of one are disjoint."""

    boxes: Mapping[int, Mapping[str, Box]]
    """rank -> parameter -> the box that it holds"""
    node_of: Mapping[int, str]
