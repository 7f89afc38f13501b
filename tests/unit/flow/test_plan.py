"""The plan of a hand-over, held against what placements say: who holds which rows, and who wants them."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl.flow.placement import Home, Placement
from verl.flow.plan import Move, plan

WORLD = 12


@st.composite
def placements(draw: st.DrawFn, role: str) -> Placement:
    """Any tp, pp and dp that fit, on ranks in any order."""
    tp, pp = draw(st.sampled_from([(1, 1), (2, 1), (1, 2), (2, 2), (4, 1), (1, 3)]))
    dp = draw(st.sampled_from([d for d in (1, 2, 3, 4, 6) if d * tp * pp <= WORLD]))
    ranks = draw(st.permutations(range(WORLD)))[: dp * tp * pp]
    return Placement(role, tuple(ranks), tp, pp, leaders_only=draw(st.booleans()))


@st.composite
def hand_overs(draw: st.DrawFn) -> tuple[Home, tuple[Home, ...], int]:
    source = draw(placements("rollout"))
    targets = [draw(placements(f"reader {i}")) for i in range(draw(st.integers(1, 3)))]
    size = 12 * draw(st.integers(1, 3))
    return source.outputs, tuple(target.inputs for target in targets), size


def rows_on(home: Home, rank: int, size: int) -> list[int]:
    """Row by row, from the definition: equal shares of adjacent rows, one share a group."""
    return [row for row in range(size) if rank in home.groups[row * len(home.groups) // size]]


@given(hand_overs())
def test_every_reader_gets_its_rows_once_and_in_order(hand_over: tuple[Home, tuple[Home, ...], int]) -> None:
    source, targets, size = hand_over
    moves = plan(source, targets, size)
    for rank in range(WORLD):
        wanted = {row for home in targets for row in rows_on(home, rank, size)}
        arriving = [row for move in moves if move.dst == rank for row in move.rows]
        assert arriving == sorted(wanted)


@given(hand_overs())
def test_senders_hold_what_they_send_and_holders_are_sent_nothing(
    hand_over: tuple[Home, tuple[Home, ...], int],
) -> None:
    source, targets, size = hand_over
    for move in plan(source, targets, size):
        assert set(move.rows) <= set(rows_on(source, move.src, size))
        if move.src != move.dst:
            assert not set(move.rows) & set(rows_on(source, move.dst, size))


@given(hand_overs())
def test_replicas_share_the_sending(hand_over: tuple[Home, tuple[Home, ...], int]) -> None:
    """No rank sends more than another of its group by more than one message's rows."""
    source, targets, size = hand_over
    sent: Counter[int] = Counter()
    for move in plan(source, targets, size):
        if move.src != move.dst:
            sent[move.src] += len(move.rows)
    for group in source.groups:
        counts = [sent[rank] for rank in group]
        assert max(counts) - min(counts) <= size // len(source.groups)


def test_replicas_take_turns_whatever_the_readers_numbers() -> None:
    """Readers 2, 4, 6 and 8 are all even; both holders send to two of them."""
    moves = plan(Home("actor", ((0, 1),)), (Home("critic", ((2,), (4,), (6,), (8,))),), 8)
    assert moves == (
        Move(0, 2, range(0, 2)),
        Move(1, 4, range(2, 4)),
        Move(0, 6, range(4, 6)),
        Move(1, 8, range(6, 8)),
    )


def test_a_reader_of_two_roles_gets_the_union_of_its_rows() -> None:
    """Rank 1 is the second of two data-parallel ranks for one role and the second of three for the other."""
    halves, thirds = Home("actor", ((0,), (1,))), Home("critic", ((2,), (1,), (3,)))
    moves = plan(Home("rollout", ((4,),)), (halves, thirds), 6)
    assert [m for m in moves if m.dst == 1] == [Move(4, 1, range(2, 6))]


def test_rows_that_do_not_split_are_refused_with_the_numbers() -> None:
    with pytest.raises(ValueError, match="actor: 7 rows do not split over 2 data-parallel groups"):
        plan(Home("actor", ((0,), (1,))), (Home("critic", ((2,),)),), 7)
