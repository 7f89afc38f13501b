"""How micro-batches go through the model of a role: here straight, where every rank has all layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from verl.model.heads import HeadedModel, TokenOutputs
from verl.model.packing import MicroBatch
from verl.parallel.idle import Idle

Take = Callable[[TokenOutputs, MicroBatch], None]
"""Gets the head's outputs of each micro-batch."""
BatchLoss = Callable[[TokenOutputs, MicroBatch], Tensor]
"""A micro-batch's share of the loss."""


@dataclass(frozen=True)
class Around:
    """What is done around every micro-batch, however it goes."""

    device: torch.device
    beat: Callable[[], None]
    """A sign of life."""
    activations: Callable[[], AbstractContextManager[object]]
    """Entered for a forward whose backward follows: where its activations are kept."""
    before_backward: Callable[[HeadedModel, bool], None]
    """(a part of the model, whether this is its last backward of the step)"""


class Passes(Protocol):
    """Collective over a role's ranks, which all have the same number of micro-batches, at least one."""

    def forward(self, batches: Sequence[MicroBatch], temperature: float, take: Take) -> None:
        """`take` is called where the head is."""
        ...

    def train(self, batches: Sequence[MicroBatch], temperature: float, loss: BatchLoss) -> Idle | None:
        """Adds the gradients of the losses; `loss` is called where the head is, once for each micro-batch.

        What a stage of a pipeline was idle for; None where there is no pipeline.
        """
        ...


class Straight:
    def __init__(self, model: HeadedModel, around: Around) -> None:
        self._model, self._around = model, around

    @torch.no_grad()
    def forward(self, batches: Sequence[MicroBatch], temperature: float, take: Take) -> None:
        for batch in batches:
            take(self._model(batch.to(self._around.device), temperature), batch)
            self._around.beat()

    def train(self, batches: Sequence[MicroBatch], temperature: float, loss: BatchLoss) -> None:
        for number, batch in enumerate(batches):
            self._around.before_backward(self._model, number == len(batches) - 1)
            with self._around.activations():
                loss(self._model(batch.to(self._around.device), temperature), batch).backward()
            self._around.beat()
