"""The value function: a value for every response token, and its update."""

from __future__ import annotations

from torch import Tensor

from verl.algo.aggregate import weighted_sum, zero_unweighted
from verl.algo.losses import value_loss
from verl.config import CriticConfig
from verl.engine.train_engine import Loss, TrainEngine
from verl.flow.batch import Column, Experience, Responses
from verl.flow.placement import Groups, Placement
from verl.model.heads import TokenOutputs
from verl.monitor.metrics import Metrics
from verl.roles.mini_batch import MiniBatch, make_mini_batches
from verl.roles.role import Here, ModelRole


class Critic(ModelRole):
    def __init__(
        self,
        placement: Placement,
        here: Here,
        engine: TrainEngine | None,
        groups: Groups | None,
        config: CriticConfig,
        num_mini_batches: int,
        ppo_epochs: int,
        group_size: int,
    ) -> None:
        """`group_size`: responses a prompt."""
        super().__init__(placement, here, engine, groups)
        self.config, self.num_mini_batches, self.ppo_epochs, self.group_size = (
            config,
            num_mini_batches,
            ppo_epochs,
            group_size,
        )

    def values(self, responses: Responses) -> Column:
        """Of the state before each response token."""
        return self.token_column("values", "values", responses)

    def update(self, experience: Experience) -> Metrics:
        """`ppo_epochs` passes of mini-batch steps on the clipped value loss."""
        metrics = Metrics()
        if not self.serves:
            return metrics
        with self.stage("update_critic"):
            assert experience.values is not None and experience.returns is not None
            responses = experience.responses
            values, returns = experience.values.on(self.placement).values, experience.returns.on(self.placement).values
            sequences = self.sequences(responses)
            mini_batches = make_mini_batches(
                self.num_mini_batches,
                self.placement.inputs.rows(self.here.rank, responses.weight.size),
                self.group_size,
                responses.response_ids.on(self.placement).lengths,
                responses.weight.on(self.placement).scalar(),
                self.config.loss_agg_mode,
                self.groups.rows,
            )
            for batch in mini_batches * self.ppo_epochs:
                seen = Metrics()
                loss = self._loss(values, returns, batch, seen)
                norm, rate = self.engine.train_step(sequences, batch.rows, loss)
                if self.speaks:
                    metrics |= seen
                    metrics.mean("critic/grad_norm", norm)
                    metrics.last("critic/lr", rate)
        return metrics

    def _loss(self, old_values: Tensor, returns: Tensor, batch: MiniBatch, seen: Metrics) -> Loss:
        def loss(outputs: TokenOutputs, at: Tensor) -> Tensor:
            weights, old, target = (t[at].to(self.engine.device) for t in (batch.weights, old_values, returns))
            predicted = zero_unweighted(outputs.values, weights)
            result = value_loss(predicted, old, target, self.config.cliprange_value)
            counted = (weights != 0).double()
            seen.mean("critic/vf_loss", result.loss, counted)
            seen.mean("critic/vf_clipfrac", result.clipped, counted)
            seen.mean("critic/vpred_mean", predicted, counted)
            return weighted_sum(result.loss, weights)

        return loss
