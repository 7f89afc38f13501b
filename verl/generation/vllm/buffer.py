"""Weights on their way, in a piece of memory that the ranks of a node and the engines on it share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from verl.flow.node_memory import NodeMemory

Layout = Sequence[tuple[str, tuple[int, ...], torch.dtype]]

_ALIGNMENT = 64  # bytes: a cache line, and the widest vector load


class WeightBuffer:
    """Slots for buckets of weights, in memory that a node shares.

    Bucket b lies in slot b % slots: its tensors whole, one behind the other, each on a 64-byte boundary.
    """

    def __init__(self, buckets: Sequence[Layout], slots: int):
        """Makes the memory, zeroed. `buckets`: name, shape and dtype of every tensor, in the order of the memory."""
        self._attach(NodeMemory(_total_size(buckets, slots)), buckets, slots)

    @classmethod
    def open(cls, path: str, buckets: Sequence[Layout], slots: int) -> WeightBuffer:
        """The same memory from another process of the node; all arguments are those of the one that made it."""
        memory = NodeMemory.open(path, _total_size(buckets, slots))
        buffer = cls.__new__(cls)
        buffer._attach(memory, buckets, slots)
        return buffer

    def _attach(self, memory: NodeMemory, buckets: Sequence[Layout], slots: int) -> None:
        self._memory = memory
        self.path, self.num_bytes, self.memory = memory.path, memory.num_bytes, memory.bytes
        self.buckets = tuple(tuple((name, tuple(shape), dtype) for name, shape, dtype in bucket) for bucket in buckets)
        self.slots = slots
        self._tensors = [self._lay_out(number) for number in range(len(self.buckets))]

    def _lay_out(self, number: int) -> dict[str, Tensor]:
        tensors: dict[str, Tensor] = {}
        offset = number % self.slots * (self.num_bytes // self.slots)
        for name, shape, dtype in self.buckets[number]:
            length = num_bytes(shape, dtype)
            tensors[name] = self.memory[offset : offset + length].view(dtype).view(shape)
            offset += _aligned(length)
        return tensors

    def tensors(self, bucket: int) -> dict[str, Tensor]:
        """Views of a bucket's tensors by name, valid after `close` too; others take their place with bucket + slots."""
        return self._tensors[bucket]

    def close(self) -> None:
        """Give up the descriptor: nobody can open `path` any more. The memory itself goes with the last view of it."""
        self._memory.close()


def layout_to_json(layout: Layout) -> list[list[Any]]:
    return [[name, list(shape), str(dtype).removeprefix("torch.")] for name, shape, dtype in layout]


def layout_from_json(rows: Iterable[Sequence[Any]]) -> Layout:
    return [(name, tuple(shape), getattr(torch, dtype)) for name, shape, dtype in rows]


def num_bytes(shape: Sequence[int], dtype: torch.dtype) -> int:
    """Of a tensor."""
    return torch.Size(shape).numel() * dtype.itemsize


def _aligned(length: int) -> int:
    return -(-length // _ALIGNMENT) * _ALIGNMENT


def _total_size(buckets: Sequence[Layout], slots: int) -> int:
    names = [name for bucket in buckets for name, _, _ in bucket]
    assert len(set(names)) == len(names), "a layout names every tensor once"
    largest = max(sum(_aligned(num_bytes(shape, dtype)) for _, shape, dtype in bucket) for bucket in buckets)
    assert largest > 0, "a layout holds something"
    return slots * largest
