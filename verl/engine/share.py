"""What one rank has to say in a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from verl.engine.shards import engine_tensors
from verl.engine.train_engine import TrainEngine
from verl.model.load import local_tensor
from verl.model.lora import adapter_config


@dataclass(frozen=True)
class Learnt:
    """Of one role."""

    tensors: Mapping[str, Tensor]
    """The engine's own, which say where a part stands in the whole."""
    here: Mapping[str, Tensor] | None
    """This rank's part of each as it was when the step ended, on the CPU; None: as it still is, where it is."""
    mesh: list[Any]
    """The role's ranks as nested lists."""
    model_folder: Path
    """Where config and tokenizer are."""
    adapters: Mapping[str, Any] | None
    """Of a model with adapters, what peft's adapter_config.json says of them."""

    @property
    def readable(self) -> Mapping[str, Tensor]:
        """What can be copied: tensors that have left their device cannot."""
        return self.tensors if self.here is None else self.here

    @classmethod
    def of(cls, engine: TrainEngine) -> Learnt:
        of_adapters = adapter_config(engine.parts[0], engine.spec.folder) if engine.spec.lora is not None else None
        tensors, here = engine_tensors(engine), None
        if engine.parked.away:
            here = {name: engine.parked.now(local_tensor(tensor)) for name, tensor in tensors.items()}
        return cls(tensors, here, engine.groups.mesh.mesh.tolist(), engine.spec.folder, of_adapters)


@dataclass(frozen=True)
class Share:
    step: int
    """Steps done."""
    trainer_state: bytes
    """Of the run; rank 0's is written."""
    rank_state: Mapping[str, bytes]
    roles: Mapping[str, Learnt]
    """Those that this rank serves."""
