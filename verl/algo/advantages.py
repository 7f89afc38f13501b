"""Advantages: GAE over tokens, group baselines over rows, and whitening whose sums cross ranks."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

WHITEN_EPS = 1e-8
"""Added to the variance."""
GROUP_STD_EPS = 1e-6
"""Added to a group's standard deviation."""


@torch.no_grad()
def gae(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (Schulman et al. 2015, arXiv 1506.02438) over the trainable tokens of each row.

    rewards, values [rows, time]; mask [rows, time], nonzero at trainable tokens, which may lie anywhere in a row. A
    masked place is skipped as if it were not there: it takes no step of discount, and no value at it, NaN included,
    has any influence. A reward at a masked place counts at the last trainable token before it, or at the row's first
    one where none is before it; NaN there is padding. What follows the last trainable token has value 0.

    Returns advantages and returns (advantages + values), [rows, time], 0 at masked places; float64 if an argument is,
    else float32.
    """
    assert rewards.shape == values.shape == mask.shape, (rewards.shape, values.shape, mask.shape)
    dtype = torch.promote_types(_working_dtype(rewards), _working_dtype(values))
    mask = mask.bool()
    rewards = _rewards_at_trainable(rewards.to(dtype), mask)
    values = torch.where(mask, values.to(dtype), 0.0)

    advantages = torch.zeros_like(values)
    advantage = next_value = values.new_zeros(len(values))
    for t in reversed(range(values.shape[1])):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        advantage = torch.where(mask[:, t], delta + gamma * lam * advantage, advantage)
        next_value = torch.where(mask[:, t], values[:, t], next_value)
        advantages[:, t] = advantage
    advantages = torch.where(mask, advantages, 0.0)
    return advantages, advantages + values


def _rewards_at_trainable(rewards: Tensor, mask: Tensor) -> Tensor:
    """Rewards [rows, time] with those of masked places moved to where `gae` says that they count."""
    rewards = torch.where(rewards.isnan() & ~mask, 0.0, rewards)
    nth = (mask.long().cumsum(dim=1) - 1).clamp(min=0)  # which of the row's trainable tokens a place counts for
    by_nth = torch.zeros_like(rewards).scatter_add(1, nth, rewards)
    return torch.where(mask, by_nth.gather(1, nth), 0.0)


@torch.no_grad()
def whiten_moments(x: Tensor, weights: Tensor) -> Tensor:
    """float64 [3]: sum, sum of squares and count of x [k] over the tokens with weight 1 in weights [k] (1 or 0).

    The moments of several ranks add up: all-reduce them by sum, then `whiten`. x at weight 0, NaN included, is not in
    them.
    """
    assert x.shape == weights.shape, (x.shape, weights.shape)
    weights = weights.double()
    x = torch.where(weights != 0, x.double(), 0.0)
    return torch.stack([(weights * x).sum(), (weights * x * x).sum(), weights.sum()])


@torch.no_grad()
def whiten(x: Tensor, moments: Tensor) -> Tensor:
    """(x - mean) / sqrt(variance + WHITEN_EPS), with the unbiased variance; x [k], moments [3] of `whiten_moments`.

    With fewer than two tokens counted there is no variance, and x is returned as it is. Computed in float64, given
    back in x's dtype. The variance is a difference of sums and so off by about 1e-16 * mean**2.
    """
    total, total_of_squares, count = moments.double().unbind()
    mean = total / count.clamp(min=1)
    variance = ((total_of_squares - count * mean**2) / (count - 1).clamp(min=1)).clamp(min=0)
    whitened = (x.double() - mean) * torch.rsqrt(variance + WHITEN_EPS)
    return torch.where(count > 1, whitened, x.double()).to(x.dtype)


class GroupAdvantages(NamedTuple):
    """Advantages [rows] and how many rows of weight 1 were left out since their score is NaN or infinite."""

    advantages: Tensor
    num_left_out: int


@torch.no_grad()
def grpo(scores: Tensor, group_size: int, weights: Tensor, norm_by_std: bool) -> GroupAdvantages:
    """Scores less their group's mean, divided by its unbiased standard deviation + GROUP_STD_EPS if `norm_by_std`.

    GRPO (Shao et al. 2024, arXiv 2402.03300); without the division, Dr. GRPO (Liu et al. 2025, arXiv 2503.20783).
    scores [rows], group_size adjacent rows a group; weights [rows], 1 or 0. Rows of weight 0, and rows whose score is
    not finite, are in no mean or deviation and get advantage 0. A single row that is left of a larger group has
    nothing to be compared with and gets 0; with group_size 1 there is no baseline by choice: mean 0 and deviation 1.
    """
    group = _Groups(scores, group_size, weights)
    centred = group.centred()
    if norm_by_std:
        std = (centred.square().sum(dim=1, keepdim=True) / (group.count - 1).clamp(min=1)).sqrt()
        centred = centred / (std + GROUP_STD_EPS if group_size > 1 else 1.0 + GROUP_STD_EPS)
    return group.advantages(centred)


@torch.no_grad()
def rloo(scores: Tensor, group_size: int, weights: Tensor) -> GroupAdvantages:
    """Scores less the mean of the group's other rows: RLOO (Ahmadian et al. 2024, arXiv 2402.14740).

    Arguments, rows left out and groups of one are as in `grpo`.
    """
    group = _Groups(scores, group_size, weights)
    return group.advantages(group.centred() * group.count / (group.count - 1).clamp(min=1))


class _Groups:
    """Scores as [groups, group_size] in float64, so that equal float32 scores differ from their mean by exactly 0."""

    def __init__(self, scores: Tensor, group_size: int, weights: Tensor) -> None:
        assert scores.shape == weights.shape, (scores.shape, weights.shape)
        assert len(scores) % group_size == 0, (len(scores), group_size)
        finite = scores.isfinite()
        self.dtype = _working_dtype(scores)
        self.num_left_out = int(((weights != 0) & ~finite).sum())
        self.present = ((weights != 0) & finite).view(-1, group_size)
        self.scores = torch.where(self.present, scores.double().view(-1, group_size), 0.0)
        self.count = self.present.sum(dim=1, keepdim=True).double()

    def centred(self) -> Tensor:
        """Less the group's mean, or less nothing in groups of one; 0 where a row is left out."""
        if self.scores.shape[1] == 1:
            return self.scores
        mean = self.scores.sum(dim=1, keepdim=True) / self.count.clamp(min=1)
        return torch.where(self.present, self.scores - mean, 0.0)

    def advantages(self, of_groups: Tensor) -> GroupAdvantages:
        return GroupAdvantages(of_groups.flatten().to(self.dtype), self.num_left_out)


def _working_dtype(x: Tensor) -> torch.dtype:
    """float64 for float64, else float32."""
    return torch.promote_types(x.dtype, torch.float32)
