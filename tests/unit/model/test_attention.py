"""Attention on a CPU, held against a plain formula in float32."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig

from scripts.make_tiny_model import CONFIGS
from verl.model.attention import CPU_ATTENTION, SHORT, short_rows_attention

DIM = 16


class Layer(nn.Module):
    """What transformers' attention functions ask of a layer."""

    is_causal = True

    def __init__(self, num_key_value_groups: int) -> None:
        super().__init__()
        self.num_key_value_groups = num_key_value_groups


def draw(batch: int, heads: int, key_heads: int, time: int) -> list[Tensor]:
    """query, key, value [batch, heads, time, dim] and a gradient [batch, time, heads, dim]"""
    draws = torch.Generator().manual_seed(time)
    shapes = [(batch, time, h, DIM) for h in (heads, key_heads, key_heads, heads)]
    query, key, value, grad = (torch.randn(shape, generator=draws).bfloat16() for shape in shapes)
    return [query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), grad]


def packed_mask(batch: int, time: int, at: int) -> Tensor:
    """Two sequences in each row, the second from `at` on: [batch, 1, time, time], True where a query sees a key."""
    sequence = (torch.arange(time) >= at).long()
    same = sequence[:, None] == sequence[None]
    return (same & torch.ones(time, time, dtype=torch.bool).tril()).expand(batch, 1, time, time)


def formula(query: Tensor, key: Tensor, value: Tensor, visible: Tensor, scaling: float) -> Tensor:
    """softmax(q k^T) v, head by head."""
    rows = []
    for q, k, v, sees in zip(query, key, value, visible.expand(len(query), -1, -1, -1), strict=True):
        shared = len(q) // len(k)
        heads = []
        for h in range(len(q)):
            scores = (q[h] @ k[h // shared].T * scaling).masked_fill(~sees[0], -math.inf)
            heads.append(torch.softmax(scores, -1) @ v[h // shared])
        rows.append(torch.stack(heads, 1))
    return torch.stack(rows)


@pytest.mark.parametrize(("heads", "key_heads"), [(4, 4), (6, 2), (3, 1)])
@pytest.mark.parametrize("masked", [False, True])
def test_gradients_are_those_of_the_formula(heads: int, key_heads: int, masked: bool) -> None:
    batch, time, scaling = 3, 21, 0.3
    *inputs, grad = draw(batch, heads, key_heads, time)
    mask = packed_mask(batch, time, at=8) if masked else None
    ours = [x.clone().requires_grad_() for x in inputs]
    out, _ = short_rows_attention(Layer(heads // key_heads), *ours, mask, scaling=scaling)
    assert "ShortRows" in type(out.grad_fn).__name__
    found = torch.autograd.grad(out, ours, grad)

    exact = [x.float().requires_grad_() for x in inputs]
    expected_out = formula(*exact, packed_mask(1, time, at=8 if masked else 0), scaling)
    expected = torch.autograd.grad(expected_out, exact, grad.float())
    for one, other in zip((out, *found), (expected_out, *expected), strict=True):
        assert one.dtype == torch.bfloat16 and one.shape == other.shape
        assert (one.float() - other).abs().max() < 0.02 * other.abs().max()  # bfloat16 has 8 bits


@pytest.mark.parametrize("time", [7, SHORT, SHORT + 1])
@pytest.mark.parametrize("masked", [False, True])
def test_the_same_bits_with_and_without_a_gradient(time: int, masked: bool) -> None:
    """The log-probs of an update are compared with those from before it."""
    query, key, value, _ = draw(1, 2, 1, time)
    mask = packed_mask(1, time, at=3) if masked else None
    with torch.no_grad():
        before, _ = short_rows_attention(Layer(2), query, key, value, mask, scaling=0.25)
    within, _ = short_rows_attention(Layer(2), query.requires_grad_(), key, value, mask, scaling=0.25)
    assert torch.equal(before, within)


@pytest.mark.parametrize("case", ["long", "float32", "additive mask", "dropout"])
def test_what_it_is_not_made_for_is_left_to_sdpa(case: str) -> None:
    query, key, value, _ = draw(1, 2, 2, SHORT + 1 if case == "long" else 5)
    if case == "float32":
        query, key, value = query.float(), key.float(), value.float()
    mask = torch.zeros(1, 1, 5, 5, dtype=torch.bfloat16) if case == "additive mask" else None
    dropout = 0.5 if case == "dropout" else 0.0
    out, _ = short_rows_attention(Layer(1), query.requires_grad_(), key, value, mask, dropout, scaling=0.25)
    assert "ShortRows" not in type(out.grad_fn).__name__


@pytest.mark.parametrize("architecture", sorted(set(CONFIGS) - {"gemma2"}))
def test_a_model_with_it_learns_what_one_with_transformers_own_does(architecture: str) -> None:
    """Two sequences in a packed row; gemma3 also has layers with a sliding window. Held against `eager`, which rounds
    alike, so that experts are chosen alike."""
    special = {"sliding_window": 4, "query_pre_attn_scalar": DIM} if architecture == "gemma3" else {}
    config: PreTrainedConfig = CONFIGS[architecture](
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=DIM, pad_token_id=0, **special,
    )  # fmt: skip
    ids = torch.randint(64, (2, 12), generator=torch.Generator().manual_seed(0))
    positions = torch.cat([torch.arange(7), torch.arange(5)]).expand(2, -1)
    grads = {}
    for kernel in ("eager", CPU_ATTENTION):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation=kernel)
        logits = model(input_ids=ids, position_ids=positions, use_cache=False).logits
        logits.float().log_softmax(-1)[..., 0].sum().backward()
        grads[kernel] = {name: p.grad.float() for name, p in model.named_parameters() if p.grad is not None}
    assert grads["eager"].keys() == grads[CPU_ATTENTION].keys()
    for name, expected in grads["eager"].items():
        assert (grads[CPU_ATTENTION][name] - expected).norm() <= 0.05 * expected.norm(), name
