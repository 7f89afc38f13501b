"""The reshard plan, counted element by element."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from verl.reshard.layout import Box, Domain, Shards, intersect, volume, whole
from verl.reshard.plan import Transfer, buckets, plan

WORLD, ITEMSIZE = 6, 2
SHAPES: dict[str, tuple[int, ...]] = {"matrix": (7, 4), "square": (3, 3), "vector": (5,), "head": (1, 4)}


@dataclass(frozen=True)
class Layout:
    shards: Shards
    domains: tuple[Domain, ...]

    def plan(self) -> tuple[Transfer, ...]:
        return plan(self.shards, self.domains, ITEMSIZE)


def cuts(size: int, parts: int) -> list[tuple[int, int]]:
    """As torch.chunk cuts, which FSDP does: some parts may be empty."""
    step = -(-size // parts)
    return [(min(i * step, size), min((i + 1) * step, size)) for i in range(parts)]


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Training shards over rows, and over columns too, some with replicas; engines that read whole tensors or rows."""
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
    nodes = {rank: draw(st.sampled_from("ab")) for rank in range(WORLD)}
    return Layout(Shards(boxes, nodes), tuple(draw(domains(nodes))))


@st.composite
def domains(draw: st.DrawFn, nodes: dict[int, str]) -> list[Domain]:
    """Nodes' shared memory with some ranks there reading it, or ranks' own memory."""
    wanted: dict[str, Box] = {name: whole(shape) for name, shape in SHAPES.items()}
    if draw(st.booleans()):
        wanted["matrix"] = (draw(st.sampled_from([(0, 4), (3, 7), (2, 5)])), (0, 4))
    made = []
    if draw(st.booleans()):
        for node in sorted(set(nodes.values())):
            members = tuple(rank for rank in nodes if nodes[rank] == node)
            readers = draw(st.lists(st.sampled_from(members), min_size=1, unique=True))
            made.append(Domain(f"node {node}", members, tuple(readers), wanted))
    else:
        for rank in draw(st.lists(st.integers(0, WORLD - 1), min_size=1, unique=True)):
            made.append(Domain(f"rank {rank}", (rank,), (rank,), wanted))
    return made


def marked(name: str, box: Box) -> np.ndarray:
    """1 at the elements of the box, 0 elsewhere."""
    counts = np.zeros(SHAPES[name], dtype=int)
    counts[tuple(slice(low, high) for low, high in box)] = 1
    return counts


def held(layout: Layout, name: str, ranks: tuple[int, ...]) -> np.ndarray:
    """True at the elements that one of the ranks trains."""
    out = np.zeros(SHAPES[name], dtype=bool)
    for rank in ranks:
        box = layout.shards.boxes.get(rank, {}).get(name)
        if box is not None:
            out |= marked(name, box) > 0
    return out


@given(layouts())
def test_every_wanted_element_comes_into_every_domain_once(layout: Layout) -> None:
    transfers = layout.plan()
    for domain in layout.domains:
        for name, wanted in domain.boxes.items():
            parts = [marked(name, t.box) for t in transfers if (t.domain, t.name) == (domain.name, name)]
            assert (sum(parts, np.zeros(SHAPES[name], dtype=int)) == marked(name, wanted)).all()


@given(layouts())
def test_sources_hold_what_they_give_and_members_write_it_themselves(layout: Layout) -> None:
    of = {domain.name: domain for domain in layout.domains}
    for t in layout.plan():
        assert intersect(t.box, layout.shards.boxes[t.src][t.name]) == t.box
        assert t.size == volume(t.box) * ITEMSIZE
        domain = of[t.domain]
        assert t.dst == (t.src if t.src in domain.members else domain.readers[0])


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
def test_a_near_source_goes_before_a_far_one(layout: Layout) -> None:
    """Nothing crosses nodes that a rank of the receiver's node has."""
    of, nodes = {domain.name: domain for domain in layout.domains}, layout.shards.node_of
    for t in layout.plan():
        home = nodes[of[t.domain].receiver]
        if nodes[t.src] != home:
            near = tuple(rank for rank in nodes if nodes[rank] == home)
            assert not (held(layout, t.name, near) & marked(t.name, t.box).astype(bool)).any()


def test_replicas_share_the_sending() -> None:
    """Ranks 0 and 1 hold the same ten tensors; rank 2 gets five from each."""
    boxes: dict[str, Box] = {f"layer {i}": whole((4,)) for i in range(10)}
    shards = Shards({0: boxes, 1: boxes}, dict.fromkeys(range(3), "a"))
    transfers = plan(shards, [Domain("rank 2", (2,), (2,), boxes)], ITEMSIZE)
    assert Counter(t.src for t in transfers) == {0: 5, 1: 5}


def test_a_parameter_that_nobody_trains_is_a_fault_of_the_caller() -> None:
    shards = Shards({0: {"a": ((0, 2),)}, 1: {"a": ((3, 4),)}}, dict.fromkeys(range(2), "a"))
    try:
        plan(shards, [Domain("rank 0", (0,), (0,), {"a": whole((4,))})], ITEMSIZE)
    except AssertionError as error:
        assert "a is covered 3 of 4" in str(error)
    else:
        raise AssertionError("a hole in the shards was not seen")


TRANSFERS = st.lists(
    st.builds(
        lambda pair, domain, size: Transfer("x", ((0, size),), pair[0], pair[1], domain, size),
        st.sampled_from([(0, 1), (1, 0), (0, 2), (1, 1), (2, 2)]),
        st.sampled_from(["one", "other"]),
        st.integers(1, 12),
    ),
    max_size=30,
)


@given(TRANSFERS, st.integers(1, 20))
def test_buckets_carry_every_message_in_order_and_within_the_limit(transfers: list[Transfer], limit: int) -> None:
    rounds = buckets(transfers, limit)
    for messages in rounds:
        assert messages
        keys = [(m[0].src, m[0].dst, m[0].domain) for m in messages]
        assert len(set(keys)) == len(keys)
        for message in messages:
            assert len({(t.src, t.dst, t.domain) for t in message}) == 1
            assert len(message) == 1 or sum(t.size for t in message) <= limit
    for key in {(t.src, t.dst, t.domain) for t in transfers}:
        sent = [t for ms in rounds for m in ms for t in m if (t.src, t.dst, t.domain) == key]
        assert sent == ([t for t in transfers if (t.src, t.dst, t.domain) == key] if key[0] != key[1] else [])
