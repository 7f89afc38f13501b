"""What every role is: a place, and methods that compute there and give a column of elsewhere on the other ranks."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property

import torch

from verl.engine.train_engine import TrainEngine
from verl.flow.batch import Column, Responses, Rows
from verl.flow.job import Job
from verl.flow.placement import Groups, Placement
from verl.model.packing import Sequences
from verl.monitor.stages import Stages


@dataclass(frozen=True)
class Here:
    """This process, as a role sees it."""

    job: Job
    stages: Stages

    @property
    def rank(self) -> int:
        return self.job.rank


class Role:
    """A role's methods are called on every rank. They never communicate outside the role's own ranks."""

    def __init__(self, placement: Placement, here: Here) -> None:
        self.placement, self.here = placement, here

    @cached_property
    def serves(self) -> bool:
        """This rank is one of the role's."""
        return self.here.rank in self.placement.ranks

    @cached_property
    def holds_rows(self) -> bool:
        """This rank holds output rows of the role."""
        return self.here.rank in self.placement.outputs.ranks

    @cached_property
    def speaks(self) -> bool:
        """This rank counts its rows in metrics: one of those that hold the same rows does."""
        return self.here.rank in self.placement.leaders

    def stage(self, name: str) -> AbstractContextManager[None]:
        return self.here.stages(name, self.placement.role)

    def in_step(self) -> AbstractContextManager[None]:
        """Around what the role's ranks do together: a rank that is held up there waits for the others."""
        others = [rank for rank in self.placement.ranks if rank != self.here.rank]
        return self.here.job.board.waiting(others, "the others' part")

    def produced(self, name: str, size: int, rows: Rows | None) -> Column:
        return Column.produced(name, size, self.placement, self.here.rank, rows)


class ModelRole(Role):
    """A role with a model on its ranks; `engine` is None elsewhere."""

    def __init__(self, placement: Placement, here: Here, engine: TrainEngine | None, groups: Groups | None) -> None:
        super().__init__(placement, here)
        self._engine, self._groups = engine, groups

    @property
    def engine(self) -> TrainEngine:
        assert self._engine is not None, f"{self.placement.role} has no engine on rank {self.here.rank}"
        return self._engine

    @property
    def groups(self) -> Groups:
        assert self._groups is not None
        return self._groups

    def sequences(self, responses: Responses) -> Sequences:
        """The rows of this rank, with an output for every response token."""
        return self._sequences(responses, Sequences.responses)

    def _sequences(self, responses: Responses, make: Callable[..., Sequences]) -> Sequences:
        return make(responses.prompt_ids.on(self.placement).split(), responses.response_ids.on(self.placement).split())

    def token_column(self, name: str, stage: str, responses: Responses, temperature: float = 1.0) -> Column:
        """The engine's output for every response token, as a column."""
        rows = None
        if self.serves:
            sequences = self.sequences(responses)  # may wait for them, which is no part of the stage
            with self.stage(stage), self.in_step():
                outputs = self.engine.forward(sequences, temperature)
            if outputs is not None:
                rows = responses.response_ids.on(self.placement).like(outputs.values)
        return self.produced(name, responses.response_ids.size, rows)


def torch_dtype(name: str | None) -> torch.dtype:
    """The dtype that a mesh names; bfloat16 where it names none."""
    return {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32, None: torch.bfloat16}[name]
