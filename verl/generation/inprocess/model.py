"""Builds the model that generates: Hugging Face's code, our attention, no weights yet."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from verl.errors import UserError
from verl.generation.inprocess import attention
from verl.generation.inprocess.peers import Peers
from verl.generation.inprocess.tensor import cut_model
from verl.model.load import positions
from verl.parallel.support import unsupported

_LAYER_TYPES = {"full_attention", "sliding_attention"}


def build_model(
    path: str, dtype: torch.dtype, device: torch.device, trust_remote_code: bool, peers: Peers | None = None
) -> PreTrainedModel:
    """The CausalLM of a Hugging Face folder or hub id, in eval mode, its parameters NaN until they are loaded.

    No checkpoint is read: the memory taken is one model, once. Of several `peers`, each makes its part of one, and its
    logits are that part of the vocabulary; all of them call this together.

    Raises:
        UserError: for an architecture that would not be computed rightly here.
    """
    config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    _check_layer_types(config, path)
    if peers is not None:
        check_split(config, peers.size, path)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation=attention.NAME, trust_remote_code=trust_remote_code
        )
    if peers is not None:
        cut_model(model, peers)
    model.to_empty(device=device)
    model.tie_weights()  # `to_empty` gave the head memory of its own
    model.requires_grad_(False).eval()
    _fill(model, path)
    _check_attention(model, path)
    return model


def check_split(config: PretrainedConfig, size: int, name: str) -> None:
    """Raises UserError where the model cannot generate on so many tensor-parallel ranks. `name`: its, for messages."""
    problems = unsupported(config, tp=size, pp=1)
    if problems:
        # what training says of it: setting, reason, and a remedy that is training's
        reason = problems[0].partition(": ")[2].partition(": ")[2].partition("; ")[0]
        raise UserError(
            f"rollout.tensor_parallel_size: {size}: backend torch cannot cut {name} so ({reason}); set it to 1, or "
            "use backend vllm"
        )


def longest_sequence(config: PretrainedConfig) -> int | None:
    """Tokens that a sequence may have; None: the config names no limit.

    Rotary embeddings of a dynamic kind change their frequencies with the longest sequence of a batch once it passes the
    length that the model was trained at. A sample would then depend on its neighbours, so that length is the limit.
    """
    settings = config.get_text_config().to_dict()
    rope = settings.get("rope_parameters") or {}
    if rope.get("rope_type") in ("dynamic", "longrope"):
        return rope.get("original_max_position_embeddings", settings["max_position_embeddings"])
    return positions(config)


def _check_layer_types(config: PretrainedConfig, path: str) -> None:
    unknown = set(config.to_dict().get("layer_types") or ()) - _LAYER_TYPES
    if unknown:
        raise UserError(
            f"{path} has layers of type {', '.join(sorted(unknown))}; backend torch computes "
            f"{' and '.join(sorted(_LAYER_TYPES))}: use backend vllm for this model"
        )


def _fill(model: PreTrainedModel, path: str) -> None:
    """Computes the buffers that no checkpoint has, such as rotary frequencies, and sets every parameter to NaN.

    A parameter that a weight load then forgets shows at the first token, not as a slightly worse model.
    """
    for module in model.modules():
        buffers = list(module.buffers(recurse=False))
        if not buffers:
            continue
        for buffer in buffers:
            if buffer.is_floating_point():
                buffer.fill_(float("nan"))
        model._init_weights(module)  # Hugging Face's own way to give a module built on meta its values
    for name, buffer in model.named_buffers():
        if buffer.is_floating_point() and bool(buffer.isnan().any()):
            raise UserError(
                f"buffer {name} of {path} is not initialised by {type(model).__name__}._init_weights, so it would be "
                "left undefined: use backend vllm for this model"
            )
    for parameter in model.parameters():
        parameter.fill_(float("nan"))


class _CountingKV:
    """Counts the layers that attend."""

    def __init__(self) -> None:
        self.layers: set[int] = set()

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None, window: int | None
    ) -> Tensor:
        self.layers.add(layer)
        return query.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[-1])


@torch.no_grad()
def _check_attention(model: PreTrainedModel, path: str) -> None:
    """Runs one token. A layer that mixes tokens in a way of its own would know nothing of our cache."""
    kv = _CountingKV()
    token = torch.zeros(1, 1, dtype=torch.long, device=model.device)
    model(input_ids=token, position_ids=token, use_cache=False, kv=kv)
    num_layers = model.config.get_text_config().num_hidden_layers
    if len(kv.layers) != num_layers:
        raise UserError(
            f"{len(kv.layers)} of {num_layers} layers of {path} use Hugging Face's attention interface, which "
            "backend torch builds on: use backend vllm for this model"
        )
