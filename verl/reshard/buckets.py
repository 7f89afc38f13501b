"""The weights cut into buckets: what is on its way at one time, and what a node's memory holds of them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import prod

from verl.reshard.layout import Shapes

Buckets = tuple[tuple[str, ...], ...]
"""The parameters of each bucket."""

SLOTS = 2
"""Buckets that a memory which engines read has room for: one is written while they read the other."""
_BLOCK = re.compile(r"(.*?\.\d+\.[^.]+)\.")
"""A layer's attention or MLP, of which engines fuse parts: q, k and v into one matrix, all experts into another."""


def cut_buckets(shapes: Shapes, itemsize: int, limit: int) -> Buckets:
    """Every parameter in one bucket, in order, those that an engine fuses in the same one. A bucket has up to `limit`
    bytes, or is one such block that has more.
    """
    blocks: dict[str, list[str]] = {}
    for name in shapes:
        found = _BLOCK.match(name)
        blocks.setdefault(found[1] if found else name, []).append(name)
    buckets: list[list[str]] = []
    room = 0
    for block in blocks.values():
        size = sum(prod(shapes[name]) * itemsize for name in block)
        if not buckets or size > room:
            buckets.append([])
            room = limit
        buckets[-1] += block
        room -= size
    return tuple(tuple(bucket) for bucket in buckets)


def bucket_of(buckets: Buckets) -> Mapping[str, int]:
    """The number of each parameter's bucket."""
    return {name: number for number, bucket in enumerate(buckets) for name in bucket}


def largest_bucket(buckets: Buckets, shapes: Shapes, itemsize: int) -> int:
    """In bytes."""
    return max((sum(prod(shapes[name]) * itemsize for name in bucket) for bucket in buckets), default=0)
