"""How micro-batches go through the model of a role: here straight, where every rank has all layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from verl.flow.signs import Signs
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
    signs: Signs
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
        self._model, self._around, self._turn = model, around, 0

    @torch.no_grad()
    def forward(self, batches: Sequence[MicroBatch], temperature: float, take: Take) -> None:
        for number, batch in enumerate(batches):
            with self._doing(number, len(batches)):
                take(self._model(batch.to(self._around.device), temperature), batch)

    def train(self, batches: Sequence[MicroBatch], temperature: float, loss: BatchLoss) -> None:
        for number, batch in enumerate(batches):
            self._around.before_backward(self._model, number == len(batches) - 1)
            with self._doing(number, len(batches)):
                with self._around.activations():
                    share = loss(self._model(batch.to(self._around.device), temperature), batch)
                share.backward()

    def _doing(self, number: int, count: int) -> AbstractContextManager[None]:
        """A turn of all of the role's ranks, whom the stage waits for."""
        self._turn += 1
        signs = self._around.signs
        return signs.doing(f"micro-batch {number + 1} of {count}", signs.entry.waits_for, self._turn)
