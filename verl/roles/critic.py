"""The value function: a value for every response token, and its update."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from verl.algo.aggregate import weighted_sum, zero_unweighted
from verl.algo.losses import value_loss
from verl.config import CriticConfig
from verl.engine.train_engine import TrainEngine
from verl.flow.batch import Column, Experience, Responses
from verl.flow.placement import Groups, Placement
from verl.model.heads import TokenOutputs
from verl.monitor.metrics import Metrics
from verl.roles.learner import Learner, Schedule
from verl.roles.mini_batch import MiniBatch
from verl.roles.role import Here


@dataclass(frozen=True)
class ValueTargets:
    """A rank's response tokens, flat and aligned, float32."""

    old_values: Tensor
    returns: Tensor


class Critic(Learner):
    def __init__(
        self,
        placement: Placement,
        here: Here,
        engine: TrainEngine | None,
        groups: Groups | None,
        schedule: Schedule,
        config: CriticConfig,
    ) -> None:
        super().__init__(placement, here, engine, groups, schedule)
        self.config = config

    def values(self, responses: Responses) -> Column:
        """Of the state before each response token."""
        return self.token_column("values", "values", responses)

    def update(self, experience: Experience) -> Metrics:
        """Mini-batch steps on the clipped value loss."""
        if not self.serves:
            return Metrics()
        targets = self._targets(experience) if self.holds_rows else None
        clip, device = self.config.cliprange_value, self.engine.device
        return self.learn(experience.responses, lambda batch: ValueMiniBatch(clip, targets, batch, device))

    def _targets(self, experience: Experience) -> ValueTargets:
        assert experience.values is not None and experience.returns is not None
        return ValueTargets(experience.values.on(self.placement).values, experience.returns.on(self.placement).values)


class ValueMiniBatch:
    """The critic's loss of one mini-batch."""

    def __init__(self, clip: float, targets: ValueTargets | None, batch: MiniBatch, device: torch.device) -> None:
        """`targets`: None on a pipeline stage without the head, which is never called with outputs."""
        self.clip, self.targets, self.batch, self.device = clip, targets, batch, device
        self.metrics = Metrics()

    def __call__(self, outputs: TokenOutputs, at: Tensor) -> Tensor:
        assert self.targets is not None
        of_tokens = (self.batch.weights, self.targets.old_values, self.targets.returns)
        weights, old, returns = (t[at].to(self.device) for t in of_tokens)
        values = zero_unweighted(outputs.values, weights)
        result = value_loss(values, old, returns, self.clip)
        counted = (weights != 0).double()
        self.metrics.mean("critic/vf_loss", result.loss, counted)
        self.metrics.mean("critic/vf_clipfrac", result.clipped, counted)
        self.metrics.mean("critic/vpred_mean", values, counted)
        return weighted_sum(result.loss, weights)
