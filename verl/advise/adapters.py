"""What a role's adapters (LoRA) are made of and where they are, for an estimate of memory. Pure."""

from __future__ import annotations

from dataclasses import replace

from verl.advise.memory import Held, held
from verl.advise.model import Learns, ModelShape
from verl.config import LoraConfig
from verl.model.lora import ALL_LINEAR, adapter_names
from verl.reshard.boxes import Split

_OF_ATTENTION = {"q_proj", "k_proj", "v_proj", "qkv_proj"}
_OF_MLP = {"gate_proj", "up_proj", "gate_up_proj"}
_OF_PRODUCT = {"down_proj"}
"""Linear layers by what goes into them."""


def held_adapters(model: ModelShape, split: Split, stage: int, lora: LoraConfig) -> Held | None:
    """The adapters of a model at one place of its split; None where there are none. A scalar head is left out."""
    if not lora.rank:
        return None
    weights = [name for name in model.shapes if _has_adapter(model, name, lora)]
    shapes: dict[str, tuple[int, ...]] = {}
    tp_dims: dict[str, int] = {}
    for weight in weights:
        down, up = adapter_names(weight)
        shapes |= {down: (lora.rank, model.shapes[weight][1]), up: (model.shapes[weight][0], lora.rank)}
        if weight in split.tp_dims:  # A is cut where the weight is by inputs, B where it is by outputs
            tp_dims[(up, down)[split.tp_dims[weight]]] = split.tp_dims[weight]
    of = {name: weight for weight in weights for name in adapter_names(weight)}
    adapters = replace(model, shapes=shapes, units={name: model.units[weight] for name, weight in of.items()})
    stages = {name: split.stages[weight] for name, weight in of.items() if weight in split.stages}
    return held(adapters, replace(split, tp_dims=tp_dims, stages=stages), stage)


def with_adapters(model: ModelShape, lora: LoraConfig) -> ModelShape:
    """The same shapes where nothing but adapters learns; `model` itself where there are none."""
    if not lora.rank:
        return model
    first = [name for name in model.shapes if model.units[name] == (1,) and _has_adapter(model, name, lora)]
    adapted = {name.split(".")[-2] for name in first}
    learns = Learns(
        weights=False,
        attention=bool(adapted & _OF_ATTENTION),
        mlp=bool(adapted & _OF_MLP),
        product=bool(adapted & _OF_PRODUCT),
        between=lora.rank * len(first),
    )
    return replace(model, learns=learns)


def _has_adapter(model: ModelShape, name: str, lora: LoraConfig) -> bool:
    """Whether this is the weight of a linear layer that gets one."""
    if not 1 <= model.units[name][0] <= model.num_layers or name not in model.linear:
        return False
    module = "." + name.removesuffix(".weight")
    return lora.target_modules == [ALL_LINEAR] or any(module.endswith(f".{target}") for target in lora.target_modules)
