"""Experts, which transformers joins and files hold one by one: every element is in one place, and in the right one."""

from __future__ import annotations

from pathlib import Path

import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from scripts.make_tiny_model import make_tiny_model
from verl.model.pieces import Box, pieces, size_of

NAMES = (
    "model.layers.0.mlp.experts.gate_up_proj",
    "model.layers.11.mlp.experts.down_proj",
    "model.layers.0.any.weight",
)


def test_the_files_tensors_are_where_transformers_puts_them(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, "qwen3_moe", num_layers=1)
    files = load_file(folder / "model.safetensors")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    found = {}
    for name, parameter in model.named_parameters():
        for piece in pieces(name, parameter.shape):
            found[piece.name] = parameter.detach()[piece.index]
    assert found.keys() == files.keys()
    assert all(torch.equal(found[name], files[name]) for name in files)
    assert sum("experts" in name for name in files) == 6 * 3


@st.composite
def cuts(draw: st.DrawFn) -> tuple[tuple[int, ...], Box]:
    shape = (draw(st.integers(1, 4)), 2 * draw(st.integers(1, 4)), draw(st.integers(1, 3)))
    sides = []
    for size in shape:
        low = draw(st.integers(0, size))
        sides.append(slice(low, draw(st.integers(low, size))))
    return shape, tuple(sides)


@given(st.sampled_from(NAMES), cuts())
def test_a_shard_is_made_of_parts_of_the_files_tensors(name: str, cut: tuple[tuple[int, ...], Box]) -> None:
    """Whatever box it is: the parts, put where they say, are the shard, and none of it is said twice."""
    shape, box = cut
    whole = torch.arange(shape[0] * shape[1] * shape[2]).view(shape)
    files: dict[str, Tensor] = {piece.name: whole[piece.index] for piece in pieces(name, whole.shape)}
    shard = torch.full(size_of(box), -1)
    for piece in pieces(name, whole.shape, box):
        part = files[piece.name][piece.box]
        assert shard[piece.index].shape == part.shape
        assert (shard[piece.index] == -1).all()
        shard[piece.index] = part
    assert torch.equal(shard, whole[box])
