"""Tensor parallelism: every rank has a part of each layer's weights, and between the layers a part of the time.

Cut as in Shoeybi et al. 2019 (Megatron-LM), with the time shared out as in Korthikanti et al. 2022. The model's own
plan (`base_model_tp_plan`) says how linear layers are cut. Parameters are DTensors on the ranks' mesh, so that
FSDP, clipping and checkpoints know what is where, but a module computes on its local part of them with its own forward.
A layer sends four messages: the time is gathered in front of attention and MLP, summed and shared out behind each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from transformers import PretrainedConfig

from verl.model.heads import Head, HeadedModel
from verl.model.lora import adapted_linear, down_and_up
from verl.model.peers import Peers

COLUMN, ROW, PER_HEAD, VOCABULARY = "colwise", "rowwise", "replicated_with_grad_allreduce", "embedding_rowwise"
"""Styles of transformers' plans: cut by outputs, by inputs, whole but run on a rank's own heads, cut by tokens."""


def apply_tensor_parallelism(model: HeadedModel, mesh: DeviceMesh) -> None:
    """Cuts a model on the meta device over the 1-D `mesh`. Every parameter is a DTensor on it afterwards.

    The model is one that `verl.parallel.support` has nothing against; a part of one (a pipeline stage) will do.
    """
    peers = model.peers = Peers(mesh)
    decoder, config = model.hf.base_model, model.hf.config.get_text_config()
    styles = {name: style for name, _ in decoder.named_modules() if (style := style_of(name, tp_plan(config)))}
    for name, style in styles.items():
        module = decoder.get_submodule(name)
        if style == VOCABULARY:
            continue  # some plans name the embedding; it is cut below whether they do or not
        elif style == PER_HEAD:
            _run_on_local(module, peers, gradients_are_parts=True)
        elif style == ROW:
            _cut_inputs(module, peers)
        elif config.num_key_value_heads < peers.size and name.endswith((".k_proj", ".v_proj")):
            for part in _parts_with_its_outputs(module, peers):
                _share_heads(part, peers, config.num_key_value_heads)
        else:
            for part in _parts_with_its_outputs(module, peers):
                _cut_outputs(part, peers)
    for name in dict.fromkeys(name.rpartition(".")[0] for name, style in styles.items() if style == COLUMN):
        _gather_in_front(decoder.get_submodule(name), peers)
    if config.num_key_value_heads < peers.size:
        _set_groups(decoder, config.num_attention_heads // peers.size)
    embeddings = model.hf.get_input_embeddings()
    if isinstance(embeddings, nn.Embedding):
        _cut_vocabulary(embeddings, peers)
    _place_head(model, peers)
    for module in decoder.modules():
        whole = [p for p in module.parameters(recurse=False) if not isinstance(p, DTensor)]
        if whole:
            assert "norm" in type(module).__name__.lower(), f"no plan for {type(module).__name__}"
            _run_on_local(module, peers, gradients_are_parts=True)
    assert all(isinstance(p, DTensor) for p in model.parameters())


def tp_plan(config: PretrainedConfig) -> Mapping[str, str]:
    """Styles by module of the decoder, with `*` for a layer's number."""
    return config.get_text_config().base_model_tp_plan or {}


def style_of(name: str, plan: Mapping[str, str]) -> str | None:
    return plan.get(".".join("*" if part.isdigit() else part for part in name.split(".")))


def _linear(module: nn.Module) -> nn.Linear:
    """The model's own layer, where it has an adapter, too."""
    linear = module.get_base_layer() if adapted_linear(module) else module
    assert isinstance(linear, nn.Linear), f"a plan cuts {type(linear).__name__}, which is no linear layer"
    return linear


def _parts_with_its_outputs(module: nn.Module, peers: Peers) -> list[nn.Linear]:
    """The linear layers whose outputs are the module's: its own and an adapter's B. A is whole on every rank, and its
    gradients are parts, since each goes on with another part of B.
    """
    if not adapted_linear(module):
        return [_linear(module)]
    down, up = down_and_up(module)
    _run_on_local(down, peers, gradients_are_parts=True)
    return [_linear(module), up]


def _cut_outputs(module: nn.Linear, peers: Peers) -> None:
    for name, _ in list(module.named_parameters()):
        _distribute(module, name, peers, Shard(0))

    def forward(x: Tensor) -> Tensor:
        return F.linear(x, _local(module.weight), None if module.bias is None else _local(module.bias))

    module.forward = forward  # type: ignore[method-assign]


def _cut_inputs(module: nn.Module, peers: Peers) -> None:
    """The outputs are parts of a sum. A bias is added to the sum, by each rank at its part of the time.

    An adapter's A is cut by inputs, too, and its part of what B [out, r] makes goes into the same sum.
    """
    linear = _linear(module)
    if linear.bias is not None:
        _distribute(linear, "bias", peers, Replicate())
    _multiply_inputs_here(linear, peers)
    if adapted_linear(module):
        down, up = down_and_up(module)
        _multiply_inputs_here(down, peers)
        _run_on_local(up, peers, gradients_are_parts=True)
    multiply = module.forward

    def forward(x: Tensor) -> Tensor:
        out = peers.sum_and_share_time(multiply(x))
        return out if linear.bias is None else out + _local(linear.bias, gradients_are_parts=True)

    module.forward = forward  # type: ignore[method-assign]


def _multiply_inputs_here(linear: nn.Linear, peers: Peers) -> None:
    _distribute(linear, "weight", peers, Shard(1))

    def forward(x: Tensor) -> Tensor:
        return F.linear(x, _local(linear.weight))

    linear.forward = forward  # type: ignore[method-assign]


def _share_heads(module: nn.Linear, peers: Peers, num_heads: int) -> None:
    """Fewer key or value heads than ranks: the weight is whole on every rank, and neighbours use one head of it."""
    for name, _ in list(module.named_parameters()):
        _distribute(module, name, peers, Replicate())
    dim, head = module.out_features // num_heads, peers.rank * num_heads // peers.size
    own = slice(head * dim, (head + 1) * dim)

    def forward(x: Tensor) -> Tensor:
        bias = None if module.bias is None else _local(module.bias, gradients_are_parts=True)[own]
        return F.linear(x, _local(module.weight, gradients_are_parts=True)[own], bias)

    module.forward = forward  # type: ignore[method-assign]


def _set_groups(decoder: nn.Module, queries: int) -> None:
    """Tells attention layers how many query heads there are here for their one key head."""
    for module in decoder.modules():
        if "num_key_value_groups" in vars(module):
            vars(module)["num_key_value_groups"] = queries


def _cut_vocabulary(module: nn.Embedding, peers: Peers) -> None:
    """Rows of other ranks' tokens are zero here, so that the ranks' sum is the embedding."""
    assert module.num_embeddings % peers.size == 0
    _distribute(module, "weight", peers, Shard(0))
    size = module.num_embeddings // peers.size
    first = peers.rank * size
    padding = module.padding_idx
    # the row that gets no gradient, where it is here
    module.padding_idx = padding - first if padding is not None and first <= padding < first + size else None
    look_up = _with_local_parameters(module, module.forward, gradients_are_parts=False)

    def forward(ids: Tensor) -> Tensor:
        places = ids - first
        elsewhere = (places < 0) | (places >= size)
        rows = look_up(places.masked_fill(elsewhere, 0))
        return peers.sum_and_share_time(rows.masked_fill(elsewhere[..., None], 0.0))

    module.forward = forward  # type: ignore[method-assign]


def _place_head(model: HeadedModel, peers: Peers) -> None:
    """The language-model head by rows, which `HeadedModel` reads itself; a scalar one whole, alike on all ranks."""
    if not model.ends_with_head:
        return
    if model.head is not Head.lm:
        _run_on_local(model.score, peers, gradients_are_parts=False)
        return
    head, embeddings = model.output_embeddings, model.hf.get_input_embeddings()
    if model.hf.config.get_text_config().tie_word_embeddings and isinstance(embeddings, nn.Embedding):
        head.weight = embeddings.weight
    else:
        _distribute(head, "weight", peers, Shard(0))


def _gather_in_front(module: nn.Module, peers: Peers) -> None:
    def hook(
        module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if args:
            return (peers.gather_time(args[0]), *args[1:]), kwargs
        return args, kwargs | {"hidden_states": peers.gather_time(kwargs["hidden_states"])}

    module.register_forward_pre_hook(hook, with_kwargs=True)


def _run_on_local(module: nn.Module, peers: Peers, gradients_are_parts: bool) -> None:
    for name, _ in list(module.named_parameters(recurse=False)):
        _distribute(module, name, peers, Replicate())
    module.forward = _with_local_parameters(module, module.forward, gradients_are_parts)  # type: ignore[method-assign]


def _with_local_parameters(
    module: nn.Module, forward: Callable[..., Tensor], gradients_are_parts: bool
) -> Callable[..., Tensor]:
    """`forward`, which reads the module's parameters by their names and finds plain tensors there."""

    @contextmanager
    def local() -> Iterator[None]:
        parameters = dict(module.named_parameters(recurse=False))
        module._parameters.update({name: _local(p, gradients_are_parts) for name, p in parameters.items()})  # type: ignore[arg-type]
        try:
            yield
        finally:
            module._parameters.update(parameters)

    def on_local(*args: Any, **kwargs: Any) -> Tensor:
        with local():
            return forward(*args, **kwargs)

    return on_local


def _distribute(module: nn.Module, name: str, peers: Peers, placement: Shard | Replicate) -> None:
    parameter = module.get_parameter(name)
    assert parameter.is_meta, "values are loaded after the model is cut"
    whole = distribute_tensor(parameter.detach(), peers.mesh, [placement], src_data_rank=None)
    module.register_parameter(name, nn.Parameter(whole, requires_grad=parameter.requires_grad))


def _local(parameter: Tensor, gradients_are_parts: bool = False) -> Tensor:
    """The rank's part of a parameter. `gradients_are_parts`: the ranks' gradients of a whole one are to be summed."""
    assert isinstance(parameter, DTensor)
    return parameter.to_local(grad_placements=[Partial()] if gradients_are_parts else None)
