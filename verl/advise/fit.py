"""Whether what each device would hold is there, and what helps where it is not."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from verl.advise import memory
from verl.advise.budget import ITEMSIZE, TRAINED, Budget, longest, runs_vllm
from verl.advise.job import Job
from verl.advise.model import ModelShape
from verl.config import PPOConfig
from verl.mesh.spec import RolloutSpec

GIB = 1 << 30
TIGHT = 0.92
"""Part of a device beyond which an estimate and a fragmented allocator leave little room."""
CACHE = "KV cache"
CACHE_SETTING = "kv_cache_memory_bytes"
_LARGER_REPLICA = "raise rollout.tensor_parallel_size, so that a replica has more devices"


def too_large(job: Job, found: Sequence[Budget], device_memory: int) -> Iterator[str]:
    """Devices that would need more than there is."""
    alike: dict[tuple[str, str, str], list[Budget]] = {}
    for budget in found:
        if budget.peak > device_memory:
            role = max(budget.needs, key=lambda role: budget.needs[role].total)
            remedy = _remedy(job, budget, role, device_memory)
            alike.setdefault((role, gib(budget.peak), remedy), []).append(budget)
    for (role, peak, remedy), budgets in alike.items():
        where = job.devices(sorted(rank for budget in budgets for rank in budget.ranks))
        terms = sorted(budgets[0].terms(), key=lambda term: -term[1])
        yield (
            f"{job.mesh.place(f'{role}.devices')}: {role}.devices: {where} would need {peak} of {gib(device_memory)} "
            f"GiB ({', '.join(f'{name} {gib(size)}' for name, size in terms)}); {remedy}"
        )


def tight(job: Job, found: Sequence[Budget], device_memory: int) -> Iterator[str]:
    """Devices that would be nearly full. vLLM alone fills what it finds, which says nothing."""
    for budget in found:
        if TIGHT * device_memory < budget.peak <= device_memory and set(budget.needs) != {"rollout"}:
            yield (
                f"{job.mesh.source}: {job.devices(budget.ranks)} would need {gib(budget.peak)} of {gib(device_memory)} "
                "GiB, which is tight: this is an estimate, and memory fragments"
            )


def unsized_cache(job: Job, found: Sequence[Budget], device_memory: int | None) -> Iterator[str]:
    """A shared vLLM engine whose cache has no size: vLLM cannot find out by itself what the others will take."""
    spec = job.spec("rollout")
    sharing = [budget for budget in found if budget.shares]
    if not sharing or not isinstance(spec, RolloutSpec) or CACHE_SETTING in spec.engine_kwargs:
        return
    what = (
        f"{job.mesh.place('rollout')}: rollout: vLLM shares devices with other roles, so it cannot take what it finds "
        f"free when it starts; set rollout.engine_kwargs.{CACHE_SETTING}"
    )
    if device_memory is None:
        yield f"{what} (--device-memory GIB tells how much fits)"
        return
    left = min(_left_for_cache(budget, device_memory) for budget in sharing)
    alone = min(_left_for_cache(replace(budget, leave=True), device_memory) for budget in sharing)
    if left >= GIB:
        yield f"{what}: {left // GIB * GIB} ({left // GIB} GiB) is the most that fits"
    elif alone >= GIB:
        yield (
            f"{what}. Beside the other roles nothing is left for it; with rollout.offload_trainers=true "
            f"{alone // GIB * GIB} ({alone // GIB} GiB) is the most that fits"
        )
    else:
        yield f"{what}. Beside the other roles nothing is left for it, so give some role more devices, too"


def small_cache(
    job: Job, found: Sequence[Budget], models: Mapping[str, ModelShape], config: PPOConfig
) -> Iterator[str]:
    """Engines whose cache does not hold one sequence of full length."""
    engines = [budget for budget in found if "rollout" in budget.needs]
    if not engines or not runs_vllm(job):
        return
    spec = job.spec("rollout")
    token = memory.cache_bytes(models["rollout"], spec.tensor_parallel_size, ITEMSIZE[spec.dtype])
    budget = min(engines, key=lambda budget: budget.needs["rollout"].term(CACHE))
    room = budget.needs["rollout"].term(CACHE) // token
    if room < longest(config):
        yield (
            f"{job.mesh.place('rollout')}: rollout: on {job.devices(budget.ranks)} the key-value cache has room for "
            f"{room} tokens, and one sequence has up to {longest(config)} (data.max_prompt_length + "
            f"max_response_length); raise tensor_parallel_size, or engine_kwargs.{CACHE_SETTING} where it is set"
        )


def gib(size: int) -> str:
    return f"{size / GIB:.1f}"


def _left_for_cache(budget: Budget, device_memory: int) -> int:
    """Bytes of a shared device that its engine's cache may have."""
    engine = budget.needs["rollout"]
    return device_memory - budget.beside("rollout") - (sum(engine.at_work.values()) - engine.at_work[CACHE])


def _remedy(job: Job, budget: Budget, role: str, device_memory: int) -> str:
    """The change that helps most, as far as it can be told."""
    worker = budget.worker
    if worker == "rollout":
        remedies = []
        left = _left_for_cache(budget, device_memory) if budget.shares else 0
        if left >= GIB:
            remedies.append(
                f"lower rollout.engine_kwargs.{CACHE_SETTING} to {left // GIB * GIB} ({left // GIB} GiB) or less"
            )
        moved = budget.beside("rollout") - replace(budget, leave=True).beside("rollout")
        if moved and replace(budget, leave=True).peak <= device_memory:
            remedies.append(
                f"set rollout.offload_trainers=true, so that {gib(moved)} GiB of the others leave meanwhile"
            )
        if remedies:
            return ", or ".join(remedies)
    if worker in TRAINED:
        saved = budget.needs[worker].at_work.get("activations", 0)
        if not job.spec(worker).hybrid_engine.activation_checkpointing and budget.peak - saved < device_memory:
            return f"set {worker}.hybrid_engine.activation_checkpointing: true, which saves most of {gib(saved)} GiB"
    if role == "rollout" and budget.needs[role].term("weights") >= device_memory:
        return _LARGER_REPLICA  # on more devices or other ones they would be no less
    if len(budget.needs) > 1:
        smallest = min(budget.needs, key=lambda name: budget.needs[name].total)
        return f"give {role} more devices, or put it and {smallest} on devices of their own"
    if role == "rollout":
        share = math.floor(100 * (1 - memory.PROCESS_BYTES / device_memory)) / 100
        if 0 < share < memory.engine_share(job.spec("rollout")):
            return f"set rollout.engine_kwargs.gpu_memory_utilization to {share:g}, which leaves the rank its own part"
        return _LARGER_REPLICA
    return f"give {role} more devices, or lower {role}'s max_tokens_per_micro_batch"
