"""Masks made outside of a model are those that it would make itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from scripts.make_tiny_model import CONFIGS
from tests.unit.model.conftest import load
from verl.model.masks import attention_masks
from verl.model.packing import MicroBatch, Sequences, pack


def packed(lengths: list[list[int]]) -> MicroBatch:
    draws = torch.Generator().manual_seed(2)
    ids = tuple(torch.randint(3, 300, (n,), generator=draws) for row in lengths for n in row)
    rows = Sequences(ids, (0,) * len(ids), tuple(len(i) for i in ids), 0)
    numbers = iter(range(len(ids)))
    return pack(rows, [[next(numbers) for _ in row] for row in lengths], 4)


@torch.no_grad()
@pytest.mark.parametrize("lengths", [[[30, 9], [21]], [[25], [3]]], ids=["packed", "a sequence a row"])
@pytest.mark.parametrize("kernel", ["auto", "eager"])
@pytest.mark.parametrize("architecture", CONFIGS)
def test_hidden_states_are_the_same_bits(
    architecture: str, kernel: str, lengths: list[list[int]], folder: Callable[..., Path]
) -> None:
    """Sequences longer than the tiny models' sliding window of 16, in rows whose tail goes on."""
    model, batch = load(folder(architecture), kernel=kernel), packed(lengths)
    inputs = {"input_ids": batch.input_ids, "position_ids": batch.position_ids, "use_cache": False}
    own = model.hf.base_model(**inputs).last_hidden_state
    masks = attention_masks(model.hf.config, batch)
    assert torch.equal(model.hf.base_model(**inputs, attention_mask=masks).last_hidden_state, own)


def test_a_sequence_does_not_see_its_neighbour() -> None:
    """So that the comparison above means something."""
    config = CONFIGS["llama"](num_hidden_layers=1)
    config._attn_implementation = "sdpa"
    mask = attention_masks(config, packed([[2, 3]]))
    assert isinstance(mask, torch.Tensor) and mask.shape == (1, 1, 8, 8)
    assert mask[0, 0, 3].tolist() == [False, False, True, True, False, False, False, False]
