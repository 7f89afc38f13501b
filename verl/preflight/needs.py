"""What the roles of a run need of each node, held against what there is. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from verl.config import PPOConfig
from verl.errors import MeshError
from verl.flow.place import place_roles, reference_is_actor
from verl.generation.residency import sharing
from verl.mesh.resolve import resolve
from verl.mesh.spec import MeshSpec, RoleSpec, RolloutSpec
from verl.preflight.compare import Problem, node_names
from verl.preflight.facts import Facts
from verl.preflight.files import ModelSize
from verl.reshard.buckets import SLOTS

MIB, GIB = 1 << 20, 1 << 30
NCCL_SHM = 32 * MIB
"""Of /dev/shm, for each process of a node that speaks with its neighbours by NCCL."""
VLLM_SHM = 64 * MIB
"""Of /dev/shm, for each process of a vLLM replica that is split over GPUs: rings of messages, and NCCL's buffers."""
VLLM_THREAD_SHM = 5 * MIB
"""The same on a CPU, where each thread of such a process has a buffer of its own for activations (4.2 MiB measured)."""
LEARNING_BYTES = 16
"""A parameter that learns: float32 weight, gradient, and AdamW's two moments."""
MOMENT_BYTES = 8
"""Of these the moments."""
COPY_BYTES = 12
"""All of it but the gradient: what there is between two steps, and so what a copy of a role has."""
KV_BYTES = 512 * MIB
"""KV cache of a vLLM replica on a CPU, where engine_kwargs.kv_cache_memory_bytes does not say it."""
_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, None: 2}
_LEARNING = ("actor", "critic")


def shortages(facts: Sequence[Facts], config: PPOConfig, mesh: MeshSpec) -> list[Problem]:
    """Nodes whose /dev/shm or memory is too small for what the mesh puts there, and engines that no node can hold.

    Counts only what is sure to be needed: a node that passes may still run out. A mesh that these ranks cannot hold is
    not this function's business.
    """
    try:
        ranks = resolve(mesh, [f.process for f in facts])
    except MeshError:
        return []
    return [*_torn(facts, mesh, ranks), *_shm(facts, config, mesh, ranks), *_memory(facts, config, mesh, ranks)]


def _torn(facts: Sequence[Facts], mesh: MeshSpec, ranks: Mapping[str, Sequence[int]]) -> Iterator[Problem]:
    """Replicas of the rollout that lie on several nodes: an engine is one process and its workers, on one node."""
    names, node_of, tp = node_names(facts), {f.rank: f.node for f in facts}, mesh.roles["rollout"].tensor_parallel_size
    for start in range(0, len(ranks["rollout"]), tp):
        replica = ranks["rollout"][start : start + tp]
        nodes = [names[node] for node in dict.fromkeys(node_of[rank] for rank in replica)]
        if len(nodes) > 1:
            yield Problem(
                nodes[0],
                tuple(sorted(replica)),
                "rollout.devices",
                f"replica {start // tp} lies on {' and '.join(nodes)}",
                "one node for a replica",
                f"list the {tp} devices of each replica one after the other, from one node, or lower its degree",
            )


def _shm(
    facts: Sequence[Facts], config: PPOConfig, mesh: MeshSpec, ranks: Mapping[str, Sequence[int]]
) -> Iterator[Problem]:
    for node, name in node_names(facts).items():
        here = _on(node, facts)
        users = []
        neighbours = sum(bool(f.accelerators) for f in here)
        if neighbours > 1:
            users.append((neighbours * NCCL_SHM, f"NCCL among {neighbours} processes"))
        engines = _split_engines(here, config, mesh, ranks)
        if engines:
            users.append((engines, f"vLLM with tensor_parallel_size {mesh.roles['rollout'].tensor_parallel_size}"))
        need, there = sum(size for size, _ in users), here[0].memory
        if need > there.shm_free:
            yield Problem(
                name,
                tuple(f.rank for f in here),
                "/dev/shm",
                f"{_size(there.shm_free)} free of {_size(there.shm_size)}",
                f"{_size(need)}: {' and '.join(user for _, user in users)}",
                f"on {name}: {_shm_remedy(need, there.shm_size)}",
            )


def _split_engines(here: Sequence[Facts], config: PPOConfig, mesh: MeshSpec, ranks: Mapping[str, Sequence[int]]) -> int:
    """Bytes of /dev/shm that the replicas on this node take which are split over several processes."""
    rollout = mesh.roles["rollout"]
    assert isinstance(rollout, RolloutSpec)
    workers = len({f.rank for f in here} & set(ranks["rollout"]))
    if rollout.tensor_parallel_size == 1 or rollout.backend == "torch":
        return 0
    if here[0].accelerators:
        return workers * VLLM_SHM
    threads = config.rollout.cpu_threads or max(1, here[0].cores // max(1, workers))
    return workers * threads * VLLM_THREAD_SHM


def _shm_remedy(need: int, size: int) -> str:
    if size >= need:
        return "remove what earlier runs have left in /dev/shm"
    return (
        f"start the container with --shm-size={max(1, -(-need // GIB))}g, or in Kubernetes mount an "
        "emptyDir: {medium: Memory} at /dev/shm"
    )


def _memory(
    facts: Sequence[Facts], config: PPOConfig, mesh: MeshSpec, ranks: Mapping[str, tuple[int, ...]]
) -> Iterator[Problem]:
    sizes = {role: size for f in facts for role, size in f.models.items()}
    for node, name in node_names(facts).items():
        here = _on(node, facts)
        there = here[0].memory
        parts = dict(_parts(here, config, mesh, ranks, sizes))
        need = sum(parts.values())
        if need > there.available:
            limited = there.left is not None and there.left <= there.free
            limit = f"of the container's limit of {_size(there.limit or 0)}" if limited else "on the machine"
            yield Problem(
                name,
                tuple(f.rank for f in here),
                "memory",
                f"{_size(there.available)} left {limit}",
                f"{_size(need)}: " + ", ".join(f"{what} {_size(size)}" for what, size in parts.items()),
                f"give {name} more memory" + (" (--memory, resources.limits.memory)" if limited else "")
                + ", or put fewer roles on it in the device mesh",
            )  # fmt: skip


def _parts(
    here: Sequence[Facts],
    config: PPOConfig,
    mesh: MeshSpec,
    ranks: Mapping[str, tuple[int, ...]],
    sizes: Mapping[str, ModelSize],
) -> Iterator[tuple[str, int]]:
    """What takes this node's memory -> bytes. With accelerators the training state is on them, unless offloaded."""
    mine = {f.rank for f in here}
    on_cpu = not any(f.accelerators for f in here)
    # adapters themselves are not counted: they are few
    frozen = {role for role, of in (("actor", config.actor), ("critic", config.critic)) if of.lora.rank}
    placements = place_roles(mesh, ranks, ())
    one_model = reference_is_actor(config, mesh, placements)
    modelled = [placements[role] for role in sizes if role in ranks and role != "rollout" and _is_built(role, config)]
    shared = {rank for rank in ranks["rollout"] if sharing(placements["rollout"], modelled, rank) is not None}
    for role, serving in ranks.items():
        spec, share = mesh.roles.get(role, mesh.roles["actor"]), len(mine & set(serving)) / len(serving)
        if isinstance(spec, RolloutSpec) and spec.backend == "vllm" and share and "actor" in sizes:
            size, each = sizes["actor"], _DTYPE_BYTES[spec.dtype]
            weights = size.parameters * each
            bucket = max(config.rollout.reshard_bucket_mib * MIB, size.largest * each)
            if config.rollout.weight_transfer == "node_memory":
                yield "weights under way", min(SLOTS * bucket, weights)
            if on_cpu:
                replicas = share * len(serving) / spec.tensor_parallel_size
                kv = spec.engine_kwargs.get("kv_cache_memory_bytes", KV_BYTES)
                yield "vLLM", int(replicas * weights + replicas * spec.tensor_parallel_size * kv)
        elif one_model and role == "reference":
            continue
        elif role in sizes and share and _is_built(role, config):
            learns = role in _LEARNING and role not in frozen
            each = _host_bytes(learns, spec, on_cpu)
            spread = len(serving) // (spec.tensor_parallel_size * spec.pipeline_parallel_size)
            here_of = spread // (spec.parallelism.fsdp_size or spread) * sizes[role].parameters * share
            if each:
                yield role, int(here_of * each)
            if learns and config.trainer.async_save:
                yield f"checkpoint copy of {role}", int(here_of * COPY_BYTES)
            leaving = len(mine & shared & set(serving)) / len(mine & set(serving))
            each = _leaving_bytes(learns, spec)
            if config.rollout.offload_trainers and not on_cpu and leaving and each:
                yield f"{role} while the rollout works", int(here_of * leaving * each)


def _host_bytes(learns: bool, spec: RoleSpec, on_cpu: bool) -> int:
    """Of a parameter, in the memory of the node that has it."""
    if on_cpu or spec.hybrid_engine.offload_parameters:
        return LEARNING_BYTES if learns else _DTYPE_BYTES[spec.dtype]
    return MOMENT_BYTES if learns and spec.hybrid_engine.offload_optimizer else 0


def _leaving_bytes(learns: bool, spec: RoleSpec) -> int:
    """Of a parameter, what is on a device between two steps."""
    if spec.hybrid_engine.offload_parameters:
        return 0
    if not learns:
        return _DTYPE_BYTES[spec.dtype]
    return COPY_BYTES - (MOMENT_BYTES if spec.hybrid_engine.offload_optimizer else 0)


def _is_built(role: str, config: PPOConfig) -> bool:
    return {"critic": config.needs_critic, "reference": config.needs_reference}.get(role, True)


def _on(node: int, facts: Sequence[Facts]) -> list[Facts]:
    return sorted((f for f in facts if f.node == node), key=lambda f: f.rank)


def _size(size: int) -> str:
    return f"{size / GIB:.1f} GiB" if size >= GIB else f"{size / MIB:.0f} MiB"
