"""The KL divergence from the reference policy: estimators, as a penalty and as a loss, and its coefficient."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from verl.algo.ratio import bounded_log_ratio
from verl.config import KLEstimator

MAX_KL_ERROR = 0.2
"""Largest relative distance from its target that moves an adaptive coefficient (Ziegler et al. 2019)."""


def kl_penalty(logprobs: Tensor, ref_logprobs: Tensor, estimator: KLEstimator) -> Tensor:
    """An estimate of KL(policy || reference) at each token sampled from the policy, in nats; all [k].

    With r = reference / policy probability: k1 = -log r, k2 = (log r)**2 / 2, k3 = r - 1 - log r (Schulman 2020,
    "Approximating KL Divergence"). k1 and k3 have the KL as their mean; k2, which is biased, and k3 are never negative.

    No estimate is clamped: log-probs of -1 and -40 give k1 = 39, k2 = 760.5 and k3 = 38. Only where k3 would overflow,
    at a reference e**20 times as probable as the policy, is its log r held there (`ratio`).
    """
    match estimator:
        case KLEstimator.k1:
            return logprobs - ref_logprobs
        case KLEstimator.k2:
            return 0.5 * (logprobs - ref_logprobs).square()
        case KLEstimator.k3:
            log_r = bounded_log_ratio(ref_logprobs, logprobs)
            return torch.expm1(log_r) - log_r  # exp(log_r) - 1 would be rounding noise for a small log_r in float32


def kl_loss(
    logprobs: Tensor,
    ref_logprobs: Tensor,
    estimator: KLEstimator = KLEstimator.k2,
    straight_through: bool = False,
) -> Tensor:
    """`kl_penalty` to be minimised through logprobs, [k].

    On tokens sampled from the policy itself, only k2's gradient has that of KL(policy || reference) as its mean. The
    mean of k1's is 0, and of k3's that of KL(reference || policy): both are here because others use them.
    `straight_through` takes the value of `estimator` and the gradient of k2.
    """
    value = kl_penalty(logprobs, ref_logprobs, estimator)
    if not straight_through:
        return value
    slope = kl_penalty(logprobs, ref_logprobs, KLEstimator.k2)
    return value.detach() + (slope - slope.detach())


class FixedKL:
    """A coefficient that stays."""

    def __init__(self, coef: float) -> None:
        self.coef = coef

    def update(self, kl_per_sequence: float, num_sequences: int) -> None:
        pass

    def state_dict(self) -> dict[str, Any]:
        return {"coef": self.coef}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing to restore: the coefficient is what this run was configured with."""


class AdaptiveKL:
    """A coefficient that rises while the KL is above its target and falls while it is below (Ziegler et al. 2019,
    arXiv 1909.08593, section 2.2): proportionally, by at most 20 % over `horizon` sequences."""

    def __init__(self, coef: float, target: float, horizon: int) -> None:
        assert target > 0 and horizon > 0, (target, horizon)
        self.coef = coef
        self.target = target
        self.horizon = horizon

    def update(self, kl_per_sequence: float, num_sequences: int) -> None:
        """After a step: its mean KL of a sequence, summed over the sequence's tokens, in nats, and how many there were.

        Raises ValueError on a KL that is no number, and where so many sequences would turn the coefficient's sign.
        """
        if num_sequences == 0:
            return
        if not math.isfinite(kl_per_sequence):
            raise ValueError(
                f"the mean KL from the reference of {num_sequences} sequences is {kl_per_sequence} and cannot move "
                f"the KL coefficient ({self.coef}): find the log-probs of the policy or reference that are not finite"
            )
        if num_sequences * MAX_KL_ERROR >= self.horizon:
            raise ValueError(
                f"algorithm.kl_ctrl.horizon is {self.horizon}, but a step has {num_sequences} sequences: "
                f"the coefficient could fall to 0 or below at once. Set it above {num_sequences * MAX_KL_ERROR:g}"
            )
        error = max(-MAX_KL_ERROR, min(MAX_KL_ERROR, kl_per_sequence / self.target - 1))
        self.coef *= 1 + error * num_sequences / self.horizon

    def state_dict(self) -> dict[str, Any]:
        return {"coef": self.coef}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the coefficient; target and horizon are this run's."""
        self.coef = float(state["coef"])
