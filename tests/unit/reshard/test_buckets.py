"""Buckets of weights, and what a rank does in each step of a load."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.reshard.test_reshard_plan import ITEMSIZE, SHAPES, WORLD, Layout, layouts
from verl.reshard.buckets import cut_buckets, largest_bucket
from verl.reshard.layout import Box, Domain, Shards, contiguous, volume, whole, within
from verl.reshard.plan import Transfer, lags, plan
from verl.reshard.schedule import Message, Place, Step, from_neighbours, make_steps

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


@dataclass(frozen=True)
class Case:
    layout: Layout
    limit: int
    opened: frozenset[str]
    """Domains that the other ranks of their nodes write into."""

    def steps(self) -> list[list[Step]]:
        """Of every rank."""
        layout, buckets = self.layout, cut_buckets(SHAPES, ITEMSIZE, self.limit)
        plan, lag = layout.plan(), lags(layout.shards, layout.domains)
        return [make_steps(r, plan, layout.shards, layout.domains, buckets, lag, self.opened) for r in range(WORLD)]

    def is_written(self, m: Message) -> bool:
        return m.domain in self.opened and self.layout.shards.node_of[m.src] == self.layout.shards.node_of[m.dst]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    layout = draw(layouts())
    own = [domain.name for domain in layout.domains if domain.slots is None]
    opened = draw(st.sets(st.sampled_from(own))) if own else set()
    return Case(layout, draw(st.integers(1, 80)), frozenset(opened))


@given(cases())
def test_all_ranks_steps_together_are_the_plan(case: Case) -> None:
    """Both ends of a message list it in the same step and round, and know it by the same tag."""
    layout, steps = case.layout, case.steps()
    buckets, transfers = cut_buckets(SHAPES, ITEMSIZE, case.limit), layout.plan()
    assert len({len(own) for own in steps}) == 1
    copied, sent, received = [], [], []
    for rank, own in enumerate(steps):
        for number, step in enumerate(own):
            assert step.filled == steps[0][number].filled
            copied += [copy.transfer for copy in step.copies]
            for turn, messages in enumerate(step.rounds):
                for m in messages:
                    assert m.direct == case.is_written(m)
                    assert (m.content is not None) == (m.src == rank and not m.direct)
                    (sent if m.src == rank else received).append(
                        (number, turn, m.src, m.dst, m.tag, m.domain, m.told, m.transfers)
                    )
                    for t in m.transfers:
                        assert (t.src, t.dst, t.domain, t.round) == (m.src, m.dst, m.domain, turn)
                        assert t.name in buckets[step.filled[m.domain]]
            for copy in step.copies:
                assert copy.transfer.name in buckets[step.filled[copy.transfer.domain]]
    assert Counter(copied) == Counter(t for t in transfers if t.src == t.dst)
    assert Counter(t for *_, parts in sent for t in parts) == Counter(t for t in transfers if t.src != t.dst)
    assert Counter(sent) == Counter(received)
    assert len({m[2:5] for m in sent}) == len(sent), "a pair uses a tag once"
    for domain in layout.domains:
        filled = [step.filled[domain.name] for step in steps[0] if domain.name in step.filled]
        assert filled == list(range(len(buckets)))


@given(cases())
def test_what_may_go_before_its_step_needs_nothing_that_the_step_waits_for(case: Case) -> None:
    """Sent early: only own shards, which do not change. Received early: only what no engine reads meanwhile."""
    slots = {domain.name: domain.slots for domain in case.layout.domains}
    for rank, steps in enumerate(case.steps()):
        for m in (m for step in steps for turn in step.rounds for m in turn if m.early):
            if m.src == rank:
                assert all(t.origin is None for t in m.transfers)
            else:
                assert slots[m.domain] is None


@given(cases())
def test_places_are_the_transfers_boxes_in_the_tensors_that_a_rank_has(case: Case) -> None:
    boxes = {domain.name: domain.boxes for domain in case.layout.domains}
    for rank, steps in enumerate(case.steps()):

        def check(place: Place, t: Transfer, domain: str | None, rank: int = rank) -> None:
            outer = case.layout.shards.boxes[rank][t.name] if domain is None else boxes[domain][t.name]
            elements = numbered(SHAPES[t.name])
            assert (place.name, place.domain) == (t.name, domain)
            assert (elements[slices(outer)][place.index] == elements[slices(t.box)]).all()

        for message in (m for step in steps for turn in step.rounds for m in turn):
            if message.direct and message.src == rank:
                assert [copy.transfer for copy in message.copies] == list(message.transfers)
                for t, source, target in message.copies:
                    check(source, t, t.origin)
                    check(target, t, t.domain)
            else:
                assert not message.copies
                for t, place in zip(message.transfers, message.places, strict=True):
                    check(place, t, t.origin if message.src == rank else t.domain)


def numbered(shape: tuple[int, ...]) -> np.ndarray:
    return np.arange(prod(shape)).reshape(shape)


def slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(*side) for side in box)


@given(cases())
def test_the_last_of_what_a_rank_writes_for_another_is_told_and_none_of_it_is_passed_on(case: Case) -> None:
    """In the order of writing: what is early goes before its step, perhaps before what is not early of the last one."""
    passed_on = {(t.origin, t.name, t.box) for t in case.layout.plan() if t.origin is not None}
    for rank, steps in enumerate(case.steps()):
        written: dict[tuple[int, bool], list[Message]] = {}
        for m in (m for step in steps for turn in step.rounds for m in turn if m.direct):
            assert all((t.domain, t.name, t.box) not in passed_on for t in m.transfers)
            if m.src == rank:
                written.setdefault((m.dst, m.early), []).append(m)
        for messages in written.values():
            assert [m.told for m in messages] == [False] * (len(messages) - 1) + [True]


@given(cases(), st.booleans())
def test_the_memory_that_a_step_needs_is_what_its_messages_hold(case: Case, in_place: bool) -> None:
    """What is sent once to several ranks counts once, and what is written where it belongs does not. Nothing here is
    large enough to be received in place.
    """
    for rank, steps in enumerate(case.steps()):
        for step in steps:
            messages = [m for turn in step.rounds for m in turn if not case.is_written(m)]
            received = sum(volume(t.box) for m in messages if m.dst == rank for t in m.transfers)
            sent = {tuple((t.name, t.box, t.origin) for t in m.transfers) for m in messages if m.src == rank}
            assert step.staged(in_place) == received + sum(volume(box) for parts in sent for _, box, _ in parts)


@given(cases())
def test_parameters_that_neighbours_write_are_those_of_their_messages(case: Case) -> None:
    """So that an engine can have these in memory which the neighbours open, before there are steps."""
    written: dict[str, set[str]] = {domain.name: set() for domain in case.layout.domains}
    for m in (m for steps in case.steps() for step in steps for turn in step.rounds for m in turn if m.direct):
        written[m.domain] |= {t.name for t in m.transfers}
    for name in case.opened:
        assert from_neighbours(case.layout.plan(), case.layout.shards.node_of, name) == written[name]


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


@pytest.mark.parametrize("nodes", [{0: "a", 1: "b"}, {0: "a", 1: "a"}], ids=["two nodes", "one, not opened"])
@pytest.mark.parametrize("rows", [1, 1 << 19])
def test_a_large_part_is_a_message_of_its_own(rows: int, nodes: dict[int, str]) -> None:
    (sent, sends), (received, receives) = messages_of_three(rows, nodes, set())
    assert sent == received == ([3] if rows == 1 else [1, 1, 1])
    assert sends == (3 * rows, 3 * rows)
    assert receives == (3 * rows if rows == 1 else 0, 3 * rows)


@pytest.mark.parametrize("rows", [1, 1 << 19])
def test_what_a_neighbour_writes_is_one_message_and_needs_no_memory(rows: int) -> None:
    assert messages_of_three(rows, {0: "a", 1: "a"}, {"rank 1"}) == [([3], (0, 0)), ([3], (0, 0))]


def messages_of_three(rows: int, nodes: dict[int, str], opened: set[str]) -> list[tuple[list[int], tuple[int, int]]]:
    """Three parameters from rank 0 to 1: parts in each message, and elements of memory with and without receiving in
    place; of both ranks.
    """
    shapes = {f"w{i}": (rows, 1) for i in range(3)}
    everything = {name: whole(shape) for name, shape in shapes.items()}
    shards, domains = Shards({0: everything}, nodes), [Domain("rank 1", (1,), (1,), everything)]
    lag = lags(shards, domains)
    found = []
    for rank in (0, 1):
        steps = make_steps(rank, plan(shards, domains, 2), shards, domains, (tuple(shapes),), lag, opened)
        (step,) = (step for step in steps if step.rounds)
        found.append(([len(m.transfers) for m in step.rounds[0]], (step.staged(True), step.staged(False))))
    return found
