"""The shapes of a model: all that a mesh can be held against without a weight."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, PretrainedConfig

from verl.errors import UserError
from verl.mesh.spec import RoleSpec
from verl.model.heads import Head, HeadedModel
from verl.model.hub import hub_folder
from verl.model.load import caps_scores, hf_parameters, meta_model, read_config
from verl.model.pieces import EXPERTS
from verl.parallel.stages import split_layers, unit_costs
from verl.reshard.boxes import Split, tensor_parallel_dims
from verl.reshard.layout import Shapes


@dataclass(frozen=True)
class Experts:
    """Of each layer's MLP."""

    number: int
    chosen: int
    """For a token."""
    width: int
    """Of one expert's projections."""


@dataclass(frozen=True)
class Learns:
    """What of a layer learns: autograd keeps what a weight's gradient is made of."""

    weights: bool = True
    """Its own; else adapters alone do."""
    attention: bool = True
    """Projections of attention's input: that is kept."""
    mlp: bool = True
    """Projections of the MLP's input."""
    product: bool = True
    """The projection of gate times up."""
    between: int = 0
    """Numbers a token between the two matrices of all adapters."""


@dataclass(frozen=True)
class ModelShape:
    """A decoder with one of the three heads. Sizes are numbers of elements."""

    name: str
    """For messages: the folder, file or hub id that it comes from."""
    shapes: Shapes
    """Of every parameter by its Hugging Face name, a tied one once."""
    units: Mapping[str, tuple[int, ...]]
    """Where a parameter is: 0 the embedding, 1 to num_layers the layers, num_layers + 1 the last norm and the head."""
    unit_costs: tuple[float, ...]
    """By which pipeline stages are made even; () where the model cannot be cut between its layers."""
    uncut: str
    """Why it cannot be; "" where it can."""
    config: PretrainedConfig = field(repr=False)
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocabulary: int
    normed: int
    """Numbers that the norms of one layer take in for a token."""
    norms_in_float32: bool
    """Norms apply their weight in float32, and only then go back to the model's dtype (Gemma)."""
    caps_scores: bool
    """Attention scores go through a tanh (Gemma 2)."""
    caps_logits: bool
    """Logits go through one, too."""
    has_lm_head: bool
    linear: frozenset[str] = frozenset()
    """Parameters that are weights of linear layers."""
    experts: Experts | None = None
    """None where there is one MLP for all tokens."""
    learns: Learns = Learns()

    @cached_property
    def num_elements(self) -> int:
        return sum(prod(shape) for shape in self.shapes.values())

    def stages(self, pp: int, virtual_stages: int = 1) -> list[list[int]]:
        """The units of each pipeline stage. There are as many units as parts of stages at least."""
        if pp * virtual_stages == 1:
            return [list(range(self.num_layers + 2))]
        parts = split_layers(self.unit_costs, pp * virtual_stages)
        return [[unit for part in parts[stage::pp] for unit in part] for stage in range(pp)]

    def split(self, spec: RoleSpec, dp: int) -> Split:
        """How a role cuts the model. `dp`: ranks that parameters are spread over (`Placement.spread`); `spec` does not
        know them where it says `all`.
        """
        pp, tp = spec.pipeline_parallel_size, spec.tensor_parallel_size
        stages = self.stages(pp, spec.parallelism.virtual_stages)
        stage_of = {unit: stage for stage, units in enumerate(stages) for unit in units}
        return Split(
            pp,
            dp,
            tp,
            self.tp_dims(tp),
            {name: tuple(dict.fromkeys(stage_of[unit] for unit in units)) for name, units in self.units.items()},
            fsdp=spec.parallelism.fsdp,
            copies=dp // (spec.parallelism.fsdp_size or dp),
        )

    def tp_dims(self, tp: int) -> Mapping[str, int]:
        """The dimension that `tp` ranks cut; a parameter that is missing is whole on each."""
        return tensor_parallel_dims(self.shapes, self.config, tp) if tp > 1 else {}


def find_config(path: str) -> PretrainedConfig:
    """The config in a folder, in a JSON file, or of a hub id, of which nothing else is fetched. Raises UserError."""
    file = Path(path).expanduser()
    if file.is_dir() and not (file / "config.json").is_file():
        raise UserError(f"{path}: the folder holds no config.json; name a Hugging Face model folder or a config file")
    if file.is_file():
        return _from_json(file)
    if not file.is_dir() and (file.is_absolute() or path.startswith(".") or path.count("/") != 1):
        raise UserError(
            f"{path}: neither a model folder nor a config file here ({Path.cwd()}), nor a hub id such as org/name"
        )
    # not AutoConfig's own way to the hub, which without a network tries again and again, for minutes
    folder = file if file.is_dir() else hub_folder(path, ["config.json"], fetch=True)
    try:
        return read_config(folder, trust_remote_code=False)
    except UserError as error:
        raise UserError(f"{path}: {_on_one_line(error)}") from error


def shape_of(config: PretrainedConfig, name: str, head: Head = Head.lm, trust_remote_code: bool = False) -> ModelShape:
    """The shapes of the model that transformers makes of a config. Raises UserError where it makes none."""
    try:
        model = meta_model(config, head, torch.bfloat16, "eager", 1, trust_remote_code)
        return _measured(model, config.get_text_config(), name)
    except UserError:
        raise
    except Exception as error:  # a config is the user's, and transformers fails on a bad one in any way it likes
        raise UserError(f"{name}: no model can be made of its config: {type(error).__name__}: {error}") from error


def _from_json(file: Path) -> PretrainedConfig:
    try:
        settings = json.loads(file.read_text(encoding="utf-8"))
        kind = settings.pop("model_type")
        return AutoConfig.for_model(kind, **settings)
    except KeyError as error:
        raise UserError(f"{file}: a model's config needs {error}, and this file has none") from error
    except json.JSONDecodeError as error:
        raise UserError(f"{file}: a model's config.json is JSON, and this file is not: {error}") from error
    except Exception as error:  # as above
        raise UserError(f"{file}: no model's config: {_on_one_line(error)}") from error


def _on_one_line(error: Exception) -> str:
    """The first two lines of what it says: the second is the reason where the first names the check that failed."""
    return " ".join(line.strip() for line in str(error).strip().splitlines()[:2]) or type(error).__name__


def _measured(model: HeadedModel, config: PretrainedConfig, name: str) -> ModelShape:
    shapes = {key: tuple(parameter.shape) for key, parameter in hf_parameters(model)}
    sizes = _Sizes(config)
    layers = sizes("num_hidden_layers")
    heads = sizes("num_attention_heads")
    kv_heads = sizes("num_key_value_heads", heads)
    first = f"{model.hf.base_model_prefix}.layers.0."
    head_dim = sizes("head_dim", sizes("hidden_size") // heads)
    norms = {key: shape[0] for key, shape in shapes.items() if key.startswith(first) and "norm" in key}
    try:
        costs, uncut = tuple(unit_costs(model)), ""
    except UserError as error:
        costs, uncut = (), str(error)
    return ModelShape(
        name=name,
        shapes=shapes,
        units=_units(model, list(shapes), layers),
        unit_costs=costs,
        uncut=uncut,
        config=config,
        num_layers=layers,
        hidden_size=sizes("hidden_size"),
        intermediate_size=sizes("intermediate_size"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        vocabulary=sizes("vocab_size"),
        normed=sum(
            # a norm of one head's size is applied to every head
            size if size != head_dim else size * (heads if ".q_norm." in key else kv_heads)
            for key, size in norms.items()
        ),
        norms_in_float32=config.model_type.startswith("gemma"),
        caps_scores=caps_scores(config),
        caps_logits=config.to_dict().get("final_logit_softcapping") is not None,
        has_lm_head=model.head is Head.lm,
        linear=frozenset(f"{key}.weight" for key, module in model.hf.named_modules() if isinstance(module, nn.Linear)),
        experts=_experts(sizes) if config.model_type in EXPERTS else None,
    )


class _Sizes:
    """The sizes of a config by their common names, whatever the architecture calls them."""

    def __init__(self, config: PretrainedConfig) -> None:
        self._settings: dict[str, Any] = config.to_dict()
        self._names = config.attribute_map

    def __call__(self, name: str, default: int | None = None) -> int:
        size = self._settings.get(self._names.get(name, name))
        size = default if size is None else size
        if type(size) is not int or size < 1:
            raise ValueError(f"{name} is {size}, and a whole number is needed")
        return size


def _experts(sizes: _Sizes) -> Experts:
    return Experts(sizes("num_experts"), sizes("num_experts_per_tok"), sizes("moe_intermediate_size"))


def _units(model: HeadedModel, names: list[str], num_layers: int) -> dict[str, tuple[int, ...]]:
    embedding = _name_of(model, model.hf.get_input_embeddings())
    tied = model.head is Head.lm and f"{_name_of(model, model.output_embeddings)}.weight" not in names
    layers = f"{model.hf.base_model_prefix}.layers."

    def unit(name: str) -> tuple[int, ...]:
        if name.startswith(layers):
            return (int(name.removeprefix(layers).partition(".")[0]) + 1,)
        if name.rpartition(".")[0] == embedding:
            return (0, num_layers + 1) if tied else (0,)
        return (num_layers + 1,)

    return {name: unit(name) for name in names}


def _name_of(model: HeadedModel, module: object) -> str:
    return next(name for name, candidate in model.hf.named_modules() if candidate is module)
