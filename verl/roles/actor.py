"""The policy: log-probs of responses, and PPO's update."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from verl.algo.aggregate import weighted_sum, zero_unweighted
from verl.algo.kl import kl_loss, kl_penalty
from verl.algo.losses import mismatch_weight, policy_loss
from verl.config import ActorConfig, KLEstimator
from verl.engine.train_engine import TrainEngine
from verl.flow.batch import Column, Experience, Responses
from verl.flow.placement import Groups, Placement
from verl.model.heads import TokenOutputs
from verl.model.merge import own_shards
from verl.monitor.metrics import Metrics
from verl.roles.learner import Learner, Schedule
from verl.roles.mini_batch import MiniBatch
from verl.roles.role import Here

EARLY_STOP_FACTOR = 1.5
"""Updates stop at this multiple of target_kl, as in Spinning Up's PPO."""


@dataclass(frozen=True)
class PolicyTokens:
    """A rank's response tokens, flat and aligned, float32."""

    old_logprobs: Tensor
    rollout_logprobs: Tensor
    advantages: Tensor
    ref_logprobs: Tensor | None


class Actor(Learner):
    def __init__(
        self,
        placement: Placement,
        here: Here,
        engine: TrainEngine | None,
        groups: Groups | None,
        schedule: Schedule,
        config: ActorConfig,
        temperature: float,
    ) -> None:
        """`temperature`: what the rollout samples at, which all log-probs are taken at."""
        super().__init__(placement, here, engine, groups, schedule)
        self.config, self.temperature = config, temperature

    def logprobs(self, responses: Responses) -> Column:
        """Of every response token under the current policy, at the sampling temperature."""
        return self.token_column("old_logprobs", "old_log_prob", responses, self.temperature)

    def shards(self) -> Mapping[str, Tensor]:
        """This rank's part of the weights, by Hugging Face name, with the adapters in them."""
        if not self.serves:
            return {}
        with self.in_step():  # the ranks exchange parts of the adapters
            return self.engine.shards()

    def lasting_shards(self) -> dict[str, Tensor]:
        """Those of them that are memory of the engine's own, which has the new weights after a step."""
        return own_shards(self.engine.model) if self.serves else {}

    def update(self, experience: Experience) -> Metrics:
        """Mini-batch steps on the clipped objective (Schulman et al. 2017, eq. 7)."""
        if not self.serves:
            return Metrics()
        tokens, device = self._tokens(experience) if self.holds_rows else None, self.engine.device
        return self.learn(
            experience.responses,
            lambda batch: PolicyMiniBatch(self.config, tokens, batch, device),
            self.temperature,
            enough=self._moved_too_far,
        )

    def _tokens(self, experience: Experience) -> PolicyTokens:
        assert experience.advantages is not None
        ref = experience.ref_logprobs
        return PolicyTokens(
            old_logprobs=experience.old_logprobs.on(self.placement).values,
            rollout_logprobs=experience.responses.rollout_logprobs.on(self.placement).values,
            advantages=experience.advantages.on(self.placement).values,
            ref_logprobs=ref.on(self.placement).values if ref is not None and self.config.use_kl_loss else None,
        )

    def _moved_too_far(self, loss: PolicyMiniBatch) -> bool:
        """Whether KL(old || new) of the last mini-batch is over the limit: one answer on all of the actor's ranks."""
        if self.config.target_kl is None:
            return False
        total = loss.kl.clone()
        dist.all_reduce(total, group=self.groups.everyone)
        return bool(total[0] > EARLY_STOP_FACTOR * self.config.target_kl * total[1])


class PolicyMiniBatch:
    """The policy's loss of one mini-batch."""

    def __init__(
        self, config: ActorConfig, tokens: PolicyTokens | None, batch: MiniBatch, device: torch.device
    ) -> None:
        """`tokens`: None on a pipeline stage without the head, which is never called with outputs."""
        self.config, self.tokens, self.batch, self.device = config, tokens, batch, device
        self.metrics = Metrics()
        self.kl = torch.zeros(2, dtype=torch.float64)
        """Sum over tokens of an estimate of KL(old || new), and how many tokens."""

    def __call__(self, outputs: TokenOutputs, at: Tensor) -> Tensor:
        assert outputs.entropy is not None and self.tokens is not None
        config, tokens = self.config, self.tokens
        weights, old, advantages, rollout = (
            t[at].to(self.device)
            for t in (self.batch.weights, tokens.old_logprobs, tokens.advantages, tokens.rollout_logprobs)
        )
        logprobs = zero_unweighted(outputs.values, weights)
        entropy = zero_unweighted(outputs.entropy, weights)
        high = config.clip_ratio if config.clip_ratio_high is None else config.clip_ratio_high
        policy = policy_loss(logprobs, old, advantages, config.clip_ratio, high, config.clip_ratio_c)
        loss = policy.loss * mismatch_weight(old, rollout, config.mismatch_correction, config.mismatch_cap)
        if config.entropy_coeff:
            loss = loss - config.entropy_coeff * entropy
        counted = (weights != 0).double()
        if tokens.ref_logprobs is not None:
            kl = kl_loss(logprobs, tokens.ref_logprobs[at].to(self.device), config.kl_loss_type)
            loss = loss + config.kl_loss_coef * kl
            self.metrics.mean("actor/kl_loss", kl, counted)
        moved = kl_penalty(old, logprobs.detach(), KLEstimator.k3)
        self.kl += torch.stack([weighted_sum(moved, counted), counted.sum()]).cpu()
        self.metrics.mean("actor/pg_loss", policy.loss, counted)
        self.metrics.mean("actor/pg_clipfrac", policy.clipped, counted)
        self.metrics.mean("actor/pg_clipfrac_lower", policy.clipped_lower, counted)
        self.metrics.mean("actor/ppo_kl", moved, counted)
        self.metrics.mean("actor/entropy", entropy, counted)
        return weighted_sum(loss, weights)
