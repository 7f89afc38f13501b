"""From a folder to a model on the meta device, and from its safetensors straight into this rank's shards."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from verl.config import LoraConfig
from verl.errors import UserError
from verl.model.attention import CPU_ATTENTION
from verl.model.heads import Head, HeadedModel, add_scalar_head
from verl.model.lora import add_adapters, draw, is_adapter, plain_name
from verl.model.pieces import EXPERTS, Box, pieces, size_of
from verl.model.weight_files import DTYPES, Safetensors


def read_config(folder: Path, trust_remote_code: bool) -> PretrainedConfig:
    """The folder's config without dropout: old and new log-probs must be those of one function."""
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except (ValueError, OSError, StrictDataclassError) as error:
        raise UserError(f"the model config in {folder} cannot be read: {error}") from error
    for name, value in vars(config).items():
        if ("dropout" in name or name.endswith("pdrop")) and isinstance(value, float):
            setattr(config, name, 0.0)
    return config


def positions(config: PretrainedConfig) -> int | None:
    """Tokens that a sequence may have; None: the config names no limit.

    A stretched rotary embedding reaches `factor` times as far as the one that the model was first trained with.
    """
    text = config.get_text_config()
    settings, name = text.to_dict(), "max_position_embeddings"
    limit = settings.get(text.attribute_map.get(name, name))
    rope = settings.get("rope_parameters") or {}
    if limit is None or "factor" not in rope:
        return limit
    return max(limit, int(rope["factor"] * rope.get("original_max_position_embeddings", limit)))


def attention(choice: str, device: torch.device, config: PretrainedConfig) -> str:
    """The attention kernel's name in transformers for `model.attn_implementation`."""
    if choice != "auto":
        return choice
    if device.type == "cuda":
        from transformers.utils import is_flash_attn_2_available

        if is_flash_attn_2_available():
            return "flash_attention_2"
    if caps_scores(config):
        return "eager"
    return "sdpa" if device.type == "cuda" else CPU_ATTENTION


def caps_scores(config: PretrainedConfig) -> bool:
    """Attention scores go through a tanh (Gemma 2), which SDPA leaves out without a word."""
    return config.get_text_config().to_dict().get("attn_logit_softcapping") is not None


def meta_model(
    config: PretrainedConfig,
    head: Head,
    dtype: torch.dtype,
    attn_implementation: str,
    chunk_tokens: int,
    trust_remote_code: bool,
) -> HeadedModel:
    """The whole model without memory. Raises UserError for a config that transformers makes no decoder of."""
    if caps_scores(config) and attn_implementation in ("sdpa", CPU_ATTENTION):
        raise UserError(
            f"model.attn_implementation={attn_implementation} does not compute attn_logit_softcapping, which a "
            f"{config.model_type} has; set it to auto, eager or flash_attention_2"
        )
    settings = config.get_text_config().to_dict()
    if config.model_type not in EXPERTS and (settings.get("num_experts") or settings.get("num_local_experts")):
        raise UserError(
            f"a {config.model_type} has experts, and how its files hold them is not known here; of such models "
            f"{' and '.join(EXPERTS)} is trained"
        )
    with torch.device("meta"):
        try:
            hf = AutoModelForCausalLM.from_config(
                config, dtype=dtype, attn_implementation=attn_implementation, trust_remote_code=trust_remote_code
            )
        except (ValueError, ImportError) as error:
            reason = str(error).split("\n")[0]
            raise UserError(
                f"no decoder can be made of a config with model_type {config.model_type}: {reason}"
            ) from error
        if head is not Head.lm:
            add_scalar_head(hf)
    return HeadedModel(hf, head, chunk_tokens)


def materialise(model: HeadedModel, device: torch.device, host_parameters: bool = False) -> None:
    """Memory for this rank's shards, in host memory if they are to be there, and for buffers on the device. What no
    file holds (rotary tables and the like) is computed.
    """
    embeddings = model.hf.get_input_embeddings()
    tied = model.head is Head.lm and model.hf.config.get_text_config().tie_word_embeddings
    model.to_empty(device="cpu" if host_parameters else device)
    if tied and model.ends_with_head and isinstance(embeddings, nn.Embedding):
        model.output_embeddings.weight = embeddings.weight  # to_empty parts them
    for module in model.hf.modules():
        buffers = dict(module.named_buffers(recurse=False))
        if buffers:
            module._buffers.update({name: torch.empty_like(buffer, device=device) for name, buffer in buffers.items()})
            for parameter in module.parameters(recurse=False):
                parameter._is_hf_initialized = True  # type: ignore[attr-defined]  # transformers' mark for "let it be"
            model.hf._init_weights(module)


def check_weights(model: HeadedModel, files: Safetensors) -> None:
    """Raises UserError where the folder's tensors are not those that its config.json and the head make."""
    wrong = []
    for name, parameter in base_parameters(model):
        for piece in pieces(name, parameter.shape):
            wanted = size_of(piece.box)
            if piece.name not in files:
                if not _may_be_drawn(model, name):
                    wrong.append(f"'{piece.name}' is in none of the safetensors files{_hint(model, name)}")
            elif files.shape(piece.name) != wanted:
                has = files.shape(piece.name)
                wrong.append(f"'{piece.name}' has shape {has} where {wanted} is needed{_hint(model, name)}")
            elif files.dtype(piece.name) not in DTYPES:
                wrong.append(
                    f"'{piece.name}' is stored as {files.dtype(piece.name)}, where one of {', '.join(DTYPES)} is "
                    "needed. Save the model without quantization."
                )
    if wrong:
        others = f" (The first of {len(wrong)} tensors that do not fit.)" if len(wrong) > 1 else ""
        raise UserError(f"{files.folder}: {wrong[0]}{others}")


def check_folder(
    folder: Path, head: Head, device: torch.device, attn_implementation: str, trust_remote_code: bool
) -> None:
    """Raises UserError for a folder that a model with this head cannot be loaded from. Reads no weights."""
    config = read_config(folder, trust_remote_code)
    kernel = attention(attn_implementation, device, config)
    check_weights(meta_model(config, head, torch.float32, kernel, 1, trust_remote_code), Safetensors(folder))


def check_adapters(folder: Path, head: Head, lora: LoraConfig, trust_remote_code: bool) -> None:
    """Raises UserError for adapters that a folder's model cannot have. Its messages begin with the setting."""
    config = read_config(folder, trust_remote_code)
    add_adapters(meta_model(config, head, torch.float32, "eager", 1, trust_remote_code), lora)


@torch.no_grad()
def load_shards(model: HeadedModel, folder: Path, seed: int, beat: Callable[[], None]) -> None:
    """Fills every parameter's local shard from the folder; `beat` is called for each.

    A value head that the folder lacks, and adapters, are drawn from the seed, whole and then cut, so that they are the
    same on every mesh.
    Raises UserError where the folder's tensors are not those that its config.json makes.
    """
    files = Safetensors(folder)
    check_weights(model, files)
    for name, parameter in hf_parameters(model):
        if is_adapter(name):
            local_tensor(parameter).copy_(draw(name, parameter.shape, seed)[local_box(parameter)])
            continue
        for piece in pieces(name, parameter.shape, local_box(parameter)):
            here = local_tensor(parameter)[piece.index]
            if piece.name in files:
                files.read_into(here, piece.name, piece.box)
            else:
                here.copy_(_draw_head(parameter.shape, seed)[piece.box])
        beat()


def shards_by_file(model: nn.Module) -> dict[str, tuple[Box, Tensor]]:
    """This rank's part of every tensor, by the name in the folder's files: which part, and the memory that holds it.

    Adapters are in no such file.
    """
    return {
        piece.name: (piece.box, local_tensor(parameter.detach())[piece.index])
        for name, parameter in base_parameters(model)
        for piece in pieces(name, parameter.shape, local_box(parameter))
    }


def _may_be_drawn(model: HeadedModel, name: str) -> bool:
    return model.head is Head.token_value and name == "score.weight"


def _draw_head(shape: torch.Size, seed: int) -> Tensor:
    """N(0, 1 / (h + 1)^2) as for the reward head of Stiennon et al. 2020: values start near 0."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) / (shape[-1] + 1)


def _hint(model: HeadedModel, name: str) -> str:
    if name == "score.weight" and model.head is Head.score:
        return ". A reward model is an AutoModelForSequenceClassification with one label; this folder holds none."
    if name == "score.weight":
        return ". A critic starts from a language model, or from a folder whose score.weight has one row."
    if model.head is Head.lm and model.hf.get_submodule(name.rpartition(".")[0]) is model.output_embeddings:
        return (
            f". A language model is needed here; config.json says {', '.join(model.hf.config.architectures or ['?'])}."
        )
    return ". The folder's files do not belong to its config.json."


def hf_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Parameters by Hugging Face name, a tied one once: of a model, or of the parts of one that a rank has.

    The last pipeline stage's copy of a tied embedding bears the embedding's name.
    """
    for part in model.modules():
        if isinstance(part, HeadedModel):
            for name, parameter in part.named_parameters():
                if part.copy_of is not None and parameter is part.output_embeddings.weight:
                    yield part.copy_of, parameter
                else:
                    yield plain_name(name.removeprefix("hf.")), parameter


def base_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Without the adapters'."""
    return ((name, parameter) for name, parameter in hf_parameters(model) if not is_adapter(name))


def local_tensor(parameter: Tensor) -> Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def whole_tensor(parameter: Tensor) -> Tensor:
    """The whole of what the ranks of its mesh hold. Collective over them."""
    if isinstance(parameter, DTensor):
        # axis by axis, FSDP's first: the cuts undone in the other order than they were made
        for axis in range(parameter.device_mesh.ndim):
            placements = [Replicate()] * (axis + 1) + list(parameter.placements[axis + 1 :])
            parameter = parameter.redistribute(placements=placements)
    return local_tensor(parameter)


def local_box(parameter: Tensor) -> Box:
    """Which part of the whole tensor this rank's shard is. An empty one may begin where the tensor ends."""
    box = [slice(0, size) for size in parameter.shape]
    if not isinstance(parameter, DTensor):
        return tuple(box)
    mesh, coordinate = parameter.device_mesh, parameter.device_mesh.get_coordinate()
    assert coordinate is not None, "this rank holds nothing of the parameter"
    # the last mesh dimension first: FSDP cuts what tensor parallelism has left, which stands behind it in the mesh
    for axis in reversed(range(mesh.ndim)):
        placement = parameter.placements[axis]
        if isinstance(placement, Shard | _StridedShard):
            box[placement.dim] = _chunk(box[placement.dim], mesh.size(axis), coordinate[axis])
    return tuple(box)


def _chunk(part: slice, chunks: int, index: int) -> slice:
    """As torch.chunk cuts: equal steps, so that the last ones may be short or empty."""
    step = -(-(part.stop - part.start) // chunks)
    return slice(min(part.start + index * step, part.stop), min(part.start + (index + 1) * step, part.stop))


def parameter_shapes(folder: Path, config: PretrainedConfig) -> dict[str, tuple[int, ...]]:
    """The shape of every weight of a language model's folder but a tied head, which is the embedding again."""
    files = Safetensors(folder)
    tied = config.get_text_config().tie_word_embeddings
    return {name: files.shape(name) for name in files.names() if not (tied and name == "lm_head.weight")}
