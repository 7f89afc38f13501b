"""The frozen policy that the KL term measures the distance from."""

from __future__ import annotations

from contextlib import nullcontext

from verl.engine.train_engine import TrainEngine
from verl.flow.batch import Column, Responses
from verl.flow.placement import Groups, Placement
from verl.roles.role import Here, ModelRole


class Reference(ModelRole):
    def __init__(
        self, placement: Placement, here: Here, engine: TrainEngine | None, groups: Groups | None, temperature: float
    ) -> None:
        """`engine`: its own, or the actor's, which is the reference without its adapters."""
        super().__init__(placement, here, engine, groups)
        self.temperature = temperature

    def logprobs(self, responses: Responses) -> Column:
        """Of every response token, at the sampling temperature."""
        with self.engine.adapters_off() if self.serves else nullcontext():
            return self.token_column("ref_logprobs", "ref", responses, self.temperature)
