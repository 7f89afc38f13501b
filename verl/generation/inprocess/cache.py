"""Keys and values of the sequences that are being generated."""

from __future__ import annotations

from torch import Tensor


class KVCache:
    """One slot a sequence: in every layer, keys and values of shape [slots, heads, capacity, head size].

    They are written in place and read as views. The capacity doubles up to `limit`, so that short responses do not pay
    for the longest possible one. A layer's tensors are made at its first write, which tells their shape and type.

    Args:
        num_slots: sequences held at once.
        limit: positions that no sequence exceeds.
    """

    def __init__(self, num_slots: int, limit: int) -> None:
        self._num_slots = num_slots
        self._limit = limit
        self._capacity = 0
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    def reserve(self, length: int) -> None:
        """Makes room for `length` positions in every slot."""
        if length <= self._capacity:
            return
        assert length <= self._limit, f"{length} positions in a cache for {self._limit}"
        held = self._capacity
        self._capacity = min(max(length, 2 * held), self._limit)
        for layer, old in self._layers.items():  # one after the other: two whole caches never exist at once
            new = self._zeros(old[0]), self._zeros(old[1])
            for source, target in zip(old, new, strict=True):
                target[:, :, :held] = source
            self._layers[layer] = new

    def write(self, layer: int, slot: int, keys: Tensor, values: Tensor) -> None:
        """Puts [1, heads, length, head size] at the start of a slot."""
        for stored, new in zip(self._states(layer, keys, values), (keys, values), strict=True):
            stored[slot, :, : new.shape[2]] = new[0]

    def append(self, layer: int, slots: Tensor, positions: Tensor, keys: Tensor, values: Tensor) -> None:
        """Puts [B, heads, 1, head size] at positions [B] of slots [B]."""
        for stored, new in zip(self._states(layer, keys, values), (keys, values), strict=True):
            stored[slots, :, positions] = new[:, :, 0]

    def read(self, layer: int, num_slots: int, length: int) -> tuple[Tensor, Tensor]:
        """Views [num_slots, heads, length, head size] of the first slots."""
        keys, values = self._layers[layer]
        return keys[:num_slots, :, :length], values[:num_slots, :, :length]

    def copy(self, source: int, target: int, length: int) -> None:
        """Copies the first `length` positions of one slot over those of another."""
        for states in self._layers.values():
            for state in states:
                state[target, :, :length] = state[source, :, :length]

    def _states(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        if layer not in self._layers:
            self._layers[layer] = self._zeros(keys), self._zeros(values)
        return self._layers[layer]

    def _zeros(self, like: Tensor) -> Tensor:
        # Not `empty`: what a mask hides is still multiplied by 0, and stray memory may hold NaN.
        return like.new_zeros(self._num_slots, like.shape[1], self._capacity, like.shape[3])
