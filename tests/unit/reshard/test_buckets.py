"""Buckets of weights, and what a rank does in each step of a load."""

from __future__ import annotations

from collections import Counter
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.reshard.test_reshard_plan import ITEMSIZE, SHAPES, WORLD, Layout, layouts
from verl.reshard.buckets import cut_buckets, largest_bucket
from verl.reshard.layout import contiguous, whole, within
from verl.reshard.plan import lags
from verl.reshard.schedule import make_steps

NAMES = [
    "model.embed_tokens.weight",
    *(
        f"model.layers.{i}.{name}.weight"
        for i in range(3)
        for name in ("input_layernorm", "mlp.down_proj", "mlp.gate_proj", "self_attn.k_proj", "self_attn.q_proj")
    ),
    "model.layers.0.mlp.experts.7.up_proj.weight",
    "model.norm.weight",
]


@given(
    st.lists(st.tuples(st.sampled_from(NAMES), st.integers(1, 30)), unique_by=lambda x: x[0], min_size=1),
    st.integers(1, 200),
)
def test_a_parameter_is_in_one_bucket_and_what_is_fused_in_the_same(sizes: list[tuple[str, int]], limit: int) -> None:
    shapes = {name: (size, 2) for name, size in sizes}
    buckets = cut_buckets(shapes, 2, limit)
    assert Counter(name for bucket in buckets for name in bucket) == Counter(shapes.keys())
    block = {name: name.split(".", 4)[:4] if ".layers." in name else [name] for name in shapes}
    for bucket in buckets:
        assert bucket
        for name in bucket:
            assert all(other in bucket for other in shapes if block[other] == block[name])
        bytes_of = sum(prod(shapes[name]) * 2 for name in bucket)
        assert bytes_of <= limit or len({tuple(block[name]) for name in bucket}) == 1
        assert bytes_of <= largest_bucket(buckets, shapes, 2)


def test_buckets_are_filled() -> None:
    shapes = {f"layers.{i}.mlp.up": (10,) for i in range(5)} | {"norm": (1,)}
    assert [len(bucket) for bucket in cut_buckets(shapes, 2, 40)] == [2, 2, 2]


@given(layouts(), st.integers(1, 80))
def test_all_ranks_steps_together_are_the_plan(layout: Layout, limit: int) -> None:
    """Both ends of a message list it in the same step and round, in the same order among those of the pair."""
    buckets, transfers = cut_buckets(SHAPES, ITEMSIZE, limit), layout.plan()
    lag = lags(layout.shards, layout.domains)
    steps = [make_steps(rank, transfers, layout.domains, buckets, lag) for rank in range(WORLD)]
    assert len({len(own) for own in steps}) == 1
    copied, sent, received = [], [], []
    for rank, own in enumerate(steps):
        for number, step in enumerate(own):
            assert step.filled == steps[0][number].filled
            copied += step.copies
            for turn, messages in enumerate(step.rounds):
                for m in messages:
                    (sent if m.src == rank else received).append((number, turn, m.src, m.dst, m.domain, m.transfers))
                    for t in m.transfers:
                        assert (t.src, t.dst, t.domain, t.round) == (m.src, m.dst, m.domain, turn)
                        assert t.name in buckets[step.filled[m.domain]]
            for t in step.copies:
                assert t.name in buckets[step.filled[t.domain]]
    assert Counter(copied) == Counter(t for t in transfers if t.src == t.dst)
    assert Counter(t for *_, parts in sent for t in parts) == Counter(t for t in transfers if t.src != t.dst)
    for pair in {(m[2], m[3]) for m in sent}:
        assert [m for m in sent if m[2:4] == pair] == [m for m in received if m[2:4] == pair]
    for domain in layout.domains:
        filled = [step.filled[domain.name] for step in steps[0] if domain.name in step.filled]
        assert filled == list(range(len(buckets)))


boxes = st.lists(
    st.integers(1, 4).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n - 1), st.integers(1, n))), max_size=3
)


@given(boxes)
def test_contiguous_is_what_torch_says(sides: list[tuple[int, int, int]]) -> None:
    import torch

    shape = tuple(size for size, _, _ in sides)
    box = tuple((low, max(low + 1, high)) for _, low, high in sides)
    view = torch.empty(shape)[within(box, whole(shape))]
    assert contiguous(box, whole(shape)) == view.is_contiguous()


@pytest.mark.parametrize("rows", [1, 1 << 15])
def test_a_large_part_is_a_message_of_its_own(rows: int) -> None:
    from verl.reshard.layout import Domain, Shards
    from verl.reshard.plan import plan

    shapes = {f"w{i}": (rows, 1) for i in range(3)}
    everything = {name: whole(shape) for name, shape in shapes.items()}
    shards, domains = Shards({0: everything}, {0: "a", 1: "a"}), [Domain("rank 1", (1,), (1,), everything)]
    (step,) = make_steps(0, plan(shards, domains, 2), domains, (tuple(shapes),), {"rank 1": 0})
    assert [len(m.transfers) for m in step.rounds[0]] == ([3] if rows == 1 else [1, 1, 1])
