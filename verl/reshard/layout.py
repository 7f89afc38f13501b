"""Which part of which tensor is where: training shards, and the memory that an engine reads its weights from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

Box = tuple[tuple[int, int], ...]
"""Part of a tensor in global coordinates: [low, high) for each dimension."""
Shapes = Mapping[str, tuple[int, ...]]
"""The whole shape of every parameter, by Hugging Face name."""


def whole(shape: tuple[int, ...]) -> Box:
    return tuple((0, size) for size in shape)


def volume(box: Box) -> int:
    return prod(high - low for low, high in box)


def intersect(a: Box, b: Box) -> Box | None:
    both = tuple((max(al, bl), min(ah, bh)) for (al, ah), (bl, bh) in zip(a, b, strict=True))
    return None if any(low >= high for low, high in both) else both


def within(box: Box, outer: Box) -> tuple[slice, ...]:
    """`box` as an index into the tensor that holds `outer`; dimensions at the end that it has all of are left out."""
    index = [slice(low - start, high - start) for (low, high), (start, _) in zip(box, outer, strict=True)]
    while index and box[len(index) - 1] == outer[len(index) - 1]:
        index.pop()
    return tuple(index)


def contiguous(box: Box, outer: Box) -> bool:
    """Whether `box` is one stretch of memory in a row-major tensor that holds `outer`."""
    partial = False
    for (low, high), (start, end) in zip(reversed(box), reversed(outer), strict=True):
        if partial and high - low > 1:
            return False
        partial = partial or (low, high) != (start, end)
    return True


def chunk(box: Box, dim: int, parts: int, index: int) -> Box:
    """Part `index` of `parts` along `dim`, cut as torch.chunk cuts: equal steps, so that the last parts may be short or
    empty.
    """
    low, high = box[dim]
    step = -(-(high - low) // parts)
    cut = min(low + index * step, high), min(low + (index + 1) * step, high)
    return (*box[:dim], cut, *box[dim + 1 :])


@dataclass(frozen=True)
class Domain:
    """Memory that takes each byte of the weights once, whoever reads it: a node's shared memory, or one rank's own
    parameters. All of its ranks are on one node.
    """

    name: str
    members: tuple[int, ...]
    """Ranks that write into it without a message."""
    readers: tuple[int, ...]
    """Members whose engine runs what is in it; they also take what comes from elsewhere."""
    boxes: Mapping[str, Box]
    slots: int | None = None
    """Buckets that it has room for: a bucket is overwritten once every reader has taken it. None: all of the weights
    stay, as parameters do."""

    def __post_init__(self) -> None:
        assert set(self.readers) <= set(self.members), self.name


@dataclass(frozen=True)
class Shards:
    """The training side. Ranks may hold the same box of a parameter; different boxes of one are disjoint."""

    boxes: Mapping[int, Mapping[str, Box]]
    """rank -> parameter -> the box that it holds"""
    node_of: Mapping[int, str]

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of the parameters, whole: as far as the boxes of all ranks reach."""
        shapes: dict[str, tuple[int, ...]] = {}
        for boxes in self.boxes.values():
            for name, box in boxes.items():
                reached = shapes.get(name, (0,) * len(box))
                shapes[name] = tuple(max(size, high) for size, (_, high) in zip(reached, box, strict=True))
        return shapes
