from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from verl.flow.batch import Column, Record, Rows
from verl.flow.placement import Placement

ACTOR = Placement("actor", (1, 0))
CRITIC = Placement("critic", (2,))
RAGGED = st.lists(st.lists(st.integers(-9, 9), max_size=4), max_size=6)


def column(name: str = "scores", rank: int = 1) -> Column:
    """Two rows a rank on the actor's ranks."""
    rows = Rows.scalars([1.0, 2.0], torch.float32) if rank in ACTOR.ranks else None
    return Column.produced(name, 4, ACTOR, rank, rows)


@given(RAGGED)
def test_ragged_rows_split_into_what_they_were_made_of(lists: list[list[int]]) -> None:
    rows = Rows.ragged(lists, torch.int64)
    assert len(rows) == len(lists)
    assert [row.tolist() for row in rows.split()] == lists


@given(RAGGED, RAGGED)
def test_cat_is_the_rows_of_both(first: list[list[int]], second: list[list[int]]) -> None:
    both = Rows.cat([Rows.ragged(first, torch.int64), Rows.ragged(second, torch.int64)])
    assert [row.tolist() for row in both.split()] == first + second


@given(RAGGED, st.data())
def test_take_is_a_slice_of_the_rows(lists: list[list[int]], data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(lists)))
    stop = data.draw(st.integers(start, len(lists)))
    taken = Rows.ragged(lists, torch.int64).take(range(start, stop))
    assert [row.tolist() for row in taken.split()] == lists[start:stop]


def test_a_value_a_row_is_spread_over_the_tokens_of_the_row() -> None:
    tokens = Rows.ragged([[5, 5], [], [7]], torch.int64)
    assert Rows.scalars([1.0, 2.0, 3.0], torch.float32).spread(tokens).tolist() == [1.0, 1.0, 3.0]


def test_rows_of_several_values_are_no_scalars() -> None:
    with pytest.raises(AssertionError, match="more than one value"):
        Rows.ragged([[1, 2], [3]], torch.int64).scalar()


def test_other_values_must_be_of_the_same_tokens() -> None:
    rows = Rows.ragged([[1, 2], [3]], torch.int64)
    assert [r.tolist() for r in rows.like(torch.tensor([0.1, 0.2, 0.3])).split()] == [
        pytest.approx([0.1, 0.2]),
        pytest.approx([0.3]),
    ]
    with pytest.raises(AssertionError):
        rows.like(torch.zeros(2))


def test_a_column_gives_its_rows_where_it_was_made() -> None:
    assert column().on(ACTOR).values.tolist() == [1.0, 2.0]


def test_rows_on_their_way_are_received_once_and_only_when_read() -> None:
    calls = []

    def arrive() -> Rows:
        calls.append(1)
        return Rows.scalars([5.0], torch.float32)

    made = column(rank=2).living_also_on([CRITIC.inputs])
    made.put("critic", arrive)
    assert not calls
    assert [made.on(CRITIC).values.tolist() for _ in range(2)] == [[5.0], [5.0]]
    assert len(calls) == 1


def test_a_role_that_lists_its_ranks_anew_loses_what_lay_by_the_old_list() -> None:
    """Its output lives on the last stage; handed over to itself it lives on every stage's ranks."""
    pipeline = Placement("actor", (1, 0), pp=2)
    made = Column.produced("values", 1, pipeline, 0, Rows.scalars([3.0], torch.float32))
    wider = made.living_also_on([pipeline.inputs])
    with pytest.raises(RuntimeError, match="rank 0 reads 'values' for actor"):
        wider.on(pipeline)
    assert made.on(pipeline).values.tolist() == [3.0]


def test_reading_for_a_role_that_it_was_not_handed_to_says_what_to_do() -> None:
    with pytest.raises(
        RuntimeError, match=r"rank 1 reads .scores. for critic, but it lives on actor ranks \(1, 0\)\. Hand it"
    ):
        column().on(CRITIC)


@pytest.mark.parametrize(("ask", "asked"), [(bool, "truth"), (len, "length")])
@pytest.mark.parametrize("rank", [1, 2])
def test_a_branch_on_a_column_is_refused_on_every_rank(ask: object, asked: str, rank: int) -> None:
    with pytest.raises(RuntimeError, match=f"rank {rank} asks the {asked} of 'scores', which lives on actor ranks"):
        ask(column(rank=rank))  # type: ignore[operator]


def test_a_produced_column_must_have_its_share_of_the_rows() -> None:
    with pytest.raises(AssertionError):
        Column.produced("scores", 6, ACTOR, 1, Rows.scalars([1.0, 2.0], torch.float32))


@dataclass(frozen=True)
class Inner(Record):
    ids: Column
    weight: Column


@dataclass(frozen=True)
class Outer(Record):
    inner: Inner
    scores: Column
    values: Column | None = None


def record() -> Outer:
    return Outer(Inner(column("ids"), column("weight")), column("scores"))


def test_columns_are_named_by_their_way_in_and_absent_ones_are_left_out() -> None:
    assert [name for name, _ in record().columns()] == ["inner.ids", "inner.weight", "scores"]


def test_with_columns_changes_those_alone() -> None:
    before, weight, values = record(), column("new weight"), column("new values")
    after = before.with_columns({"inner.weight": weight, "values": values})
    assert after.inner.weight is weight and after.values is values
    assert after.inner.ids is before.inner.ids and after.scores is before.scores
    assert before.values is None


@pytest.mark.parametrize("name", ["nothing", "inner.nothing", "nothing.ids"])
def test_with_columns_refuses_a_name_that_the_record_lacks(name: str) -> None:
    with pytest.raises(AssertionError, match="nothing"):
        record().with_columns({name: column()})
