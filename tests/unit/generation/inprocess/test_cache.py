"""Slots keep what was written into them while the cache grows and is rearranged."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from verl.generation.inprocess.cache import KVCache


def states(seed: int, num_sequences: int, length: int) -> tuple[Tensor, Tensor]:
    """Keys and values of different head sizes, as multi-head latent attention has."""
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(num_sequences, 2, length, 4, generator=generator),
        torch.randn(num_sequences, 2, length, 6, generator=generator),
    )


def test_what_is_written_is_read_back_as_the_cache_grows() -> None:
    cache = KVCache(num_slots=3, limit=100)
    written = {slot: states(seed=slot, num_sequences=1, length=5 + slot) for slot in range(3)}
    cache.reserve(7)
    for slot, (keys, values) in written.items():
        cache.write(0, slot, keys, values)
    for step in range(60):
        cache.reserve(7 + step + 1)
        positions = torch.tensor([5 + step, 6 + step, 7 + step])
        keys, values = states(seed=100 + step, num_sequences=3, length=1)
        cache.append(0, torch.arange(3), positions, keys, values)
        for slot in range(3):
            old = written[slot]
            written[slot] = (
                torch.cat([old[0], keys[slot : slot + 1]], 2),
                torch.cat([old[1], values[slot : slot + 1]], 2),
            )
    for slot in range(3):
        for read, expected in zip(cache.read(0, 3, 65 + slot), written[slot], strict=True):
            assert torch.equal(read[slot], expected[0])


def test_what_was_never_written_is_zero() -> None:
    cache = KVCache(num_slots=2, limit=50)
    cache.reserve(3)
    cache.write(0, 0, *states(seed=0, num_sequences=1, length=3))
    cache.reserve(40)
    keys, values = cache.read(0, 2, 40)
    for state in (keys, values):
        assert not state[0, :, 3:].any()
        assert not state[1].any()


def test_reading_copies_nothing() -> None:
    cache = KVCache(num_slots=4, limit=8)
    cache.reserve(8)
    cache.write(1, 0, *states(seed=0, num_sequences=1, length=8))
    first, again = cache.read(1, 2, 5), cache.read(1, 4, 8)
    assert [state.data_ptr() for state in first] == [state.data_ptr() for state in again]


def test_copy_moves_every_layer_of_a_slot() -> None:
    cache = KVCache(num_slots=3, limit=9)
    cache.reserve(9)
    written = [states(seed=layer, num_sequences=1, length=9) for layer in range(2)]
    for layer in range(2):
        cache.write(layer, 2, *written[layer])
    cache.copy(source=2, target=0, length=6)
    for layer in range(2):
        for read, expected in zip(cache.read(layer, 1, 9), written[layer], strict=True):
            assert torch.equal(read[0, :, :6], expected[0, :, :6])
            assert not read[0, :, 6:].any()


def test_the_limit_is_kept() -> None:
    cache = KVCache(num_slots=1, limit=10)
    cache.reserve(6)
    cache.reserve(7)  # doubling would exceed the limit
    cache.write(0, 0, *states(seed=0, num_sequences=1, length=7))
    assert cache.read(0, 1, 1000)[0].shape[2] == 10
    with pytest.raises(AssertionError, match="11 positions in a cache for 10"):
        cache.reserve(11)
