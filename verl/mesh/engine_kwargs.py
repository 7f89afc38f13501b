"""`rollout.engine_kwargs`: arguments of vllm.LLM that pass through, less those that are not the user's to set."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from verl.mesh.devices import Complain
from verl.mesh.document import Node

REPLICAS = "take it out: a replica of the rollout is tensor_parallel_size devices, and further devices are replicas"

_PATH = "rollout.engine_kwargs"
_SET_BY_VERL = "take it out: verl sets it"
_REFUSED = {
    "model": "take it out: the actor's model generates",
    "max_model_len": "take it out: it is data.max_prompt_length + data.max_response_length",
    "seed": "take it out: trainer.seed decides what is drawn",
    "trust_remote_code": "write it under model in the settings",
    "tensor_parallel_size": "write it directly under rollout",
    "max_num_seqs": "write it directly under rollout",
    "enable_prefix_caching": "write it directly under rollout",
    "dtype": "write it directly under rollout",
    "pipeline_parallel_size": REPLICAS,
    "data_parallel_size": REPLICAS,
    "distributed_executor_backend": _SET_BY_VERL,
    "enable_sleep_mode": _SET_BY_VERL,
    "skip_tokenizer_init": _SET_BY_VERL,
    "generation_config": _SET_BY_VERL,
    "logprobs_mode": _SET_BY_VERL,
    "worker_extension_cls": _SET_BY_VERL,
}


def read_engine_kwargs(entries: Mapping[str, Node], complain: Complain) -> dict[str, Any]:
    """The rollout's `engine_kwargs` as plain data. The values are vLLM's to judge, but for the two that memory is
    planned by.
    """
    node = entries.get("engine_kwargs")
    if node is None:
        return {}
    if not isinstance(node.value, dict):
        complain(node, _PATH, f"needs keys and values, got {node}")
        return {}
    for key in [key for key in node.value if key in _REFUSED]:
        complain(node.value[key], f"{_PATH}.{key}", f"not here; {_REFUSED[key]}")
    cache, share = (node.value.get(key) for key in ("kv_cache_memory_bytes", "gpu_memory_utilization"))
    if cache is not None and not (type(cache.value) is int and cache.value > 0):  # type(): a bool is an int
        what = f"needs a whole number of bytes, such as 12884901888 (12 GiB), got {cache}"
        complain(cache, f"{_PATH}.kv_cache_memory_bytes", what)
    part = None if share is None or isinstance(share.value, bool) else share.value
    if share is not None and not (isinstance(part, int | float) and 0 < part <= 1):
        what = f"needs a part of the device's memory, such as 0.9, got {share}"
        complain(share, f"{_PATH}.gpu_memory_utilization", what)
    return node.plain()
