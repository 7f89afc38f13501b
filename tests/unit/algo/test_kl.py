from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from verl.algo.kl import AdaptiveKL, FixedKL, kl_loss, kl_penalty
from verl.config import KLEstimator

F64 = torch.float64
K1, K2, K3 = KLEstimator.k1, KLEstimator.k2, KLEstimator.k3


def tensor(*values: float) -> Tensor:
    return torch.tensor(values, dtype=F64)


@pytest.fixture
def logits() -> tuple[Tensor, Tensor]:
    """Of the policy and the reference over a vocabulary of 7, so that means over samples can be computed exactly."""
    generator = torch.Generator().manual_seed(0)
    policy, reference = (torch.randn(7, dtype=F64, generator=generator) for _ in range(2))
    return policy.requires_grad_(), reference


def test_case_50_no_estimate_is_clamped():
    """Elsewhere a clamp makes these 10 or 19."""
    near, far = tensor(-1.0), tensor(-40.0)
    assert kl_penalty(near, far, K1).item() == 39.0
    assert kl_penalty(near, far, K2).item() == 760.5
    assert kl_penalty(near, far, K3).item() == pytest.approx(38.0, abs=1e-15)
    assert kl_penalty(far, near, K1).item() == -39.0
    assert kl_penalty(far, near, K2).item() == 760.5


def test_case_50_k3_holds_its_log_ratio_at_20_where_it_would_overflow():
    assert kl_penalty(tensor(-40.0), tensor(-1.0), K3).item() == pytest.approx(math.exp(20) - 21)
    logprobs = torch.tensor([-200.0], requires_grad=True)  # float32, where e**199 is infinite
    value = kl_penalty(logprobs, torch.tensor([-1.0]), K3)
    value.sum().backward()
    assert value.isfinite().all() and logprobs.grad is not None and logprobs.grad.tolist() == [0.0]


def test_estimates_of_one_token():
    logprobs, reference = tensor(0.5).log(), tensor(0.25).log()
    assert kl_penalty(logprobs, reference, K1).item() == pytest.approx(math.log(2))
    assert kl_penalty(logprobs, reference, K2).item() == pytest.approx(math.log(2) ** 2 / 2)
    assert kl_penalty(logprobs, reference, K3).item() == pytest.approx(0.5 - 1 + math.log(2))


@pytest.mark.parametrize("estimator", list(KLEstimator))
def test_the_same_policy_has_an_estimate_of_exactly_0(estimator: KLEstimator):
    logprobs = torch.randn(20, generator=torch.Generator().manual_seed(0)) - 2
    assert not kl_penalty(logprobs, logprobs.clone(), estimator).any()


@pytest.mark.parametrize("estimator", [K1, K3])
def test_mean_of_k1_and_of_k3_over_the_policys_samples_is_the_kl(estimator: KLEstimator, logits):
    policy, reference = (x.detach().log_softmax(0) for x in logits)
    kl = torch.nn.functional.kl_div(reference, policy, log_target=True, reduction="sum")
    mean = (policy.exp() * kl_penalty(policy, reference, estimator)).sum()
    torch.testing.assert_close(mean, kl, rtol=1e-14, atol=1e-14)


def test_k3_keeps_its_digits_in_float32_for_a_small_log_ratio():
    """exp(d) - 1 - d rounds to multiples of 1.2e-7 there, larger than the 5e-9 that it should be."""
    logprobs, reference = torch.zeros(1), torch.tensor([1e-4])
    expected = math.expm1(float(reference)) - float(reference)
    assert kl_penalty(logprobs, reference, K3).item() == pytest.approx(expected, rel=5e-3)


def mean_gradient(logits: Tensor, reference: Tensor, estimator: KLEstimator, straight_through: bool = False) -> Tensor:
    """Of `kl_loss` over all samples of the policy, each with its probability: exact."""
    logprobs = logits.log_softmax(0)
    loss = logprobs.detach().exp() * kl_loss(logprobs, reference.log_softmax(0), estimator, straight_through)
    return torch.autograd.grad(loss.sum(), logits)[0]


def gradient_of_kl(logits: Tensor, reference: Tensor, reverse: bool) -> Tensor:
    p, q = logits.log_softmax(0), reference.log_softmax(0)
    kl = (p.exp() * (p - q)).sum() if reverse else (q.exp() * (q - p)).sum()
    return torch.autograd.grad(kl, logits)[0]


def test_case_23_k2_is_the_default_loss_and_has_the_gradient_of_the_kl(logits):
    torch.testing.assert_close(mean_gradient(*logits, K2), gradient_of_kl(*logits, reverse=True))
    logprobs, reference = tensor(-1.0, -2.0), tensor(-1.5, -1.0)
    assert torch.equal(kl_loss(logprobs, reference), kl_penalty(logprobs, reference, K2))


def test_case_23_k1_and_k3_as_a_loss_have_another_gradient(logits):
    true = gradient_of_kl(*logits, reverse=True)
    torch.testing.assert_close(mean_gradient(*logits, K1), torch.zeros_like(true), rtol=0, atol=1e-15)
    torch.testing.assert_close(mean_gradient(*logits, K3), gradient_of_kl(*logits, reverse=False))
    assert (mean_gradient(*logits, K3) - true).abs().max() > 0.05


@pytest.mark.parametrize("estimator", list(KLEstimator))
def test_case_23_straight_through_has_the_estimators_value_and_k2s_gradient(estimator: KLEstimator, logits):
    torch.testing.assert_close(
        mean_gradient(*logits, estimator, straight_through=True), gradient_of_kl(*logits, reverse=True)
    )
    logprobs, reference = (x.detach().log_softmax(0) for x in logits)
    value = kl_loss(logprobs, reference, estimator, straight_through=True)
    assert torch.equal(value, kl_penalty(logprobs, reference, estimator))


@pytest.mark.parametrize("estimator", list(KLEstimator))
def test_estimates_pass_gradcheck(estimator: KLEstimator):
    reference = tensor(-1.0, -2.0, -3.0)
    assert torch.autograd.gradcheck(
        lambda x: kl_penalty(x, reference, estimator), tensor(-2.0, -0.5, -3.5).requires_grad_()
    )


# The coefficient


def test_fixed_coefficient_stays_and_a_restart_takes_the_configured_one():
    kl = FixedKL(0.05)
    kl.update(100.0, 64)
    assert kl.coef == 0.05
    kl.load_state_dict({"coef": 0.5})
    assert kl.coef == 0.05


@pytest.mark.parametrize(
    ("observed", "expected"),
    [
        (6.0, 0.1),  # on target
        (6.6, 0.1 * (1 + 0.1 * 256 / 10000)),
        (5.4, 0.1 * (1 - 0.1 * 256 / 10000)),
        (600.0, 0.1 * (1 + 0.2 * 256 / 10000)),  # the error is limited to 20 %
        (0.0, 0.1 * (1 - 0.2 * 256 / 10000)),
        (-3.0, 0.1 * (1 - 0.2 * 256 / 10000)),  # k1's mean can be negative
    ],
)
def test_adaptive_coefficient_moves_in_proportion_to_the_limited_error(observed: float, expected: float):
    kl = AdaptiveKL(0.1, target=6.0, horizon=10000)
    kl.update(observed, 256)
    assert kl.coef == pytest.approx(expected, rel=1e-15)


def test_adaptive_coefficient_finds_the_target_of_a_simple_world():
    """The KL that a policy settles at falls as the coefficient rises: here kl = 0.6 / coef, so 6 is at 0.1."""
    kl = AdaptiveKL(0.02, target=6.0, horizon=1000)
    for _ in range(200):
        kl.update(0.6 / kl.coef, 256)
    assert kl.coef == pytest.approx(0.1, rel=1e-3)


def test_adaptive_coefficient_is_restored_and_goes_on_the_same():
    one, other = AdaptiveKL(0.1, 6.0, 1000), AdaptiveKL(7.0, 6.0, 1000)
    one.update(9.0, 100)
    other.load_state_dict(one.state_dict())
    for kl in (one, other):
        kl.update(3.3, 100)
    assert one.coef == other.coef


def test_adaptive_coefficient_ignores_a_step_without_sequences():
    kl = AdaptiveKL(0.1, 6.0, 1000)
    kl.update(math.nan, 0)
    assert kl.coef == 0.1


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_adaptive_coefficient_refuses_a_kl_that_is_no_number(bad: float):
    kl = AdaptiveKL(0.1, 6.0, 1000)
    with pytest.raises(ValueError, match=r"64 sequences.*log-probs"):
        kl.update(bad, 64)
    assert kl.coef == 0.1


def test_adaptive_coefficient_never_turns_its_sign():
    with pytest.raises(ValueError, match=r"horizon is 100, but a step has 500 sequences.*above 100"):
        AdaptiveKL(0.1, 6.0, 100).update(0.0, 500)
    kl = AdaptiveKL(0.1, 6.0, 100)
    kl.update(0.0, 499)
    assert kl.coef > 0
