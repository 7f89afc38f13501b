"""Pipeline stages: which part of a decoder each one holds, and a model cut down to a part."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor, nn

from verl.errors import UserError
from verl.model.heads import Head, HeadedModel

EMBEDDING_SHARE = 0.1
"""An embedding is looked up and not multiplied: its time is that of its gradient's memory traffic, about so much of
what a layer with as many parameters takes."""


class Identity(nn.Module):
    """Stands where another stage has a module: Hugging Face's code goes through it, and names stay what they are."""

    def forward(self, hidden_states: Tensor, *args: object, **kwargs: object) -> Tensor:
        return hidden_states


def split_layers(costs: Sequence[float], num_stages: int) -> list[range]:
    """Adjacent ranges of units, none of them empty, whose costliest is as cheap as can be.

    Of such splits one whose other stages are even, too. Raises ValueError for fewer units than stages.
    """
    if len(costs) < num_stages:
        raise ValueError(f"{len(costs)} units do not make {num_stages} stages")
    before = [0.0, *accumulate(costs)]
    # (largest stage, sum of squares, where its last stage starts) of the first `end` units in so many stages
    best: list[tuple[float, float, int] | None] = [(0.0, 0.0, 0)] + [None] * len(costs)
    starts: list[list[int]] = []
    for stage in range(1, num_stages + 1):
        row: list[tuple[float, float, int] | None] = [None] * (len(costs) + 1)
        for end in range(stage, len(costs) + 1):
            options = []
            for start in range(stage - 1, end):
                earlier, cost = best[start], before[end] - before[start]
                if earlier is not None:
                    options.append((max(earlier[0], cost), earlier[1] + cost * cost, start))
            row[end] = min(options, default=None)
        starts.append([-1 if option is None else option[2] for option in row])
        best = row
    ranges: list[range] = []
    end = len(costs)
    for row_starts in reversed(starts):
        ranges.append(range(row_starts[end], end))
        end = row_starts[end]
    return ranges[::-1]


def unit_costs(model: HeadedModel) -> list[float]:
    """What a token costs in each unit of a whole model: the embedding, every layer, and the last norm with the head.

    The unit is the time of a multiplication with one parameter.
    """
    embedding = EMBEDDING_SHARE * _size(model.hf.get_input_embeddings())
    end = _size(model.hf.base_model.get_submodule(_norm_name(model))) + _size(model.head_module)
    return [embedding, *(float(_size(layer)) for layer in _layers(model)), float(end)]


def stage_units(model: HeadedModel, num_stages: int, virtual_stages: int = 1) -> list[list[range]]:
    """[stage][chunk] -> units of a whole model on the meta device, numbered as in `unit_costs`.

    Raises UserError for a model with fewer layers than parts, and for one that cannot be cut between its layers.
    """
    num_layers, num_parts = len(_layers(model)), num_stages * virtual_stages
    if num_layers < num_parts:
        raise UserError(
            f"a model with {num_layers} layers does not make {num_parts} pipeline stages (pipeline_parallel_size "
            f"{num_stages} x virtual_stages {virtual_stages}); lower them to a product of at most {num_layers}"
        )
    _check_layers_are_all(model)
    ranges = split_layers(unit_costs(model), num_parts)
    return [ranges[stage::num_stages] for stage in range(num_stages)]


def cut(model: HeadedModel, units: range) -> None:
    """Takes from a whole model on the meta device all modules that are not in these units, `units` as in `stage_units`.

    Where the head is tied to an embedding that goes, it stays as a copy of it, under the embedding's name.
    """
    embedding, layers, norm = model.hf.get_input_embeddings(), _layers(model), _norm_name(model)
    if 0 not in units:
        if model.head is Head.lm and model.output_embeddings.weight is embedding.weight:
            model.copy_of = f"{_name_of(embedding, model.hf)}.weight"
        model.hf.set_input_embeddings(Identity())
    for number in range(len(layers)):
        if number + 1 not in units:
            layers[number] = Identity()
    if len(layers) + 1 not in units:
        model.hf.base_model.set_submodule(norm, Identity())
        model.hf.set_submodule(_name_of(model.head_module, model.hf), Identity())
        model.ends_with_head, model.copy_of = False, None


def _layers(model: HeadedModel) -> nn.ModuleList:
    layers = model.hf.base_model.get_submodule("layers")
    assert isinstance(layers, nn.ModuleList)
    return layers


def _norm_name(model: HeadedModel) -> str:
    """Of the one module with parameters that follows the layers."""
    decoder, known = model.hf.base_model, (model.hf.get_input_embeddings(), _layers(model))
    others = [name for name, child in decoder.named_children() if _size(child) and all(child is not k for k in known)]
    if len(others) != 1:
        raise UserError(
            f"{type(model.hf).__name__} has {', '.join(others) or 'nothing'} beside its embedding and layers, where a "
            "norm alone is expected, so no pipeline stages can be made of it; set pipeline_parallel_size to 1"
        )
    return others[0]


def _check_layers_are_all(model: HeadedModel) -> None:
    """Raises UserError for a decoder that does something to hidden states outside its embedding, layers and norm.

    Each stage would do it once more. Without those modules nothing may happen to what goes in.
    """
    bare = copy.deepcopy(model)
    cut(bare, range(0))
    bare.to_empty(device="cpu")
    for module in bare.hf.modules():
        if next(module.buffers(recurse=False), None) is not None:
            bare.hf._init_weights(module)
    sent = torch.linspace(-1.0, 1.0, 2 * bare.hf.config.get_text_config().hidden_size).view(1, 2, -1)
    with torch.no_grad():
        received = bare.hf.base_model(inputs_embeds=sent, position_ids=torch.arange(2)[None], use_cache=False)
    if not torch.equal(received.last_hidden_state, sent):
        raise UserError(
            f"{type(model.hf).__name__} changes hidden states outside its layers, which every pipeline stage would do "
            "again; set pipeline_parallel_size to 1"
        )


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _name_of(module: nn.Module, inside: nn.Module) -> str:
    return next(name for name, candidate in inside.named_modules() if candidate is module)
