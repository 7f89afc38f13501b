"""From a folder to a model on the meta device, and from its safetensors straight into this rank's shards."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from verl.errors import UserError
from verl.model.attention import CPU_ATTENTION
from verl.model.heads import Head, HeadedModel, add_scalar_head

Box = tuple[slice, ...]
"""Part of a tensor: a slice for each dimension."""


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


def attention(choice: str, device: torch.device) -> str:
    """The attention kernel's name in transformers for `model.attn_implementation`."""
    if choice != "auto":
        return choice
    if device.type == "cuda":
        from transformers.utils import is_flash_attn_2_available

        return "flash_attention_2" if is_flash_attn_2_available() else "sdpa"
    return CPU_ATTENTION


def meta_model(
    config: PretrainedConfig,
    head: Head,
    dtype: torch.dtype,
    attn_implementation: str,
    chunk_tokens: int,
    trust_remote_code: bool,
) -> HeadedModel:
    """The whole model without memory. Raises UserError for a config that transformers makes no decoder of."""
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


def materialise(model: HeadedModel, device: torch.device) -> None:
    """Memory for this rank's shards; what no file holds (rotary tables and the like) is computed."""
    tied = model.head is Head.lm and model.hf.config.get_text_config().tie_word_embeddings
    model.to_empty(device=device)
    if tied:
        embeddings = model.hf.get_input_embeddings()
        assert isinstance(embeddings, nn.Embedding)
        model.output_embeddings.weight = embeddings.weight  # to_empty parts them
    for module in model.hf.modules():
        if next(module.buffers(recurse=False), None) is not None:
            model.hf._init_weights(module)


class Safetensors:
    """The tensors of a folder, read a slice at a time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise UserError(
                f"the model folder {folder} holds no *.safetensors file. Save the model with save_pretrained."
            )
        self._by_name: dict[str, safe_open] = {}
        for file in files:
            try:
                handle = safe_open(file, "pt")
            except SafetensorError as error:
                raise UserError(f"{file} cannot be read: {error}. Copy or fetch it again.") from error
            self._by_name |= dict.fromkeys(handle.keys(), handle)

    def __contains__(self, name: str) -> bool:
        return name in self._by_name

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._by_name[name].get_slice(name).get_shape())

    def names(self) -> list[str]:
        return list(self._by_name)

    def read(self, name: str, box: Box) -> Tensor:
        return self._by_name[name].get_slice(name)[box]


def check_weights(model: HeadedModel, files: Safetensors) -> None:
    """Raises UserError where the folder's tensors are not those that its config.json and the head make."""
    wrong = []
    for name, parameter in hf_parameters(model):
        if name not in files:
            if not _may_be_drawn(model, name):
                wrong.append(f"'{name}' is in none of the safetensors files{_hint(model, name)}")
        elif files.shape(name) != tuple(parameter.shape):
            wrong.append(
                f"'{name}' has shape {files.shape(name)} where {tuple(parameter.shape)} is needed{_hint(model, name)}"
            )
    if wrong:
        others = f" (The first of {len(wrong)} tensors that do not fit.)" if len(wrong) > 1 else ""
        raise UserError(f"{files.folder}: {wrong[0]}{others}")


def check_folder(
    folder: Path, head: Head, device: torch.device, attn_implementation: str, trust_remote_code: bool
) -> None:
    """Raises UserError for a folder that a model with this head cannot be loaded from. Reads no weights."""
    config = read_config(folder, trust_remote_code)
    kernel = attention(attn_implementation, device)
    check_weights(meta_model(config, head, torch.float32, kernel, 1, trust_remote_code), Safetensors(folder))


@torch.no_grad()
def load_shards(model: HeadedModel, folder: Path, seed: int, beat: Callable[[], None]) -> None:
    """Fills every parameter's local shard from the folder; `beat` is called for each.

    A value head that the folder lacks is drawn from the seed, whole and then cut, so that it is the same on every mesh.
    Raises UserError where the folder's tensors are not those that its config.json makes.
    """
    files = Safetensors(folder)
    check_weights(model, files)
    for name, parameter in hf_parameters(model):
        box = local_box(parameter)
        source = files.read(name, box) if name in files else _draw_head(parameter.shape, seed)[box]
        local_tensor(parameter).copy_(source)
        beat()


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


def hf_parameters(model: HeadedModel) -> Iterator[tuple[str, nn.Parameter]]:
    """Parameters by Hugging Face name, a tied one once."""
    return ((name.removeprefix("hf."), parameter) for name, parameter in model.named_parameters())


def local_tensor(parameter: Tensor) -> Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def local_box(parameter: Tensor) -> Box:
    """Which part of the whole tensor this rank's shard is."""
    if not isinstance(parameter, DTensor):
        return tuple(slice(0, size) for size in parameter.shape)
    shape, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    return tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))


def parameter_shapes(folder: Path, config: PretrainedConfig) -> dict[str, tuple[int, ...]]:
    """The shape of every weight of a language model's folder but a tied head, which is the embedding again."""
    files = Safetensors(folder)
    tied = config.get_text_config().tie_word_embeddings
    return {name: files.shape(name) for name in files.names() if not (tied and name == "lm_head.weight")}
