"""Weights on their way, in a piece of memory that the ranks of a node and the engines on it share."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

Layout = Sequence[tuple[str, tuple[int, ...], torch.dtype]]

_ALIGNMENT = 64  # bytes: a cache line, and the widest vector load


class WeightBuffer:
    """Slots for buckets of weights, in anonymous memory (`memfd_create`) of one node.

    Bucket b lies in slot b % slots: its tensors whole, one behind the other, each on a 64-byte boundary. It is not a
    named file in /dev/shm, since a container's is 64 MiB by default and writing past its end is a SIGBUS. The pages
    count against the container's memory limit, as they are first written.
    """

    def __init__(self, buckets: Sequence[Layout], slots: int):
        """Makes the memory, zeroed. `buckets`: name, shape and dtype of every tensor, in the order of the memory."""
        size = _total_size(buckets, slots)
        descriptor = os.memfd_create("verl-weights")
        os.ftruncate(descriptor, size)
        self._attach(descriptor, f"/proc/{os.getpid()}/fd/{descriptor}", buckets, slots, size)

    @classmethod
    def open(cls, path: str, buckets: Sequence[Layout], slots: int) -> WeightBuffer:
        """The same memory from another process of the node; all arguments are those of the one that made it."""
        size = _total_size(buckets, slots)
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        found = os.fstat(descriptor).st_size
        if found != size:
            os.close(descriptor)
            raise ValueError(f"The weight buffer {path} has {found} bytes, its layout asks for {size}.")
        buffer = cls.__new__(cls)
        buffer._attach(descriptor, path, buckets, slots, size)
        return buffer

    def _attach(self, descriptor: int, path: str, buckets: Sequence[Layout], slots: int, size: int) -> None:
        self.path = path
        """Where other processes of the node open the memory, until the one that made it ends or closes it."""
        self.buckets = tuple(tuple((name, tuple(shape), dtype) for name, shape, dtype in bucket) for bucket in buckets)
        self.slots = slots
        self.num_bytes = size
        self._descriptor: int | None = descriptor
        self.memory = torch.frombuffer(mmap.mmap(descriptor, size), dtype=torch.uint8)
        self._tensors = [self._lay_out(number) for number in range(len(self.buckets))]

    def _lay_out(self, number: int) -> dict[str, Tensor]:
        tensors: dict[str, Tensor] = {}
        offset = number % self.slots * (self.num_bytes // self.slots)
        for name, shape, dtype in self.buckets[number]:
            length = _num_bytes(shape, dtype)
            tensors[name] = self.memory[offset : offset + length].view(dtype).view(shape)
            offset += _aligned(length)
        return tensors

    def tensors(self, bucket: int) -> dict[str, Tensor]:
        """Views of a bucket's tensors by name, valid after `close` too; others take their place with bucket + slots."""
        return self._tensors[bucket]

    def close(self) -> None:
        """Give up the descriptor: nobody can open `path` any more. The memory itself goes with the last view of it."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def layout_to_json(layout: Layout) -> list[list[Any]]:
    return [[name, list(shape), str(dtype).removeprefix("torch.")] for name, shape, dtype in layout]


def layout_from_json(rows: Iterable[Sequence[Any]]) -> Layout:
    return [(name, tuple(shape), getattr(torch, dtype)) for name, shape, dtype in rows]


def _num_bytes(shape: Sequence[int], dtype: torch.dtype) -> int:
    return torch.Size(shape).numel() * dtype.itemsize


def _aligned(length: int) -> int:
    return -(-length // _ALIGNMENT) * _ALIGNMENT


def _total_size(buckets: Sequence[Layout], slots: int) -> int:
    names = [name for bucket in buckets for name, _, _ in bucket]
    assert len(set(names)) == len(names), "a layout names every tensor once"
    largest = max(sum(_aligned(_num_bytes(shape, dtype)) for _, shape, dtype in bucket) for bucket in buckets)
    assert largest > 0, "a layout holds something"
    return slots * largest
