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
    parts: dict[str, Tensor]
    adopted: dict[str, Tensor] = field(default_factory=dict)

    def adopt(self, tensors: Mapping[str, Tensor]) -> None:
        self.adopted = dict(tensors)

    def weights(self) -> dict[str, Tensor]:
        return self.parts | self.adopted


@dataclass
class Rank:
    rank: int


def test_only_the_same_part_of_a_parameter_is_shared() -> None:
    """Rank 1 trains the lower half of both matrices, and generates with that of one and the upper half of the other."""
    low: Box = ((2, 4), (0, 3))
    trained: dict[str, Box] = {"same": low, "other": low, "elsewhere": low}
    generated: dict[str, Box] = {"same": low, "other": ((0, 2), (0, 3)), "norm": ((0, 3),)}
    trainer = Trainer({name: torch.ones(2, 3) for name in trained})
    engine = Engine({"same": torch.zeros(2, 3), "other": torch.zeros(2, 3), "norm": torch.zeros(3)})
    engines = Engines(in_process=cast(Any, engine), domains=own_domains({0: trained, 1: generated}))
    share_weights(engines, cast(Any, trainer), trained, cast(Any, Rank(1)))
    assert engine.adopted.keys() == {"same"} and engine.adopted["same"] is trainer.parts["same"]
    targets = engines.targets["rank 1"](0)
    assert targets["same"].data_ptr() == trainer.parts["same"].data_ptr()
    assert targets["other"].data_ptr() == engine.parts["other"].data_ptr()


def test_a_rank_without_an_engine_writes_nothing() -> None:
    engines = Engines()
    share_weights(engines, cast(Any, Trainer({})), {}, cast(Any, Rank(0)))
    assert engines.targets == {}
