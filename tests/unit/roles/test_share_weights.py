"""What an engine in a trainer's process computes with: the trainer's own tensors where they are the same part."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor

from verl.reshard.boxes import own_domains
from verl.reshard.layout import Box
from verl.roles.build_rollout import Engines, share_weights


@dataclass
class Trainer:
    parts: dict[str, Tensor]

    def lasting_shards(self) -> dict[str, Tensor]:
        return self.parts


@dataclass
class Engine:
    adopted: dict[str, Tensor] = field(default_factory=dict)

    def adopt(self, tensors: Mapping[str, Tensor]) -> None:
        self.adopted = dict(tensors)


@dataclass
class Rank:
    rank: int


def test_only_the_same_part_of_a_parameter_is_shared() -> None:
    """Rank 1 trains the lower half of both matrices, and generates with that of one and the upper half of the other."""
    low: Box = ((2, 4), (0, 3))
    trained: dict[str, Box] = {"same": low, "other": low, "elsewhere": low}
    generated: dict[str, Box] = {"same": low, "other": ((0, 2), (0, 3)), "norm": ((0, 3),)}
    trainer = Trainer({name: torch.ones(2, 3) for name in trained})
    engine = Engine()
    engines = Engines(in_process=cast(Any, engine), domains=own_domains({0: trained, 1: generated}))
    share_weights(engines, cast(Any, trainer), trained, cast(Any, Rank(1)))
    assert engine.adopted.keys() == {"same"} and engine.adopted["same"] is trainer.parts["same"]
