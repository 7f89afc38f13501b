"""Advantages, from scores and values: on one role's ranks, as two sums over ranks may differ in the last bit."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from verl.algo.advantages import gae, grpo, rloo, whiten, whiten_moments
from verl.algo.kl import AdaptiveKL, FixedKL, kl_penalty
from verl.config import AdvantageEstimator, AlgorithmConfig, KLController
from verl.flow.batch import Experience, Rows
from verl.flow.placement import Groups, Placement
from verl.monitor.metrics import Metrics
from verl.roles.describe import Judged, describe, describe_mismatch
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
            with self.stage("adv"), self.in_step():
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
                compared = rloo(of_rows, self.group_size, weight.scalar())
            else:
                compared = grpo(of_rows, self.group_size, weight.scalar(), self.config.norm_adv_by_std_in_grpo)
            metrics.total("critic/scores_left_out", compared.num_left_out)
            advantages = compared.advantages.repeat_interleave(ids.lengths)
        if self.config.whiten_advantages and self.config.adv_estimator is AdvantageEstimator.gae:
            moments = whiten_moments(advantages, token_weight)
            dist.all_reduce(moments, group=self._rows_group)
            advantages = whiten(advantages, moments)
        advantages = torch.where(token_weight != 0, advantages, 0.0)
        judged = Judged(rewards, advantages, None if returns is None else returns.values, kl, self.controller.coef)
        describe(experience, self.placement, judged, metrics)
        if self.config.recompute_old_logprobs:
            describe_mismatch(experience, self.placement, metrics)
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
