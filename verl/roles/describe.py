"""What a step's responses and rewards are like, as metrics."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from verl.algo.kl import kl_penalty
from verl.config import KLEstimator
from verl.flow.batch import Experience
from verl.flow.placement import Placement
from verl.monitor.metrics import Metrics


@dataclass(frozen=True)
class Judged:
    """A rank's response tokens, flat, float32."""

    rewards: Tensor
    advantages: Tensor
    returns: Tensor | None
    kl: Tensor
    kl_coef: float


def describe(experience: Experience, at: Placement, judged: Judged, metrics: Metrics) -> None:
    """Adds the figures of the rows that this rank holds for `at`; dead rows leave no trace."""
    responses = experience.responses
    ids, prompts, weight = (c.on(at) for c in (responses.response_ids, responses.prompt_ids, responses.weight))
    live, tokens = weight.scalar(), weight.spread(ids)
    of_rows = torch.stack([r.sum() for r in judged.rewards.split(ids.lengths.tolist())])
    metrics.spread("critic/score", experience.scores.on(at).scalar(), live)
    metrics.spread("critic/rewards", of_rows, live)
    metrics.spread("critic/advantages", judged.advantages, tokens)
    if judged.returns is not None:
        metrics.spread("critic/returns", judged.returns, tokens)
    metrics.spread("response_length", ids.lengths, live)
    metrics.mean("response_length/clip_ratio", ~responses.ended.on(at).scalar(), live)
    metrics.spread("prompt_length", prompts.lengths, live)
    metrics.total("perf/total_num_tokens", ((ids.lengths + prompts.lengths) * live).sum())
    metrics.total("perf/num_samples", live.sum())
    if experience.ref_logprobs is not None:
        metrics.mean("actor/reward_kl_penalty", judged.kl, tokens)
        metrics.last("actor/reward_kl_penalty_coeff", judged.kl_coef)


def describe_mismatch(experience: Experience, at: Placement, metrics: Metrics) -> None:
    """How far the trainer's log-probs are from those that the engine sampled with."""
    responses = experience.responses
    tokens = responses.weight.on(at).spread(responses.response_ids.on(at))
    old, rollout = experience.old_logprobs.on(at).values, responses.rollout_logprobs.on(at).values
    gap = torch.where(tokens != 0, old - rollout, 0.0).abs()
    metrics.mean("rollout/logprob_gap_mean", gap, tokens)
    metrics.max("rollout/logprob_gap_max", gap.max() if len(gap) else 0.0)
    metrics.mean("rollout/kl", kl_penalty(rollout, old, KLEstimator.k3), tokens)
