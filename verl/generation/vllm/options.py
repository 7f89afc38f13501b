"""How a replica's engine is set up, and the arguments of vllm.LLM that this makes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from verl.errors import MeshError

CPU_KV_CACHE_BYTES = 512 * 2**20
"""KV cache of a replica on the CPU. vLLM's own default is a share of the machine's whole memory, in every replica."""

NOT_ON_CPU = ("fp8", "fp8_per_tensor")
"""Quantisations of vLLM that end its CPU build (0.32) with an operator that is not there (static_scaled_fp8_quant)."""


@dataclass(frozen=True, kw_only=True)
class VllmOptions:
    model_path: str
    """Hugging Face folder. Its config is read, its weights are not: they come by `VllmEngine.load`."""
    dtype: str
    """bfloat16, float16 or float32."""
    max_model_len: int
    """Longest prompt and response together, in tokens."""
    max_num_seqs: int
    """Sequences generated at once."""
    tensor_parallel_size: int = 1
    """Devices that split each layer; on the CPU processes."""
    enable_prefix_caching: bool = True
    """Share the KV cache of common prefixes."""
    engine_kwargs: dict[str, Any] = field(default_factory=dict)
    """rollout.engine_kwargs of the device mesh: further arguments of vllm.LLM."""
    devices: tuple[int, ...] = ()
    """The replica's devices, as indices into what this process sees. Empty: the CPU."""
    shares_devices: bool = False
    """The trainer uses the same devices: vLLM's sleep mode is switched on, which frees the memory in between."""
    threads: int = 1
    """OpenMP threads of each worker. More pay only where the cores are free while it generates: threads that wait for
    one another spin, and on cores that others use two were ten times slower than one."""
    seed: int = 0
    """vLLM's own seed. Samples do not depend on it: every request brings its own."""
    trust_remote_code: bool = False

    @property
    def eager_on_cpu(self) -> bool:
        return not self.devices and self.engine_kwargs.get("enforce_eager", True)


def llm_arguments(options: VllmOptions, weight_transfer: str | None = None) -> dict[str, Any]:
    """Arguments of vllm.LLM: the options, what this package relies on, and defaults that engine_kwargs may change.

    `weight_transfer`: vLLM's own one that is used, "ipc" or "nccl".
    """
    on_cpu = not options.devices
    fixed: dict[str, Any] = {
        "model": options.model_path,
        "dtype": options.dtype,
        "max_model_len": options.max_model_len,
        "max_num_seqs": options.max_num_seqs,
        "tensor_parallel_size": options.tensor_parallel_size,
        "distributed_executor_backend": "mp" if options.tensor_parallel_size > 1 else "uni",
        "enable_prefix_caching": options.enable_prefix_caching,
        "seed": options.seed,
        "trust_remote_code": options.trust_remote_code,
        "enable_sleep_mode": options.shares_devices and not on_cpu,
        "skip_tokenizer_init": True,
        "generation_config": "vllm",  # no sampling settings or stop tokens from the model's folder
        "logprobs_mode": "processed_logprobs",  # of the distribution that is drawn from: with temperature, top_k, top_p
        "worker_extension_cls": "verl.generation.vllm.worker.WeightLoader",
    }
    if weight_transfer is not None:
        fixed["weight_transfer_config"] = {"backend": weight_transfer}
    if on_cpu:
        # Where a prompt is read in two steps, vLLM takes back what the first one drew from the request's generator,
        # which a generator on the CPU cannot do: it raises.
        fixed["enable_chunked_prefill"] = False
    taken = sorted(fixed.keys() & options.engine_kwargs.keys())
    if taken:
        raise MeshError(
            f"rollout.engine_kwargs sets {', '.join(taken)}, which other settings decide or verl relies on. "
            "Remove it there and use the setting of its own in the device mesh (rollout) or the model section."
        )
    quantization = options.engine_kwargs.get("quantization")
    if on_cpu and quantization in NOT_ON_CPU:
        raise MeshError(
            f"rollout.engine_kwargs.quantization is {quantization}, and vLLM's CPU build has no kernel that makes such "
            "weights. Take it out of the device mesh, or give the rollout GPUs."
        )
    defaults: dict[str, Any] = {"load_format": "dummy", "disable_log_stats": True}
    if on_cpu:
        defaults |= {"enforce_eager": True, "kv_cache_memory_bytes": CPU_KV_CACHE_BYTES}
    elif options.shares_devices and "kv_cache_memory_bytes" not in options.engine_kwargs:
        raise MeshError(
            "The rollout shares its devices with another role, so vLLM cannot take a share of the memory that it finds "
            "free at start. Set rollout.engine_kwargs.kv_cache_memory_bytes in the device mesh."
        )
    return defaults | options.engine_kwargs | fixed
