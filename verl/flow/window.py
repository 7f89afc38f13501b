"""Tensors that other processes of the node write into."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from verl.flow.node_memory import NodeMemory

_ALIGNMENT = 64  # bytes: a cache line, and the widest vector load


class View(NamedTuple):
    """A tensor in a piece of memory; all in elements."""

    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


@dataclass(frozen=True)
class Address:
    """Where the processes of a node find tensors of one of them."""

    path: str
    num_bytes: int
    dtype: torch.dtype
    views: Mapping[str, View]

    def open(self) -> dict[str, Tensor]:
        """The same memory. It outlives the process that made it."""
        memory = NodeMemory.open(self.path, self.num_bytes)
        memory.close()
        elements = memory.bytes.view(self.dtype)
        return {name: elements.as_strided(v.shape, v.stride, v.offset) for name, v in self.views.items()}


class Window:
    """Tensors of one dtype in memory that other processes of the node can open."""

    def __init__(self, shapes: Mapping[str, Sequence[int]], dtype: torch.dtype) -> None:
        """Makes them, zeroed. There is at least one element."""
        step = _ALIGNMENT // dtype.itemsize
        offsets, end = {}, 0
        for name, shape in shapes.items():
            offsets[name] = end
            end += -(-prod(shape) // step) * step
        self._memory = NodeMemory(end * dtype.itemsize)
        self._elements = self._memory.bytes.view(dtype)
        self.tensors = {
            name: self._elements[at : at + prod(shapes[name])].view(tuple(shapes[name])) for name, at in offsets.items()
        }

    def address(self, views: Mapping[str, Tensor]) -> Address:
        """`views`: of its tensors, by the names that others know them by."""
        start, size = self._elements.data_ptr(), self._elements.itemsize
        found = {
            name: View((view.data_ptr() - start) // size, tuple(view.shape), view.stride())
            for name, view in views.items()
        }
        return Address(self._memory.path, self._memory.num_bytes, self._elements.dtype, found)

    def close(self) -> None:
        """Nobody can open the address any more. The memory goes with the last view of it."""
        self._memory.close()
