from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl.flow.placement import Coordinate, Placement

PIPELINE = Placement("actor", (7, 3, 5, 1, 0, 2, 4, 6), tp=2, pp=2)
"""Written as in the mesh: stage 0 is ranks 7 3 | 5 1, stage 1 is 0 2 | 4 6; a bar parts data-parallel indices."""


@pytest.mark.parametrize(
    ("rank", "pp", "dp", "tp"),
    [(7, 0, 0, 0), (3, 0, 0, 1), (5, 0, 1, 0), (1, 0, 1, 1), (0, 1, 0, 0), (2, 1, 0, 1), (4, 1, 1, 0), (6, 1, 1, 1)],
)
def test_coordinates_follow_the_listed_order(rank: int, pp: int, dp: int, tp: int) -> None:
    assert PIPELINE.coordinate(rank) == Coordinate(pp, dp, tp)


def test_input_rows_go_to_all_stages_and_output_rows_live_on_the_last() -> None:
    assert PIPELINE.inputs.groups == ((7, 3, 0, 2), (5, 1, 4, 6))
    assert PIPELINE.outputs.groups == ((0, 2), (4, 6))
    assert PIPELINE.leaders == (0, 4)
    assert PIPELINE.leader == 0


def test_a_rollout_is_spoken_to_by_the_first_rank_of_each_replica() -> None:
    rollout = Placement("rollout", (4, 5, 2, 3), tp=2, leaders_only=True)
    assert rollout.inputs.groups == rollout.outputs.groups == ((4,), (2,))
    assert rollout.leaders == (4, 2)


def test_context_parallel_ranks_have_the_same_rows() -> None:
    place = Placement("actor", (7, 3, 5, 1, 0, 2, 4, 6), tp=2, cp=2)
    assert (place.dp, place.spread) == (2, 4)
    assert place.inputs.groups == place.outputs.groups == ((7, 3, 5, 1), (0, 2, 4, 6))
    assert place.leaders == (7, 0)
    assert place.coordinate(4) == Coordinate(pp=0, dp=1, cp=1, tp=0)


@given(
    tp=st.integers(1, 4), pp=st.integers(1, 3), dp=st.integers(1, 4), cp=st.integers(1, 3),
    order=st.randoms(use_true_random=False),
)  # fmt: skip
def test_each_coordinate_is_taken_once(tp: int, pp: int, dp: int, cp: int, order: object) -> None:
    ranks = list(range(tp * pp * dp * cp))
    order.shuffle(ranks)  # type: ignore[attr-defined]
    place = Placement("actor", tuple(ranks), tp, pp, cp=cp)
    assert place.dp == dp
    at = [place.coordinate(rank) for rank in ranks]
    places = itertools.product(range(pp), range(dp), range(cp), range(tp))
    assert at == [Coordinate(p, d, t, c) for p, d, c, t in places]
    # tensor-parallel peers are neighbours in the list, then context- and data-parallel ones, then stages
    for rank in ranks:
        c = place.coordinate(rank)
        assert rank in place.inputs.groups[c.dp]
        assert (rank in place.outputs.ranks) == (c.pp == pp - 1)


def test_copies_of_a_model() -> None:
    place = Placement("actor", tuple(range(24)), tp=2, pp=2, fsdp_size=3)
    assert (place.dp, place.copies) == (6, 2)
    assert Placement("actor", tuple(range(24)), tp=2, pp=2).copies == 1
    with pytest.raises(AssertionError):
        Placement("actor", tuple(range(24)), tp=2, pp=2, fsdp_size=4)


@given(st.integers(1, 6), st.integers(1, 5))
def test_shares_are_adjacent_and_equal(dp: int, share: int) -> None:
    home = Placement("actor", tuple(range(dp))).outputs
    rows = [row for rank in range(dp) for row in home.rows(rank, dp * share)]
    assert rows == list(range(dp * share))
    assert {len(home.rows(rank, dp * share)) for rank in range(dp)} == {share}
