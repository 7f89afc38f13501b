"""AdamW's moments in host memory: the same step, part by part."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from verl.engine.offload import MOMENTS, host_like, in_parts, step_in_parts

SIZES = [3, 1000, 40, 40, 7, 500]


def groups_of(sizes: list[int]) -> list[dict[str, Any]]:
    """Parameters of the same values each time, in two groups."""
    draws = torch.Generator().manual_seed(len(sizes))
    parameters = [nn.Parameter(torch.randn(size, generator=draws)) for size in sizes]
    return [{"params": parameters[::2], "weight_decay": 0.1}, {"params": parameters[1::2], "weight_decay": 0.0}]


@given(st.lists(st.integers(1, 50), min_size=2, max_size=12), st.integers(8, 400))
def test_parts_keep_the_order_and_fit_or_hold_one_parameter(sizes: list[int], most: int) -> None:
    groups = groups_of(sizes)
    parts = in_parts(groups, most)
    for decay in (0.1, 0.0):
        (group,) = (g["params"] for g in groups if g["weight_decay"] == decay)
        assert [id(p) for part in parts if part["weight_decay"] == decay for p in part["params"]] == [
            id(p) for p in group
        ]
    for part in parts:
        assert sum(8 * p.numel() for p in part["params"]) <= most or len(part["params"]) == 1


def test_a_step_in_parts_is_the_step_and_has_one_part_on_the_device_at_a_time() -> None:
    plain = torch.optim.AdamW(groups_of(SIZES), lr=0.1, fused=True)
    parted = torch.optim.AdamW(in_parts(groups_of(SIZES), 8 * 1000), lr=0.1, fused=True)
    assert [len(group["params"]) for group in parted.param_groups] == [3, 1, 2]
    for group in parted.param_groups:
        for p in group["params"]:
            parted.state[p] = {"step": torch.zeros(())} | {name: host_like(p) for name in MOMENTS}
    host = {id(tensor) for state in parted.state.values() for tensor in state.values()}
    away: list[int] = []

    def count(*_: object) -> None:
        away.append(sum(id(state["exp_avg"]) not in host for state in parted.state.values()))

    parted.register_step_pre_hook(count)
    for step in range(3):
        for adamw in (plain, parted):
            draws = torch.Generator().manual_seed(step)
            for p in (p for group in adamw.param_groups for p in group["params"]):
                p.grad = torch.randn(p.shape, generator=draws)
        plain.step()
        step_in_parts(parted)
    assert away == [3, 1, 2] * 3
    assert host == {id(tensor) for state in parted.state.values() for tensor in state.values()}
    ones, others = ([p for g in adamw.param_groups for p in g["params"]] for adamw in (plain, parted))
    for one, other in zip(ones, others, strict=True):
        assert torch.equal(one, other)
        assert all(torch.equal(plain.state[one][name], parted.state[other][name]) for name in ("step", *MOMENTS))
        assert parted.state[other]["exp_avg"].abs().max() > 0
