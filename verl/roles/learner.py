"""A role that learns: passes of mini-batch steps over a step's experience."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

from torch import Tensor

from verl.config import LossAggregation
from verl.engine.train_engine import TrainEngine
from verl.flow.batch import Responses
from verl.flow.placement import Groups, Placement
from verl.model.heads import TokenOutputs
from verl.monitor.metrics import Metrics
from verl.roles.mini_batch import MiniBatch, make_mini_batches
from verl.roles.role import Here, ModelRole


@dataclass(frozen=True)
class Schedule:
    """How a step's rows are gone through."""

    num_mini_batches: int
    epochs: int
    group_size: int
    """Responses a prompt."""
    loss_agg_mode: LossAggregation

    @property
    def optimizer_steps(self) -> int:
        """Of one PPO step."""
        return self.num_mini_batches * self.epochs


class MiniBatchLoss(Protocol):
    """The loss of one mini-batch, called for each of its micro-batches, and what it saw on the way."""

    metrics: Metrics

    def __call__(self, outputs: TokenOutputs, at: Tensor) -> Tensor: ...


AnyLoss = TypeVar("AnyLoss", bound=MiniBatchLoss)


class Learner(ModelRole):
    def __init__(
        self, placement: Placement, here: Here, engine: TrainEngine | None, groups: Groups | None, schedule: Schedule
    ) -> None:
        super().__init__(placement, here, engine, groups)
        self.schedule = schedule

    def learn(
        self,
        responses: Responses,
        make_loss: Callable[[MiniBatch], AnyLoss],
        temperature: float = 1.0,
        enough: Callable[[AnyLoss], bool] = lambda loss: False,
    ) -> Metrics:
        """One optimizer step a mini-batch, `epochs` times over; none after one of which `enough` says so.

        Called on the role's ranks, all of which get the same answer from `enough`.
        """
        name, metrics, bubble, done = self.placement.role, Metrics(), Metrics(), 0
        sequences = self.sequences(responses)
        with self.stage(f"update_{name}"), self.in_step():
            mini_batches = self._mini_batches(responses)
            for batch in mini_batches * self.schedule.epochs:
                loss = make_loss(batch)
                norm, rate = self.engine.train_step(sequences, batch.rows, loss, temperature)
                metrics |= loss.metrics
                self._note_bubble(bubble)
                metrics.mean(f"{name}/grad_norm", norm)
                metrics.last(f"{name}/lr", rate)
                done += 1
                if enough(loss):
                    break
        metrics.last(f"{name}/epochs_done", done / len(mini_batches))
        return metrics | bubble if self.speaks else bubble

    def _note_bubble(self, metrics: Metrics) -> None:
        """The share of the last step's gradients that this stage of a pipeline, alone and in the mean, was idle for."""
        idle, name = self.engine.idle, f"perf/{self.placement.role}/bubble"
        if idle is not None:
            stage = self.placement.coordinate(self.here.rank).pp
            for figure in (name, f"{name}/stage_{stage}"):
                metrics.mean(figure, idle.share, idle.total)

    def _mini_batches(self, responses: Responses) -> list[MiniBatch]:
        return make_mini_batches(
            self.schedule.num_mini_batches,
            self.placement.inputs.rows(self.here.rank, responses.weight.size),
            self.schedule.group_size,
            responses.response_ids.on(self.placement).lengths,
            responses.weight.on(self.placement).scalar(),
            self.schedule.loss_agg_mode,
            self.groups.rows,
        )
