"""The reshard plan, counted element by element."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl.reshard.layout import Box, Domain, Shards, intersect, volume, whole
from verl.reshard.plan import Transfer, lags, plan, planned_bytes

WORLD, ITEMSIZE = 6, 2
SHAPES: dict[str, tuple[int, ...]] = {"matrix": (7, 4), "square": (3, 3), "vector": (5,), "head": (1, 4)}


@dataclass(frozen=True)
class Layout:
    shards: Shards
    domains: tuple[Domain, ...]

    def plan(self) -> tuple[Transfer, ...]:
        return plan(self.shards, self.domains, ITEMSIZE)

    def home(self, domain: Domain) -> str:
        return self.shards.node_of[domain.readers[0]]

    def on(self, node: str) -> tuple[int, ...]:
        return tuple(rank for rank, at in self.shards.node_of.items() if at == node)


def cuts(size: int, parts: int) -> list[tuple[int, int]]:
    """As torch.chunk cuts, which FSDP does: some parts may be empty."""
    step = -(-size // parts)
    return [(min(i * step, size), min((i + 1) * step, size)) for i in range(parts)]


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Training shards over rows, and over columns too, some with replicas; engines that read whole tensors or parts."""
    rows, columns, replicas = draw(
        st.sampled_from([(1, 1, 1), (2, 1, 1), (3, 1, 1), (4, 1, 1), (2, 1, 2), (1, 1, 3), (2, 2, 1), (3, 1, 2)])
    )
    ranks = iter(draw(st.permutations(range(WORLD))))
    boxes: dict[int, dict[str, Box]] = {}
    for row in range(rows):
        for column in range(columns):
            for _ in range(replicas):
                boxes[next(ranks)] = {
                    name: tuple(
                        cuts(size, parts)[at]
                        for size, parts, at in zip(shape, (rows, columns), (row, column), strict=False)
                    )
                    for name, shape in SHAPES.items()
                    if not (column and len(shape) == 1)  # a vector is whole on the first column
                }
    nodes = {rank: draw(st.sampled_from("abc")) for rank in range(WORLD)}
    return Layout(Shards(boxes, nodes), tuple(draw(st.one_of(node_domains(nodes), rank_domains()))))


@st.composite
def node_domains(draw: st.DrawFn, nodes: dict[int, str]) -> list[Domain]:
    """The shared memory of some nodes, with some of their ranks reading it."""
    boxes = {name: whole(shape) for name, shape in SHAPES.items()}
    made = []
    for node in draw(st.lists(st.sampled_from(sorted(set(nodes.values()))), min_size=1, unique=True)):
        members = tuple(rank for rank in nodes if nodes[rank] == node)
        readers = draw(st.lists(st.sampled_from(members), min_size=1, unique=True))
        made.append(Domain(f"node {node}", members, tuple(readers), boxes, slots=2))
    return made


@st.composite
def rank_domains(draw: st.DrawFn) -> list[Domain]:
    """Ranks' own parameters: whole, those of tensor-parallel peers, or boxes that overlap in any way."""
    kind = draw(st.sampled_from(["whole", "halves", "any"]))
    made = []
    for i, rank in enumerate(draw(st.lists(st.integers(0, WORLD - 1), min_size=1, unique=True))):
        boxes: dict[str, Box] = {name: whole(shape) for name, shape in SHAPES.items()}
        if kind == "halves":
            boxes["matrix"] = ((0, 7), cuts(4, 2)[i % 2])
            boxes["square"] = (cuts(3, 2)[i % 2], (0, 3))
        elif kind == "any":
            boxes["matrix"] = tuple(draw(st.sampled_from([(0, n), (1, n - 1), (0, 2), (2, n)])) for n in (7, 4))
        made.append(Domain(f"rank {rank}", (rank,), (rank,), boxes))
    return made


def marked(name: str, box: Box) -> np.ndarray:
    """1 at the elements of the box, 0 elsewhere."""
    counts = np.zeros(SHAPES[name], dtype=int)
    counts[tuple(slice(low, high) for low, high in box)] = 1
    return counts


def held(layout: Layout, name: str, ranks: Sequence[int]) -> np.ndarray:
    """True at the elements that one of the ranks trains."""
    out = np.zeros(SHAPES[name], dtype=bool)
    for rank in ranks:
        box = layout.shards.boxes.get(rank, {}).get(name)
        if box is not None:
            out |= marked(name, box) > 0
    return out


def total(name: str, transfers: Sequence[Transfer]) -> np.ndarray:
    """How often each element is moved."""
    return sum((marked(name, t.box) for t in transfers if t.name == name), np.zeros(SHAPES[name], dtype=int))


@given(layouts())
def test_every_wanted_element_comes_into_every_domain_once(layout: Layout) -> None:
    transfers = layout.plan()
    for domain in layout.domains:
        for name, wanted in domain.boxes.items():
            assert (total(name, [t for t in transfers if t.domain == domain.name]) == marked(name, wanted)).all()


@given(layouts())
def test_sources_have_what_they_give(layout: Layout) -> None:
    """In their shards; or it has come to them before, into a domain that they read, and is passed on."""
    of = {domain.name: domain for domain in layout.domains}
    done: set[tuple[str, Box, int, str]] = set()
    for t in layout.plan():
        assert t.size == volume(t.box) * ITEMSIZE
        if t.origin is None:
            assert intersect(t.box, layout.shards.boxes[t.src][t.name]) == t.box
        else:
            assert (t.name, t.box, t.src, t.origin) in done
        domain = of[t.domain]
        assert t.dst == t.src if t.src in domain.members else t.dst in domain.readers
        done.add((t.name, t.box, t.dst, t.domain))


@given(layouts())
def test_bytes_on_the_wire_are_those_that_no_member_has(layout: Layout) -> None:
    """The lower bound, from the layouts alone: what no rank of the domain trains must come from elsewhere, once."""
    transfers = layout.plan()
    for domain in layout.domains:
        missing = sum(
            int((marked(name, wanted).astype(bool) & ~held(layout, name, domain.members)).sum())
            for name, wanted in domain.boxes.items()
        )
        assert sum(t.size for t in transfers if t.domain == domain.name and t.src != t.dst) == missing * ITEMSIZE


@given(layouts())
def test_a_node_takes_in_only_what_none_of_its_ranks_has_and_that_once(layout: Layout) -> None:
    """The lower bound of what crosses nodes. That no byte leaves a node twice is the best that a node can do."""
    nodes = layout.shards.node_of
    crossing = [t for t in layout.plan() if nodes[t.src] != nodes[t.dst]]
    for node in set(nodes.values()):
        for name in SHAPES:
            wanted = np.zeros(SHAPES[name], dtype=bool)
            for domain in layout.domains:
                if layout.home(domain) == node:
                    wanted |= marked(name, domain.boxes[name]) > 0
            entered = total(name, [t for t in crossing if nodes[t.dst] == node])
            assert (entered == (wanted & ~held(layout, name, layout.on(node)))).all()
            assert total(name, [t for t in crossing if nodes[t.src] == node]).max() <= 1


@given(layouts())
def test_what_is_passed_on_has_come_a_round_or_a_bucket_before(layout: Layout) -> None:
    """A domain with slots has it no longer than one bucket."""
    lag, transfers = lags(layout.shards, layout.domains), layout.plan()
    came = {(t.name, t.box, t.domain): t.round for t in transfers}
    slots = {domain.name: domain.slots for domain in layout.domains}
    for t in transfers:
        if t.origin is None:
            assert t.round == 0
        elif lag[t.origin] == lag[t.domain]:
            assert t.round == came[t.name, t.box, t.origin] + 1
        else:
            assert t.round == 0 and lag[t.origin] < lag[t.domain]
            assert slots[t.origin] is None or lag[t.origin] == lag[t.domain] - 1


@given(layouts())
def test_the_plan_is_the_same_whatever_the_order_of_the_ranks_boxes(layout: Layout) -> None:
    turned = Shards(dict(reversed(layout.shards.boxes.items())), layout.shards.node_of)
    assert plan(turned, layout.domains, ITEMSIZE) == layout.plan()


@given(layouts())
def test_a_plan_is_made_once_for_the_same_layouts(layout: Layout) -> None:
    """Layouts that are equal, but not the same objects."""
    again = Layout(
        Shards({rank: dict(boxes) for rank, boxes in layout.shards.boxes.items()}, dict(layout.shards.node_of)),
        tuple(Domain(d.name, d.members, d.readers, dict(d.boxes), d.slots) for d in layout.domains),
    )
    assert again.plan() is layout.plan()
    other = plan(layout.shards, layout.domains, 2 * ITEMSIZE)
    assert [t.size for t in other] == [2 * t.size for t in layout.plan()]


def test_planning_leaves_the_collector_as_it_was() -> None:
    layout = Layout(Shards({0: {"a": ((0, 4),)}}, {0: "a"}), (Domain("rank 0", (0,), (0,), {"a": ((0, 4),)}),))
    for enabled in (True, False):
        (gc.enable if enabled else gc.disable)()
        try:
            plan(layout.shards, layout.domains, 1 + enabled)
            assert gc.isenabled() == enabled
        finally:
            gc.enable()


@given(layouts())
def test_the_bill_is_the_sum_of_the_transfers(layout: Layout) -> None:
    transfers, nodes = layout.plan(), layout.shards.node_of
    bill = planned_bytes(transfers, nodes)
    assert bill.wire + bill.local == sum(t.size for t in transfers)
    assert bill.local == sum(t.size for t in transfers if t.src == t.dst)
    assert sum(bill.received.values()) == bill.wire
    assert sum(bill.left.values()) == sum(bill.entered.values()) <= bill.wire
    assert bill.sent[3] == sum(t.size for t in transfers if t.src == 3 != t.dst)


def test_replicas_share_the_sending() -> None:
    """Ranks 0 and 1 hold the same ten tensors; rank 2 gets five from each."""
    boxes: dict[str, Box] = {f"layer {i}": whole((4,)) for i in range(10)}
    shards = Shards({0: boxes, 1: boxes}, dict.fromkeys(range(3), "a"))
    transfers = plan(shards, [Domain("rank 2", (2,), (2,), boxes)], ITEMSIZE)
    assert Counter(t.src for t in transfers) == {0: 5, 1: 5}


def test_readers_share_the_receiving() -> None:
    boxes: dict[str, Box] = {f"layer {i}": whole((4,)) for i in range(10)}
    shards = Shards({0: boxes}, {0: "a", 1: "b", 2: "b"})
    transfers = plan(shards, [Domain("node b", (1, 2), (2, 1), boxes, slots=2)], ITEMSIZE)
    assert Counter(t.dst for t in transfers) == {1: 5, 2: 5}


LAYERS = {f"layer {i}": (64 * 6, 8) for i in range(4)}
MODEL = sum(rows * columns for rows, columns in LAYERS.values()) * ITEMSIZE


def trained_on(ranks: Sequence[int]) -> dict[int, dict[str, Box]]:
    """Rows shared out evenly."""
    rows = 64 * 6 // len(ranks)
    return {rank: dict.fromkeys(LAYERS, ((i * rows, (i + 1) * rows), (0, 8))) for i, rank in enumerate(ranks)}


def shared_memory(nodes: Sequence[int], size: int) -> list[Domain]:
    boxes = {name: whole(shape) for name, shape in LAYERS.items()}
    return [Domain(f"node {n}", tuple(range(n * size, (n + 1) * size)), (n * size,), boxes, slots=2) for n in nodes]


@pytest.mark.parametrize("count", [2, 8, 64])
def test_a_ring_of_nodes_that_train_and_generate(count: int) -> None:
    """As good as an all-gather: (N - 1) / N of the model into each node and out of each, and alike on all of them."""
    size = 3
    nodes = {rank: f"node {rank // size}" for rank in range(count * size)}
    shards = Shards(trained_on(range(count * size)), nodes)
    bill = planned_bytes(plan(shards, shared_memory(range(count), size), ITEMSIZE), nodes)
    share = MODEL * (count - 1) // count
    assert bill.entered == bill.left == dict.fromkeys((f"node {n}" for n in range(count)), share)


@pytest.mark.parametrize("count", [2, 8, 64])
def test_a_chain_of_nodes_that_only_generate(count: int) -> None:
    """One node trains, the others take the model in and pass it on: it leaves each node once, the last one not."""
    nodes = {rank: f"node {rank // 2}" for rank in range(count * 2)}
    shards, domains = Shards(trained_on([0, 1]), nodes), shared_memory(range(1, count), 2)
    bill = planned_bytes(plan(shards, domains, ITEMSIZE), nodes)
    assert bill.entered == {f"node {n}": MODEL if n else 0 for n in range(count)}
    assert bill.left == {f"node {n}": MODEL if n < count - 1 else 0 for n in range(count)}
    assert list(lags(shards, domains).values()) == list(range(count - 1))


@pytest.mark.parametrize("count", [2, 8, 64])
def test_replicas_on_a_node_that_have_parameters_of_their_own(count: int) -> None:
    """Four ranks on each node, each with the whole model: it comes in once, and goes on within the node."""
    boxes = {name: whole(shape) for name, shape in LAYERS.items()}
    nodes = {rank: f"node {rank // 4}" for rank in range(count * 4)}
    shards = Shards(trained_on([0, 1, 2, 3]), nodes)
    domains = [Domain(f"rank {r}", (r,), (r,), boxes) for r in range(4, count * 4)]
    bill = planned_bytes(plan(shards, domains, ITEMSIZE), nodes)
    assert bill.entered == {f"node {n}": MODEL if n else 0 for n in range(count)}
    assert bill.wire == (count - 1) * 4 * MODEL
    sent = [bill.sent[rank] for rank in range(4, (count - 1) * 4)]
    assert not sent or max(sent) - min(sent) <= MODEL // 4, "the four share what leaves their node"


def test_a_parameter_that_nobody_trains_is_a_fault_of_the_caller() -> None:
    shards = Shards({0: {"a": ((0, 2),)}, 1: {"a": ((3, 4),)}}, dict.fromkeys(range(2), "a"))
    with pytest.raises(AssertionError, match="a is covered 3 of 4"):
        plan(shards, [Domain("rank 0", (0,), (0,), {"a": whole((4,))})], ITEMSIZE)


def test_a_domain_on_two_nodes_is_a_fault_of_the_caller() -> None:
    boxes: dict[str, Box] = {"a": whole((4,))}
    with pytest.raises(AssertionError, match="on several nodes"):
        plan(Shards({0: boxes}, {0: "a", 1: "b"}), [Domain("both", (0, 1), (0,), boxes)], ITEMSIZE)


def test_the_plan_of_seventy_billion_parameters_on_64_ranks() -> None:
    """Training 2 x 4 x 8, generation in replicas of 8 on the same ranks: made in seconds, and even."""
    shapes = {}
    for layer in range(80):
        shapes |= {f"{layer}.attention.{i}": (8192, 8192) for i in range(4)}
        shapes |= {f"{layer}.mlp.{i}": (28672, 8192) for i in range(3)} | {f"{layer}.norm.{i}": (8192,) for i in (0, 1)}
    boxes: dict[int, dict[str, Box]] = {}
    for rank in range(64):
        stage, dp, tp = rank // 32, rank // 8 % 4, rank % 8
        boxes[rank] = {}
        for name, (rows, *rest) in shapes.items():
            if int(name.split(".")[0]) // 40 == stage:
                part = (rows // 8 * tp, rows // 8 * (tp + 1)) if rest else (0, rows)
                step = (part[1] - part[0]) // 4
                boxes[rank][name] = ((part[0] + dp * step, part[0] + (dp + 1) * step), *whole(tuple(rest)))
    domains = []
    for rank in range(64):
        mine: dict[str, Box] = {}
        for name, (rows, *rest) in shapes.items():
            part = (rows // 8 * (rank % 8), rows // 8 * (rank % 8 + 1)) if rest else (0, rows)
            mine[name] = (part, *whole(tuple(rest)))
        domains.append(Domain(f"rank {rank}", (rank,), (rank,), mine))
    nodes = {rank: f"node {rank // 8}" for rank in range(64)}
    transfers = plan(Shards(boxes, nodes), domains, ITEMSIZE)
    bill = planned_bytes(transfers, nodes)
    model = sum(int(np.prod(shape)) for shape in shapes.values()) * ITEMSIZE
    assert all(entered == model - model // 8 for entered in bill.entered.values())
    received = sorted(bill.received.values())
    assert received[-1] <= received[0] * 1.001
    assert all(a <= b * 1.01 for a, b in pairwise(sorted(bill.sent.values())))
