from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from verl.algo.aggregate import loss_counts, token_weights, weighted_sum, zero_unweighted
from verl.algo.losses import policy_loss, value_loss
from verl.config import LossAggregation

F64 = torch.float64
NAN = math.nan
TOKEN_MEAN = LossAggregation.token_mean
TOKEN_SUM = LossAggregation.seq_mean_token_sum
SEQ_MEAN = LossAggregation.seq_mean_token_mean


def weights_of(lengths: list[int], row_weights: list[float], mode: LossAggregation) -> Tensor:
    tensors = torch.tensor(lengths), torch.tensor(row_weights)
    tokens, rows = loss_counts(*tensors).tolist()
    return token_weights(*tensors, mode, tokens, rows)


def loss_of_rows(rows: list[list[float]], mode: LossAggregation) -> float:
    """The definition, over live rows."""
    rows = [row for row in rows if row]
    if mode is TOKEN_MEAN:
        return sum(map(sum, rows)) / sum(map(len, rows))
    if mode is TOKEN_SUM:
        return sum(map(sum, rows)) / len(rows)
    return sum(sum(row) / len(row) for row in rows) / len(rows)


# A batch of rows [1, 1, 1, 1] and [3]: 7 / 5, 7 / 2, (1 + 3) / 2. Scaling each micro-batch by its share of the rows
# would give 2 for the first.
@pytest.mark.parametrize(
    ("case", "mode", "expected"),
    [
        ("5: token mean", TOKEN_MEAN, 1.4),
        ("6: sequence mean of token sums", TOKEN_SUM, 3.5),
        ("sequence mean of token means", SEQ_MEAN, 2.0),
    ],
)
def test_cases_5_and_6_loss_of_the_micro_batches_is_that_of_the_whole(case, mode, expected):
    counts = loss_counts(torch.tensor([4, 1]), torch.ones(2))
    assert counts.tolist() == [5.0, 2.0]
    whole = weighted_sum(torch.tensor([1.0, 1, 1, 1, 3]), weights_of([4, 1], [1, 1], mode))
    parts = [
        weighted_sum(
            torch.tensor(losses), token_weights(torch.tensor([len(losses)]), torch.ones(1), mode, *counts.tolist())
        )
        for losses in ([1.0, 1.0, 1.0, 1.0], [3.0])
    ]
    assert whole.item() == pytest.approx(expected)
    assert sum(parts).item() == pytest.approx(expected)


def test_case_8_all_rows_masked_give_0_and_zero_gradients():
    for mode in LossAggregation:
        weights = weights_of([2, 1], [0, 0], mode)
        assert weights.tolist() == [0.0] * 3
        logprobs = torch.tensor([NAN, -1.0, -2.0], requires_grad=True)
        loss = weighted_sum(zero_unweighted(logprobs, weights).exp(), weights)
        loss.backward()
        assert loss.item() == 0.0
        assert logprobs.grad is not None and logprobs.grad.tolist() == [0.0] * 3


def test_case_8_no_token_at_all_gives_0_and_can_be_sent_backward():
    for mode in LossAggregation:
        weights = weights_of([0, 0], [1, 0], mode)
        logprobs = torch.empty(0, requires_grad=True)
        loss = weighted_sum(logprobs * 2, weights)
        loss.backward()
        assert loss.item() == 0.0


@pytest.mark.parametrize("bad", [NAN, math.inf, -math.inf])
@pytest.mark.parametrize("mode", list(LossAggregation))
def test_case_13_what_is_not_finite_at_a_token_of_weight_0_changes_no_value_and_no_gradient(mode, bad):
    """Through the whole chain, where 0 times the slope of a NaN would be NaN again."""
    weights = weights_of([2, 2], [1, 0], mode)
    clean = torch.tensor([-1.0, -2.0, -3.0, -4.0], dtype=F64)
    dirty = torch.tensor([-1.0, -2.0, bad, bad], dtype=F64)

    def run(given: Tensor) -> tuple[Tensor, Tensor]:
        x = given.clone().requires_grad_()
        live = zero_unweighted(x, weights)
        loss = policy_loss(live, given + 0.1, given, 0.2, 0.2, 3.0).loss + value_loss(live, given, given + 1, 0.2).loss
        total = weighted_sum(loss, weights)
        total.backward()
        assert x.grad is not None
        return total.detach(), x.grad

    (value, gradient), (dirty_value, dirty_gradient) = run(clean), run(dirty)
    assert value.item() == dirty_value.item() != 0
    assert torch.equal(gradient, dirty_gradient)
    assert gradient[2:].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("mode", list(LossAggregation))
def test_case_14_rows_added_to_make_a_batch_divide_are_in_no_numerator_or_denominator(mode):
    losses = torch.tensor([1.0, 2.0, 4.0])
    alone = weighted_sum(losses, weights_of([2, 1], [1, 1], mode))
    filled_lengths, filled_weights = [2, 3, 1, 0], [1.0, 0.0, 1.0, 0.0]
    filled = weighted_sum(
        torch.tensor([1.0, 2.0, NAN, 5.0, 5.0, 4.0]), weights_of(filled_lengths, filled_weights, mode)
    )
    assert filled.item() == alone.item()


def test_live_row_without_trainable_tokens_is_in_no_denominator():
    assert weights_of([0, 2], [1, 1], SEQ_MEAN).tolist() == [0.5, 0.5]
    assert weights_of([0, 2], [1, 1], TOKEN_SUM).tolist() == [1.0, 1.0]


def test_gradient_of_a_weighted_sum_is_the_weights():
    weights = weights_of([1, 2], [1, 1], SEQ_MEAN)
    loss = torch.randn(3, dtype=F64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    assert torch.equal(torch.autograd.grad(weighted_sum(loss, weights), loss)[0], weights)
    assert torch.autograd.gradcheck(lambda x: weighted_sum(x, weights), loss)


def test_float32_losses_are_summed_in_float64():
    loss = torch.full((100_000,), 0.1, requires_grad=True)
    total = weighted_sum(loss, torch.ones(100_000))
    total.backward()
    assert total.item() == pytest.approx(100_000 * float(torch.tensor(0.1)), rel=1e-14)
    assert loss.grad is not None and loss.grad.dtype == torch.float32


@st.composite
def split_batches(draw):
    """Live and dead rows of losses, and for each row the (rank, micro-batch) that gets it."""
    rows = draw(
        st.lists(
            st.tuples(
                st.lists(st.floats(-10, 10), max_size=6),
                st.sampled_from([1.0, 1.0, 1.0, 0.0]),
                st.tuples(st.integers(0, 2), st.integers(0, 2)),
            ),
            min_size=1,
            max_size=9,
        )
    )
    return rows, draw(st.sampled_from(list(LossAggregation)))


@given(batch=split_batches())
@settings(max_examples=200, deadline=None)
def test_any_split_into_micro_batches_and_ranks_gives_the_loss_and_gradient_of_the_whole(batch):
    rows, mode = batch
    parameter = torch.tensor(0.7, dtype=F64, requires_grad=True)

    def weigh(part) -> tuple[Tensor, Tensor]:
        return torch.tensor([len(losses) for losses, _, _ in part]), torch.tensor([weight for _, weight, _ in part])

    parts = [[row for row in rows if row[2] == place] for place in sorted({place for _, _, place in rows})]
    counts = torch.stack([loss_counts(*weigh(part)) for part in parts]).sum(dim=0).tolist()  # the all-reduce
    total, gradient = 0.0, 0.0
    for part in parts:
        weights = token_weights(*weigh(part), mode, *counts)
        losses = torch.tensor([x for losses, _, _ in part for x in losses], dtype=F64)
        loss = weighted_sum(losses * parameter.square(), weights)
        total += loss.item()
        gradient += torch.autograd.grad(loss, parameter)[0].item()

    live = [losses for losses, weight, _ in rows if weight == 1 and losses]
    whole = loss_of_rows(live, mode) if live else 0.0
    assert total == pytest.approx(whole * 0.49, rel=1e-12, abs=1e-12)
    assert gradient == pytest.approx(whole * 1.4, rel=1e-12, abs=1e-12)
