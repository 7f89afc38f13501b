"""What a split asks of a model that it does not give: said by name, before anything is loaded. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from transformers import PretrainedConfig

from verl.parallel.tensor import COLUMN, PER_HEAD, ROW, VOCABULARY, tp_plan

TENSOR_PARALLEL = ("llama", "qwen2", "qwen3", "gemma2", "gemma3_text", "mistral", "smollm3")
"""Model types whose tensor parallelism is held against one process by tests."""
CONTEXT_PARALLEL = (*TENSOR_PARALLEL, "phi3", "qwen3_moe")
"""Model types whose context parallelism is."""
SEES_LENGTH = ("dynamic", "longrope")
"""Kinds of rotary embeddings that look at the largest position of all that they are given."""
_LARGEST = 64
"""Sizes that are tried for the remedy."""


def unsupported(config: PretrainedConfig, tp: int, pp: int, cp: int = 1) -> list[str]:
    """Everything that keeps a model from being split by tensor, pipeline and context parallelism of these sizes.

    Each message begins with the role's setting in the mesh and ends with a remedy. Empty: the model can be split so.
    """
    return [*_tensor_parallel(config, tp), *_pipeline(config, pp), *_context_parallel(config, tp, cp)]


def _tensor_parallel(config: PretrainedConfig, tp: int) -> Iterator[str]:
    if tp == 1:
        return
    setting = f"parallelism.tensor_parallel_size: {tp}"
    remedy = "set it to 1 and let fsdp: true or pipeline_parallel_size spread the model"
    plan = tp_plan(config)
    if not plan:
        yield f"{setting}: transformers has no tensor-parallel plan for model_type {config.model_type}; {remedy}"
        return
    if strange := sorted(set(plan.values()) - {COLUMN, ROW, PER_HEAD, VOCABULARY}):
        yield (
            f"{setting}: layers of a {config.model_type} are cut in ways that are not done here "
            f"({', '.join(strange)}: fused projections or experts); {remedy}"
        )
        return
    if config.model_type not in TENSOR_PARALLEL:
        known = ", ".join(TENSOR_PARALLEL)
        yield f"{setting}: not tested with model_type {config.model_type}, but with {known}; {remedy}"
        return
    if odd := list(_uneven(config, tp)):
        fitting = [str(size) for size in range(1, _LARGEST + 1) if not any(_uneven(config, size))]
        yield f"{setting}: does not go into the model's {' and '.join(odd)}; set it to {' or '.join(fitting)}"


def _uneven(config: PretrainedConfig, tp: int) -> Iterator[str]:
    """The sizes of a model that `tp` ranks cannot share alike."""
    text = config.get_text_config()
    for name in ("num_attention_heads", "intermediate_size", "vocab_size"):
        if vars(text)[name] % tp:
            yield f"{name} {vars(text)[name]}"
    heads = text.num_key_value_heads
    if heads % tp and tp % heads:
        yield f"num_key_value_heads {heads}, nor is it a multiple of them"


def _pipeline(config: PretrainedConfig, pp: int) -> Iterator[str]:
    layers = config.get_text_config().num_hidden_layers
    if pp > layers:
        yield f"parallelism.pipeline_parallel_size: {pp}: the model has {layers} layers; set it to {layers} or less"


def _context_parallel(config: PretrainedConfig, tp: int, cp: int) -> Iterator[str]:
    if cp == 1:
        return
    setting, text = f"parallelism.context_parallel_size: {cp}", config.get_text_config()
    if config.model_type not in CONTEXT_PARALLEL:
        known = ", ".join(CONTEXT_PARALLEL)
        yield f"{setting}: not tested with model_type {config.model_type}, but with {known}; set it to 1"
        return
    rope = (text.to_dict().get("rope_parameters") or {}).get("rope_type", "default")
    if rope in SEES_LENGTH:
        yield (
            f"{setting}: rotary embeddings of rope_type {rope} change with the longest sequence of a batch, of which a "
            "rank sees a part; set it to 1"
        )
        return
    heads, key_heads = text.num_attention_heads, text.num_key_value_heads
    if heads % tp == 0 and not _goes_into_heads(heads, key_heads, tp, cp):
        fitting = [str(size) for size in range(1, _LARGEST + 1) if _goes_into_heads(heads, key_heads, tp, size)]
        each = f" of a tensor-parallel rank (1/{tp})" if tp > 1 else ""
        yield (
            f"{setting}: does not go into the model's num_attention_heads {heads} and num_key_value_heads {key_heads}"
            f"{each}; set it to {' or '.join(fitting)}"
        )


def _goes_into_heads(heads: int, key_heads: int, tp: int, cp: int) -> bool:
    """Whether the heads of a tensor-parallel rank can be shared out among `cp` ranks, key heads repeated if need be."""
    heads, key_heads = heads // tp, max(1, key_heads // tp)
    return heads % cp == 0 and (key_heads % cp == 0 or cp % key_heads == 0)
