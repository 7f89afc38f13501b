"""Packing, held against one sequence at a time."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from verl.model.packing import MicroBatch, Sequences, dummy_micro_batch, pack, plan_micro_batches

LENGTHS = st.lists(st.integers(1, 30), min_size=1, max_size=20)
CAPACITY = st.one_of(st.none(), st.integers(1, 60))


@given(LENGTHS, st.integers(1, 100), CAPACITY, st.data())
def test_every_sequence_is_in_one_micro_batch(
    lengths: list[int], max_tokens: int, capacity: int | None, data: st.DataObject
) -> None:
    rows = data.draw(st.lists(st.sampled_from(range(len(lengths))), unique=True))
    planned = plan_micro_batches(lengths, rows, max_tokens, capacity)
    assert sorted(i for batch in planned for row in batch for i in row) == sorted(rows)
    assert all(row for batch in planned for row in batch)


@given(LENGTHS, st.integers(1, 100), CAPACITY)
def test_the_budget_is_kept_unless_one_sequence_is_longer(
    lengths: list[int], max_tokens: int, capacity: int | None
) -> None:
    """The budget is of places in the rectangle, filled or not: that is what takes memory and time."""
    longest = max(lengths)
    for batch in plan_micro_batches(lengths, range(len(lengths)), max_tokens, capacity):
        time = max(sum(lengths[i] for i in row) for row in batch)
        assert time <= max(longest, max_tokens if capacity is None else capacity)
        assert len(batch) == 1 or len(batch) * time <= max(max_tokens, longest)


@given(LENGTHS)
def test_flash_attention_fills_one_row_to_the_budget(lengths: list[int]) -> None:
    """A row may be as long as the budget, so a micro-batch is one row, and first fit leaves no two half empty."""
    batches = plan_micro_batches(lengths, range(len(lengths)), 40, row_capacity=40)
    assert all(len(batch) == 1 for batch in batches)
    filled = [sum(lengths[i] for i in batch[0]) for batch in batches]
    assert all(tokens <= 40 for tokens in filled)
    assert sum(tokens <= 20 for tokens in filled) <= 1


def test_equal_lengths_fill_rectangles_without_a_gap() -> None:
    assert plan_micro_batches([10] * 5, range(5), 20, None) == [[[0], [1]], [[2], [3]], [[4]]]


def test_rows_of_a_dense_mask_are_nearly_full() -> None:
    """No two of these sequences fit a row as long as the longest, which would leave a quarter of the places empty."""
    lengths = list(range(53, 105, 3))
    places = sum(
        len(batch) * max(sum(lengths[i] for i in row) for row in batch)
        for batch in plan_micro_batches(lengths, range(len(lengths)), 4096, None)
    )
    assert places <= 1.1 * sum(lengths)


def test_rows_of_a_dense_mask_are_no_longer_than_they_need_be() -> None:
    (batch,) = plan_micro_batches([108] * 16, range(16), 4096, None)
    assert len(batch) == 16
    (batch,) = plan_micro_batches([100, 60, 60, 60, 60, 60, 60], range(7), 4096, None)
    assert len(batch) * max(sum([100, 60, 60, 60, 60, 60, 60][i] for i in row) for row in batch) <= 500  # of 700


def test_no_rows_are_no_micro_batches() -> None:
    assert plan_micro_batches([3, 4], [], 20, None) == []


@st.composite
def pairs(draw: st.DrawFn) -> list[tuple[list[int], list[int]]]:
    """Prompts of one token or more, responses of none or more. Token ids are all different: a wrong place shows."""
    shapes = draw(st.lists(st.tuples(st.integers(1, 6), st.integers(0, 6)), min_size=1, max_size=8))
    fresh = iter(range(100, 1000))
    return [([next(fresh) for _ in range(p)], [next(fresh) for _ in range(r)]) for p, r in shapes]


def sequences(made: list[tuple[list[int], list[int]]], make: str) -> Sequences:
    prompts, responses = (
        [torch.tensor(part, dtype=torch.int64) for part in column] for column in zip(*made, strict=True)
    )
    return {"responses": Sequences.responses, "last_tokens": Sequences.last_tokens}[make](prompts, responses)


def visible(batch: MicroBatch, place: int) -> list[int]:
    """What a causal decoder sees at a flat place: back to where the position was 0 last."""
    time = batch.input_ids.shape[1]
    row, at = divmod(place, time)
    ids, positions = batch.input_ids[row].tolist(), batch.position_ids[row].tolist()
    start = max(t for t in range(at + 1) if positions[t] == 0)
    assert positions[start : at + 1] == list(range(at + 1 - start))
    return ids[start : at + 1]


@given(pairs(), st.integers(1, 40), CAPACITY)
def test_each_response_token_is_predicted_from_all_before_it_and_nothing_else(
    made: list[tuple[list[int], list[int]]], max_tokens: int, capacity: int | None
) -> None:
    rows = sequences(made, "responses")
    wanted = [(prompt + response[:i], token) for prompt, response in made for i, token in enumerate(response)]
    assert rows.num_outputs == len(wanted)
    outputs: dict[int, tuple[list[int], int]] = {}
    for planned in plan_micro_batches(rows.lengths, range(len(made)), max_tokens, capacity):
        batch = pack(rows, planned)
        assert batch.input_ids.shape == batch.position_ids.shape == (len(planned), batch.input_ids.shape[1])
        for place, target, token in zip(batch.select, batch.targets, batch.tokens, strict=True):
            assert int(token) not in outputs
            outputs[int(token)] = visible(batch, int(place)), int(target)
    assert [outputs[i] for i in range(len(wanted))] == wanted


@given(pairs(), st.integers(1, 40))
def test_a_score_is_read_at_the_last_token(made: list[tuple[list[int], list[int]]], max_tokens: int) -> None:
    rows = sequences(made, "last_tokens")
    assert rows.num_outputs == len(made)
    seen: dict[int, list[int]] = {}
    for planned in plan_micro_batches(rows.lengths, range(len(made)), max_tokens, None):
        batch = pack(rows, planned)
        seen |= {int(t): visible(batch, int(place)) for place, t in zip(batch.select, batch.tokens, strict=True)}
    assert [seen[i] for i in range(len(made))] == [prompt + response for prompt, response in made]


@given(pairs(), st.integers(1, 40))
def test_the_tail_of_a_short_row_lengthens_its_last_sequence(
    made: list[tuple[list[int], list[int]]], max_tokens: int
) -> None:
    """A tail that began at 0 anew would be one more sequence, and none at all a row that attends to nothing."""
    rows = sequences(made, "responses")
    for planned in plan_micro_batches(rows.lengths, range(len(made)), max_tokens, None):
        batch = pack(rows, planned)
        for row, positions in zip(planned, batch.position_ids.tolist(), strict=True):
            assert positions.count(0) == len(row)
            assert all(b in (0, a + 1) for a, b in pairwise(positions))


@given(pairs(), st.integers(1, 40), CAPACITY, st.integers(1, 8))
def test_time_that_is_shared_out_is_a_multiple_of_the_ranks(
    made: list[tuple[list[int], list[int]]], max_tokens: int, capacity: int | None, ranks: int
) -> None:
    """Every sequence is where it would be, and the rectangles keep to the budget in whole multiples."""
    rows = sequences(made, "responses")
    longest = -(-max(rows.lengths) // ranks) * ranks
    outputs: dict[int, list[int]] = {}
    for planned in plan_micro_batches(rows.lengths, range(len(made)), max_tokens, capacity, ranks):
        batch = pack(rows, planned, ranks)
        time = batch.input_ids.shape[1]
        assert time % ranks == 0 and time <= max(longest, max_tokens if capacity is None else capacity)
        assert len(planned) == 1 or len(planned) * time <= max(max_tokens, longest)
        for place, token in zip(batch.select, batch.tokens, strict=True):
            outputs[int(token)] = visible(batch, int(place))
    assert [outputs[i] for i in range(len(outputs))] == [p + r[:i] for p, r in made for i in range(len(r))]


@pytest.mark.parametrize("time", [1, 4])
def test_a_dummy_has_tokens_and_no_output(time: int) -> None:
    batch = dummy_micro_batch(time)
    assert batch.input_ids.shape == (1, time)
    assert batch.position_ids.tolist() == [list(range(time))], "one sequence"
    assert batch.select.numel() == batch.targets.numel() == batch.tokens.numel() == 0


def test_a_response_without_a_prompt_is_refused() -> None:
    with pytest.raises(AssertionError, match="predicted at a prompt's last one"):
        Sequences.responses([torch.empty(0, dtype=torch.int64)], [torch.tensor([5])])


@given(pairs(), st.integers(1, 40), CAPACITY, st.integers(1, 5))
def test_parts_of_the_time_are_the_whole_with_every_output_in_one_of_them(
    made: list[tuple[list[int], list[int]]], max_tokens: int, capacity: int | None, parts: int
) -> None:
    """Each output is read at the token before its target, also where that is the last one of a part."""
    rows = sequences(made, "responses")
    for planned in plan_micro_batches(rows.lengths, range(len(made)), max_tokens, capacity, parts):
        batch = pack(rows, planned, parts)
        split = [batch.part(index, parts) for index in range(parts)]
        assert torch.equal(torch.cat([part.input_ids for part in split], 1), batch.input_ids)
        assert torch.equal(torch.cat([part.position_ids for part in split], 1), batch.position_ids)
        assert sorted(int(at) for part in split for at in part.tokens) == list(range(len(batch.select)))
        for part in split:
            for place, target, at in zip(part.select, part.targets, part.tokens, strict=True):
                assert part.input_ids.flatten()[place] == batch.input_ids.flatten()[batch.select[at]]
                assert target == batch.targets[at]
