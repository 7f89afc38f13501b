"""Models with adapters: peft's own, for what is right, and engines that begin with the same adapters."""

from __future__ import annotations

import hashlib
import math
from pathlib import Path

import torch
from torch import Tensor, nn

from tests.support.plain_loop import Plain
from verl.config import LoraConfig
from verl.engine.train_engine import TrainEngine
from verl.model.load import hf_parameters, local_box, local_tensor
from verl.model.lora import is_adapter


def adapter_values(name: str, shape: tuple[int, ...]) -> Tensor:
    """Of A or of B, which is not zero here: else A had no gradient in the first step."""
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big")
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) / math.sqrt(shape[1]) / 4


@torch.no_grad()
def fill_adapters(engine: TrainEngine) -> None:
    for name, parameter in hf_parameters(engine.model):
        if is_adapter(name):
            local_tensor(parameter).copy_(adapter_values(name, parameter.shape)[local_box(parameter)])


class PeftPlain(Plain):
    """The same loop's model with peft around Hugging Face's; what is trained alone is named, as in peft's files."""

    def __init__(self, folder: Path, head_seed: int | None, settings: LoraConfig) -> None:
        super().__init__(folder, head_seed)
        import peft

        all_linear = settings.target_modules == ["all-linear"]
        config = peft.LoraConfig(
            task_type="CAUSAL_LM",
            r=settings.rank,
            lora_alpha=settings.alpha,
            use_rslora=settings.rslora,
            target_modules="all-linear" if all_linear else settings.target_modules,
        )
        self.peft = peft.get_peft_model(self.hf, config)
        with torch.no_grad():
            for name, parameter in self._adapters().items():
                parameter.copy_(adapter_values(name, parameter.shape))

    def _adapters(self) -> dict[str, nn.Parameter]:
        named = {name: p for name, p in self.peft.named_parameters() if p.requires_grad}
        return {
            name.removeprefix("base_model.model.").replace(".default.", "."): parameter
            for name, parameter in named.items()
        }

    def named(self) -> dict[str, nn.Parameter]:
        return self._adapters() | ({} if self.score is None else {"score.weight": self.score})
