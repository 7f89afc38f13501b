"""LoRA (Hu et al. 2021, arXiv:2106.09685) by peft's layers: beside a frozen linear layer W a trained one, s B A.

A [r, in] is drawn, B [out, r] begins at zero, and s is alpha / r, or alpha / sqrt(r) (Kalajdzievski 2023,
arXiv:2312.03732). peft gives the modules and their forward; a parameter's name here is the one in a folder's files: in
the model's own, or in peft's adapter_model.safetensors less its prefix.
"""

from __future__ import annotations

import hashlib
import importlib.util
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor, nn

from verl.config import LoraConfig
from verl.errors import UserError
from verl.model.heads import Head, HeadedModel

if TYPE_CHECKING:
    from peft import LoraConfig as PeftLoraConfig
    from peft.tuners.lora.layer import Linear as AdaptedLinear

ALL_LINEAR = "all-linear"
_ADAPTER = "default"
"""What peft calls the one that a model has."""
_DOWN, _UP = ".lora_A.weight", ".lora_B.weight"


@dataclass(frozen=True)
class Adapter:
    """Of one linear layer."""

    down: Tensor
    """A [r, in]"""
    up: Tensor
    """B [out, r]"""
    scale: float

    def merged(self, weight: Tensor) -> Tensor:
        """W + s B A in float32, of a weight [out, in]."""
        return weight.float() + (self.up.float() @ self.down.float()) * self.scale


def add_adapters(model: HeadedModel, settings: LoraConfig) -> None:
    """Freezes a model on the meta device and gives its linear layers adapters, in float32. A scalar head stays trained.

    Raises UserError without peft, and for target modules that are no linear layers of the decoder.
    """
    config = _peft_config(settings, _targets(model, settings.target_modules), model.head)
    # on the meta device, too: `draw` says what their values are
    _peft(settings).inject_adapter_in_model(config, model.hf, low_cpu_mem_usage=True)
    if model.head is not Head.lm:
        model.score.requires_grad_(True)


def _peft(settings: LoraConfig) -> ModuleType:
    if importlib.util.find_spec("peft") is None:
        raise UserError(
            f"lora.rank={settings.rank}: adapters need peft, which is not installed; pip install peft, or set it to 0"
        )
    import peft  # not above: it takes seconds, and a run without adapters does without

    return peft


def _peft_config(settings: LoraConfig, targets: list[str], head: Head) -> PeftLoraConfig:
    return _peft(settings).LoraConfig(
        task_type="CAUSAL_LM" if head is Head.lm else "SEQ_CLS",
        r=settings.rank,
        lora_alpha=settings.alpha,
        use_rslora=settings.rslora,
        lora_dropout=0.0,  # old and new log-probs must be those of one function
        target_modules=targets,
    )


def _targets(model: HeadedModel, wanted: list[str]) -> list[str]:
    """Names by whose ends peft finds the layers. Raises UserError for one that anything else bears, too."""
    modules = dict(model.hf.named_modules())
    layers = f"{model.hf.base_model_prefix}.layers."
    linear = [name for name, module in modules.items() if isinstance(module, nn.Linear) and name.startswith(layers)]
    there = sorted({name.rpartition(".")[2] for name in linear})
    targets = there if wanted == [ALL_LINEAR] else wanted
    for target in targets:
        found = [name for name in modules if f".{name}".endswith(f".{target}")]
        others = [name for name in found if name not in linear]
        if others or not found:
            what = f"{others[0]} is no linear layer of the decoder" if others else "the model has no such module"
            raise UserError(
                f"lora.target_modules={wanted}: {target}: {what}; take [{ALL_LINEAR}], or some of [{', '.join(there)}]"
            )
    return targets


def plain_name(name: str) -> str:
    """A parameter's name in the files, from the one that it has in a module with adapters."""
    return name.replace(".base_layer.", ".").replace(f".{_ADAPTER}.weight", ".weight")


def is_adapter(name: str) -> bool:
    """Whether a `plain_name` is that of an adapter's parameter."""
    return name.endswith((_DOWN, _UP))


def adapter_names(weight: str) -> tuple[str, str]:
    """Of A and B, by the name of the weight that they are added to."""
    module = weight.removesuffix(".weight")
    return module + _DOWN, module + _UP


def adapted_weight(name: str) -> str:
    """The weight that the parameter of an adapter belongs to."""
    return name.removesuffix(_DOWN).removesuffix(_UP) + ".weight"


def draw(name: str, shape: torch.Size, seed: int) -> Tensor:
    """What an adapter's parameter begins with, by its `plain_name`: whole, so that it is the same on every mesh.

    peft's own: A uniform within 1 / sqrt(in), as a linear layer of torch's begins, B zero.
    """
    if name.endswith(_UP):
        return torch.zeros(shape)
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
    return nn.init.kaiming_uniform_(torch.empty(shape), a=math.sqrt(5), generator=generator)


def adapted_linear(module: nn.Module) -> TypeGuard[AdaptedLinear]:
    """Whether this is a linear layer with an adapter. Asks for no peft."""
    return "lora_A" in module._modules


def down_and_up(module: AdaptedLinear) -> tuple[nn.Linear, nn.Linear]:
    """The adapter's two linear layers."""
    down, up = module.lora_A[_ADAPTER], module.lora_B[_ADAPTER]
    assert isinstance(down, nn.Linear) and isinstance(up, nn.Linear)
    return down, up


def adapters(model: nn.Module) -> dict[str, Adapter]:
    """The adapters' parameters, by the name of the weight that each is added to: of a model or parts of one."""
    found: dict[str, Adapter] = {}
    for part in model.modules():
        if isinstance(part, HeadedModel):
            for name, module in part.named_modules():
                if adapted_linear(module):
                    down, up = down_and_up(module)
                    weight = f"{name.removeprefix('hf.')}.weight"
                    found[weight] = Adapter(down.weight, up.weight, module.scaling[_ADAPTER])
    return found


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """The model computes without its adapters; nothing changes in one that has none. For forward passes alone."""
    layers = [module for module in model.modules() if adapted_linear(module)]
    # peft's `enable_adapters` would also stop their training, of which FSDP takes note once, at its first forward
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def adapter_config(model: HeadedModel, base: Path) -> dict[str, Any]:
    """What adapter_config.json says of a model's adapters. `base`: the folder of the model that they belong to."""
    config: PeftLoraConfig = vars(model.hf)["peft_config"][_ADAPTER]
    assert config.target_modules is not None
    return config.to_dict() | {
        "base_model_name_or_path": str(base.absolute()),
        "inference_mode": True,
        "modules_to_save": None if model.head is Head.lm else ["score"],
        "target_modules": sorted(config.target_modules),
    }


def scale_of(config: Mapping[str, Any]) -> float:
    """Of an adapter with this adapter_config.json."""
    return config["lora_alpha"] / (math.sqrt(config["r"]) if config["use_rslora"] else config["r"])


def saved_name(name: str) -> str:
    """In adapter_model.safetensors, by the `plain_name`."""
    return f"base_model.model.{name}"
