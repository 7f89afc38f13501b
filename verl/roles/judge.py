"""Advantages, from scores and values: on one role's ranks, as two sums over ranks may differ in the last bit."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from verl.algo.advantages import gae, grpo, rloo, whiten, whiten_moments
from verl.algo.kl import AdaptiveKL, FixedKL, kl_penalty
from verl.config import AdvantageEstimator, AlgorithmConfig, KLController, KLEstimator
from verl.flow.batch import Experience, Rows
from verl.flow.placement import Groups, Placement
from verl.monitor.metrics import Metrics
from verl.roles.role import Here, Role

Controller = FixedKL | AdaptiveKL


def make_controller(config: AlgorithmConfig) -> Controller:
    control = config.kl_ctrl
    if control.type is KLController.adaptive:
        return AdaptiveKL(control.kl_coef, control.target_kl, control.horizon)
    return FixedKL(control.kl_coef)


class Judge(Role):
    """Shares the critic's placement, or the actor's where there is no critic, and holds the KL controller."""

    def __init__(
        self, placement: Placement, here: Here, groups: Groups | None, config: AlgorithmConfig, group_size: int
    ) -> None:
        super().__init__(placement, here)
        self.config, self.group_size = config, group_size
        self._groups = groups
        self.controller = make_controller(config)

    def with_advantages(self, experience: Experience) -> tuple[Experience, Metrics]:
        """The experience with advantages (and returns, where there are values), and what its responses are like."""
        metrics = Metrics()
        advantages = returns = None
        if self.holds_rows:
            with self.stage("adv"):
                advantages, returns = self._judge(experience, metrics)
        size = experience.scores.size
        with_returns = self.config.adv_estimator is AdvantageEstimator.gae
        judged = replace(
            experience,
            advantages=self.produced("advantages", size, advantages),
            returns=self.produced("returns", size, returns) if with_returns else None,
        )
        return judged, metrics if self.speaks else Metrics()

    def _judge(self, experience: Experience, metrics: Metrics) -> tuple[Rows, Rows | None]:
        ids = experience.responses.response_ids.on(self.placement)
        weight = experience.responses.weight.on(self.placement)
        scores = experience.scores.on(self.placement).scalar()
        self._check_scores(scores, weight.scalar())
        token_weight = weight.spread(ids)
        kl = self._kl(experience, token_weight)
        rewards = torch.zeros(len(ids.values)) - self.controller.coef * kl
        last = (ids.lengths.cumsum(0) - 1)[ids.lengths > 0]
        rewards[last] += scores[ids.lengths > 0]
        returns = None
        if self.config.adv_estimator is AdvantageEstimator.gae:
            assert experience.values is not None
            advantages, targets = self._gae(rewards, experience.values.on(self.placement).values, ids.lengths)
            returns = ids.like(targets)
        else:
            of_rows = torch.stack([r.sum() for r in rewards.split(ids.lengths.tolist())])
            if self.config.adv_estimator is AdvantageEstimator.rloo:
                judged = rloo(of_rows, self.group_size, weight.scalar())
            else:
                judged = grpo(of_rows, self.group_size, weight.scalar(), self.config.norm_adv_by_std_in_grpo)
            metrics.total("critic/scores_left_out", judged.num_left_out)
            advantages = judged.advantages.repeat_interleave(ids.lengths)
        if self.config.whiten_advantages and self.config.adv_estimator is AdvantageEstimator.gae:
            moments = whiten_moments(advantages, token_weight)
            dist.all_reduce(moments, group=self._rows_group)
            advantages = whiten(advantages, moments)
        advantages = torch.where(token_weight != 0, advantages, 0.0)
        self._describe(experience, rewards, advantages, returns, kl, metrics)
        self._control(kl, ids, weight.scalar())
        return ids.like(advantages), returns

    def _check_scores(self, scores: Tensor, weight: Tensor) -> None:
        """Group baselines leave a score that is no number out; GAE has no way round it."""
        bad = (~scores.isfinite() & (weight != 0)).nonzero().flatten().tolist()
        if bad and self.config.adv_estimator is AdvantageEstimator.gae:
            raise FloatingPointError(
                f"the score of {len(bad)} responses is not finite (the first: {scores[bad[0]]}). Reward functions are "
                f"checked, so it comes from the reward model: look at its weights and dtype."
            )

    @property
    def _rows_group(self) -> dist.ProcessGroup:
        assert self._groups is not None
        return self._groups.rows

    def _kl(self, experience: Experience, token_weight: Tensor) -> Tensor:
        old = experience.old_logprobs.on(self.placement).values
        if experience.ref_logprobs is None:
            return torch.zeros_like(old)
        kl = kl_penalty(old, experience.ref_logprobs.on(self.placement).values, self.config.kl_penalty)
        return torch.where(token_weight != 0, kl, 0.0)

    def _gae(self, rewards: Tensor, values: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """On rows padded to [rows, time], given back flat."""
        time = max(1, int(lengths.max()))
        mask = torch.arange(time)[None] < lengths[:, None]

        def padded(x: Tensor) -> Tensor:
            return torch.zeros(mask.shape).masked_scatter(mask, x)

        advantages, returns = gae(padded(rewards), padded(values), mask, self.config.gamma, self.config.lam)
        return advantages[mask], returns[mask]

    def _control(self, kl: Tensor, ids: Rows, weight: Tensor) -> None:
        """The coefficient moves by the mean KL of a sequence, summed over all ranks so that it is one on all."""
        of_rows = torch.stack([k.sum() for k in kl.split(ids.lengths.tolist())]).double()
        total = torch.stack([(of_rows * weight).sum(), weight.double().sum()])
        dist.all_reduce(total, group=self._rows_group)
        self.controller.update(float(total[0] / total[1].clamp(min=1)), int(total[1]))

    def _describe(
        self,
        experience: Experience,
        rewards: Tensor,
        advantages: Tensor,
        returns: Rows | None,
        kl: Tensor,
        metrics: Metrics,
    ) -> None:
        responses = experience.responses
        ids, prompts = responses.response_ids.on(self.placement), responses.prompt_ids.on(self.placement)
        weight = responses.weight.on(self.placement)
        live, tokens = weight.scalar(), weight.spread(ids)
        of_rows = torch.stack([r.sum() for r in rewards.split(ids.lengths.tolist())])
        metrics.spread("critic/score", experience.scores.on(self.placement).scalar(), live)
        metrics.spread("critic/rewards", of_rows, live)
        metrics.spread("critic/advantages", advantages, tokens)
        if returns is not None:
            metrics.spread("critic/returns", returns.values, tokens)
        metrics.spread("response_length", ids.lengths, live)
        metrics.mean("response_length/clip_ratio", ~responses.ended.on(self.placement).scalar(), live)
        metrics.spread("prompt_length", prompts.lengths, live)
        metrics.total("perf/total_num_tokens", ((ids.lengths + prompts.lengths) * live).sum())
        metrics.total("perf/num_samples", live.sum())
        if experience.ref_logprobs is not None:
            metrics.mean("actor/reward_kl_penalty", kl, tokens)
            metrics.last("actor/reward_kl_penalty_coeff", self.controller.coef)
        self._describe_mismatch(experience, tokens, metrics)

    def _describe_mismatch(self, experience: Experience, tokens: Tensor, metrics: Metrics) -> None:
        """How far the trainer's log-probs are from those that the engine sampled with."""
        old = experience.old_logprobs.on(self.placement).values
        rollout = experience.responses.rollout_logprobs.on(self.placement).values
        gap = torch.where(tokens != 0, old - rollout, 0.0)
        metrics.mean("rollout/logprob_gap_mean", gap.abs(), tokens)
        metrics.max("rollout/logprob_gap_max", gap.abs().max() if len(gap) else 0.0)
        metrics.mean("rollout/kl", kl_penalty(rollout, old, KLEstimator.k3), tokens)
