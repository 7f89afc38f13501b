from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from verl.algo.losses import mismatch_weight, policy_loss, value_loss
from verl.config import MismatchCorrection

F64 = torch.float64


def tensor(*values: float) -> Tensor:
    return torch.tensor(values, dtype=F64)


# Policy loss


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "clipped", "slope"),  # slope: d loss / d logprob
    [
        (1.0, 2.0, -2.0, False, -2.0),
        (1.1, 2.0, -2.2, False, -2.2),
        (1.5, 2.0, -2.4, True, 0.0),  # better than the clip allows: no more to be had
        (0.5, 2.0, -1.0, False, -1.0),  # worse than before: free to come back
        (1.5, -2.0, 3.0, False, 3.0),
        (0.5, -2.0, 1.6, True, 0.0),
        (1.5, 0.0, 0.0, False, 0.0),
    ],
)
def test_policy_loss_and_its_gradient_on_both_sides_of_the_clip(ratio, advantage, loss, clipped, slope):
    logprobs = tensor(math.log(ratio)).requires_grad_()
    result = policy_loss(logprobs, tensor(0.0), tensor(advantage), clip_low=0.2, clip_high=0.2)
    result.loss.sum().backward()
    assert result.loss.item() == pytest.approx(loss, abs=1e-15)
    assert result.clipped.tolist() == [clipped] and result.clipped_lower.tolist() == [False]
    assert result.ratio.item() == pytest.approx(ratio) and not result.ratio.requires_grad
    assert logprobs.grad is not None and logprobs.grad.item() == pytest.approx(slope, abs=1e-15)


def test_upper_and_lower_clip_are_separate():
    logprobs = tensor(1.25, 1.35, 0.85, 0.7).log()
    advantages = tensor(1, 1, -1, -1)
    result = policy_loss(logprobs, torch.zeros(4), advantages, clip_low=0.2, clip_high=0.28)
    assert result.clipped.tolist() == [False, True, False, True]
    assert result.loss.tolist() == pytest.approx([-1.25, -1.28, 0.85, 0.8])


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "lower", "slope"),
    [
        (2.9, -2.0, 5.8, False, 5.8),
        (3.5, -2.0, 6.0, True, 0.0),
        (3.5, 2.0, -2.4, False, 0.0),  # only negative advantages are bounded from below
        (0.5, -2.0, 1.6, False, 0.0),
    ],
)
def test_dual_clip_bounds_the_loss_of_negative_advantages(ratio, advantage, loss, lower, slope):
    logprobs = tensor(math.log(ratio)).requires_grad_()
    result = policy_loss(logprobs, tensor(0.0), tensor(advantage), 0.2, 0.2, clip_c=3.0)
    result.loss.sum().backward()
    assert result.loss.item() == pytest.approx(loss)
    assert result.clipped_lower.tolist() == [lower]
    assert logprobs.grad is not None and logprobs.grad.item() == pytest.approx(slope)


def test_on_policy_the_ratio_is_exactly_1_and_the_gradient_the_policy_gradients():
    logprobs = torch.randn(50, generator=torch.Generator().manual_seed(0)).sub(3).requires_grad_()
    advantages = torch.randn(50, generator=torch.Generator().manual_seed(1))
    result = policy_loss(logprobs, logprobs.detach(), advantages, 0.2, 0.2, 3.0)
    result.loss.sum().backward()
    assert result.ratio.tolist() == [1.0] * 50
    assert not result.clipped.any() and not result.clipped_lower.any()
    assert logprobs.grad is not None and torch.equal(logprobs.grad, -advantages)


@given(
    tokens=st.lists(
        st.tuples(st.floats(-8, 0), st.floats(-8, 0), st.floats(-5, 5)),
        min_size=1,
        max_size=12,
    ),
    clip_low=st.floats(0.05, 0.5),
    clip_high=st.floats(0.05, 0.5),
    clip_c=st.one_of(st.none(), st.floats(1.1, 5)),
)
@settings(max_examples=100, deadline=None)
def test_policy_loss_is_the_loop_over_tokens(tokens, clip_low, clip_high, clip_c):
    expected = []
    for new, old, advantage in tokens:
        ratio = math.exp(new - old)
        objective = min(ratio * advantage, min(max(ratio, 1 - clip_low), 1 + clip_high) * advantage)
        if clip_c is not None and advantage < 0:
            objective = max(objective, clip_c * advantage)
        expected.append(-objective)
    columns = torch.tensor(tokens, dtype=F64).unbind(dim=1)
    loss = policy_loss(*columns, clip_low, clip_high, clip_c).loss
    assert loss.tolist() == pytest.approx(expected, rel=1e-12, abs=1e-12)


def test_policy_loss_passes_gradcheck_away_from_its_corners():
    logprobs = tensor(0.1, -0.1, 0.5, -0.5, 2.0, 0.5).requires_grad_()
    advantages = tensor(1.0, -1.0, 1.0, -1.0, -1.0, -2.0)
    assert torch.autograd.gradcheck(lambda x: policy_loss(x, torch.zeros(6), advantages, 0.2, 0.28, 3.0).loss, logprobs)


@pytest.mark.parametrize("apart", [50.0, 100.0, 1e4])
def test_log_probs_that_are_far_apart_overflow_in_no_direction(apart: float):
    """float32: e**89 is infinite, and its gradient, infinity times 0, is NaN."""
    for difference in (apart, -apart):
        for advantage in (1.0, -1.0, 0.0):
            logprobs = torch.tensor([difference], requires_grad=True)
            result = policy_loss(logprobs, torch.zeros(1), torch.tensor([advantage]), 0.2, 0.2)
            result.loss.sum().backward()
            assert logprobs.grad is not None and logprobs.grad.isfinite().all() and result.loss.isfinite().all()
    assert policy_loss(torch.tensor([apart]), torch.zeros(1), torch.ones(1), 0.2, 0.2).ratio.item() == pytest.approx(
        math.exp(20), rel=1e-6
    )


# Value loss


@pytest.mark.parametrize(
    ("value", "old", "target", "loss", "clipped", "slope"),
    [
        (1.1, 1.0, 2.0, 0.5 * 0.9**2, False, -0.9),
        (1.5, 1.0, 2.0, 0.5 * 0.8**2, True, 0.0),  # nearer to the target than the clip allows
        (0.5, 1.0, 2.0, 0.5 * 1.5**2, False, -1.5),  # moved away from it: free to come back
        (2.5, 1.0, 1.9, 0.5 * 0.7**2, True, 0.0),
    ],
)
def test_value_loss_and_its_gradient_on_both_sides_of_the_clip(value, old, target, loss, clipped, slope):
    values = tensor(value).requires_grad_()
    result = value_loss(values, tensor(old), tensor(target), clip=0.2)
    result.loss.sum().backward()
    assert result.loss.item() == pytest.approx(loss)
    assert result.clipped.tolist() == [clipped]
    assert values.grad is not None and values.grad.item() == pytest.approx(slope, abs=1e-15)


def test_value_loss_passes_gradcheck_away_from_its_corners():
    values = tensor(1.1, 1.5, 0.5, 2.5).requires_grad_()
    assert torch.autograd.gradcheck(
        lambda x: value_loss(x, torch.ones(4, dtype=F64), tensor(2, 2, 2, 1.9), 0.2).loss, values
    )


# Mismatch between the rollout engine and the training engine


def test_case_22_weight_is_old_over_rollout_and_the_current_policy_is_not_in_it():
    old, rollout = tensor(0.6, 0.1).log(), tensor(0.4, 0.2).log()
    weight = mismatch_weight(old, rollout, MismatchCorrection.truncate, cap=2.0)
    assert weight.tolist() == pytest.approx([1.5, 0.5])
    logprobs = tensor(0.7, 0.3).log().requires_grad_()
    loss = policy_loss(logprobs, old, tensor(1, -1), 10, 10).loss * weight
    assert loss.tolist() == pytest.approx([-0.7 / 0.6 * 1.5, 0.3 / 0.1 * 0.5])  # the correction of off-policy sampling


def test_mismatch_is_cut_at_the_cap_or_dropped_outside_of_it():
    old, rollout = tensor(4.0, 1.9, 0.6, 0.4).log(), torch.zeros(4, dtype=F64)
    weigh = {mode: mismatch_weight(old, rollout, mode, cap=2.0).tolist() for mode in MismatchCorrection}
    assert weigh[MismatchCorrection.none] == [1.0] * 4
    assert weigh[MismatchCorrection.truncate] == pytest.approx([2.0, 1.9, 0.6, 0.4])
    assert weigh[MismatchCorrection.mask] == pytest.approx([0.0, 1.9, 0.6, 0.0])


def test_mismatch_weight_is_exactly_1_where_the_engines_agree_and_is_a_constant():
    logprobs = torch.randn(9, generator=torch.Generator().manual_seed(0)).requires_grad_()
    for mode in MismatchCorrection:
        weight = mismatch_weight(logprobs, logprobs.detach(), mode, cap=2.0)
        assert weight.tolist() == [1.0] * 9 and not weight.requires_grad


def test_mismatch_weight_does_not_overflow():
    for mode in MismatchCorrection:
        assert mismatch_weight(torch.tensor([0.0]), torch.tensor([-1e4]), mode, 2.0).isfinite().all()
