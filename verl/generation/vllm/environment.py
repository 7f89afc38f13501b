"""The environment variables of an engine process: nothing of torchrun's, the replica's own devices, vLLM's switches."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import verl
from verl.errors import MeshError
from verl.generation.vllm.options import VllmOptions

# torchrun's description of the rank: a vLLM that saw it could take itself for a part of the trainer's process group.
_TORCHRUN = frozenset(
    {
        "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE",
        "ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS",
    }
)  # fmt: skip
_TORCHRUN_PREFIXES = ("TORCHELASTIC_", "PET_")

# In whole GiB, it would override the size of the KV cache that the engine is given in bytes.
_OVERRIDES = frozenset({"VLLM_CPU_KVCACHE_SPACE"})

_VLLM = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the scheduler in the engine process itself, not in one more
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # the engine process has threads, which a fork would lose
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # cores are shared with the trainer's ranks
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_HOST_IP": "127.0.0.1",  # all of a replica is on one machine
    "PYTHONUNBUFFERED": "1",
    "PYTHONSAFEPATH": "1",  # a file of the user's working directory does not shadow a module
}


def child_environment(parent: Mapping[str, str], options: VllmOptions) -> dict[str, str]:
    """What an engine process gets, where its rank has `parent`."""
    environment = {
        name: value
        for name, value in parent.items()
        if name not in _TORCHRUN and name not in _OVERRIDES and not name.startswith(_TORCHRUN_PREFIXES)
    }
    package_root = str(Path(verl.__file__).parents[1])
    inherited = parent.get("PYTHONPATH")
    environment |= _VLLM
    environment["PYTHONPATH"] = f"{package_root}{os.pathsep}{inherited}" if inherited else package_root
    environment["OMP_NUM_THREADS"] = str(options.threads)
    if options.devices:
        environment["CUDA_VISIBLE_DEVICES"] = visible_devices(options.devices, parent.get("CUDA_VISIBLE_DEVICES"))
    elif options.eager_on_cpu:
        # What vLLM compiles even then, two small helpers of its sampler, costs half a minute and a C++ compiler.
        environment["TORCHDYNAMO_DISABLE"] = "1"
    return environment


def visible_devices(devices: Sequence[int], inherited: str | None) -> str:
    """CUDA_VISIBLE_DEVICES for a process that is to see `devices`, which are indices into what this process sees.

    `inherited` is this process's own value: integers, or UUIDs (GPU-..., MIG-...), which are kept as they are. None:
    it sees all devices under their own numbers.
    """
    if inherited is None:
        return ",".join(str(device) for device in devices)
    visible = [entry.strip() for entry in inherited.split(",") if entry.strip()]
    if "-1" in visible:  # to CUDA the list ends at the first invalid entry
        visible = visible[: visible.index("-1")]
    missing = [device for device in devices if not 0 <= device < len(visible)]
    if missing:
        raise MeshError(
            f"rollout.devices names device {missing[0]}, but CUDA_VISIBLE_DEVICES={inherited!r} shows this process "
            f"{len(visible)} devices. Use indices below {len(visible)}, or start torchrun with more devices visible."
        )
    return ",".join(visible[device] for device in devices)
