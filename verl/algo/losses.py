"""Losses of single tokens, before they are weighted and summed (`aggregate`)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from verl.algo.ratio import bounded_log_ratio
from verl.config import MismatchCorrection


class PolicyLoss(NamedTuple):
    """Per token, all [k]."""

    loss: Tensor
    clipped: Tensor
    """bool: the clipped objective is the smaller one, so that the token has no gradient."""
    clipped_lower: Tensor
    """bool: the dual clip took effect, which takes the gradient as well."""
    ratio: Tensor
    """p / p_old, detached."""


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    clip_low: float,
    clip_high: float,
    clip_c: float | None = None,
) -> PolicyLoss:
    """The negative clipped surrogate objective of PPO (Schulman et al. 2017, arXiv 1707.06347, eq. 7) of each token.

    logprobs, old_logprobs, advantages [k]; only logprobs gets a gradient. The ratio p / p_old is clipped to
    [1 - clip_low, 1 + clip_high]. With clip_c > 1, a token of negative advantage loses at most clip_c * |advantage|:
    the dual clip (Ye et al. 2019, arXiv 1912.09729, eq. 5). log(p / p_old) is bounded as in `ratio`.
    """
    assert clip_c is None or clip_c > 1, clip_c
    ratio = bounded_log_ratio(logprobs, old_logprobs).exp()
    free = -advantages * ratio
    bounded = -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    loss = torch.maximum(free, bounded)
    clipped = bounded > free
    if clip_c is None:
        clipped_lower = torch.zeros_like(clipped)
    else:
        most = -advantages * clip_c
        clipped_lower = (advantages < 0) & (loss > most)
        loss = torch.where(clipped_lower, most, loss)
    return PolicyLoss(loss, clipped, clipped_lower, ratio.detach())


class ValueLoss(NamedTuple):
    """Per token, both [k]."""

    loss: Tensor
    clipped: Tensor
    """bool: the clipped value's error is the larger one, so that the token has no gradient."""


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, clip: float) -> ValueLoss:
    """Half the squared error of each token, of the value or of the value clipped to old_values +- clip: the larger one.

    values, old_values, returns [k]; only values gets a gradient. From the PPO implementation of Dhariwal et al. 2017
    (OpenAI baselines, ppo2), where the half is part of the loss too.
    """
    near = old_values + (values - old_values).clamp(-clip, clip)
    free, bounded = (values - returns).square(), (near - returns).square()
    return ValueLoss(0.5 * torch.maximum(free, bounded), bounded > free)


@torch.no_grad()
def mismatch_weight(old_logprobs: Tensor, rollout_logprobs: Tensor, mode: MismatchCorrection, cap: float) -> Tensor:
    """What each token's policy loss is multiplied by, since the rollout engine sampled it: old / rollout probability.

    old_logprobs, by the training engine before the step's first update, and rollout_logprobs, by the engine that
    sampled, [k]; it is not the current policy's ratio, which `policy_loss` takes. A constant to the gradient, [k]:
    none: 1; truncate: at most `cap` (Ionides 2008, truncated importance sampling); mask: 0 outside [1 / cap, cap].
    log(old / rollout) is bounded as in `ratio`.
    """
    assert cap >= 1, cap
    ratio = bounded_log_ratio(old_logprobs, rollout_logprobs).exp()
    match mode:
        case MismatchCorrection.none:
            return torch.ones_like(ratio)
        case MismatchCorrection.truncate:
            return ratio.clamp(max=cap)
        case MismatchCorrection.mask:
            return torch.where((ratio >= 1 / cap) & (ratio <= cap), ratio, 0.0)
