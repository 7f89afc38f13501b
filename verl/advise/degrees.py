"""Whether a role's degrees suit its model and its nodes. Every problem has its place and the sizes that would do."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from verl.advise.job import Job
from verl.advise.model import ModelShape
from verl.mesh.spec import ROLES, RoleSpec, RolloutSpec
from verl.parallel.support import unsupported

_MOST_OFFERED = 8


def spanning(job: Job) -> Iterator[str]:
    """Replicas of the rollout that lie on more than one node, where an engine is one process on all of its devices."""
    placement, spec = job.placements["rollout"], job.spec("rollout")
    if _in_ranks(spec):
        return
    for number, leader in enumerate(placement.leaders):
        ranks = placement.replica(leader)
        nodes = dict.fromkeys(job.node_of[rank] for rank in ranks)
        if len(nodes) > 1:
            devices = ", ".join(job.device(rank) for rank in ranks)
            yield (
                f"{job.mesh.place('rollout.devices')}: rollout.devices: replica {number} ({devices}) lies on "
                f"{len(nodes)} nodes, and an engine runs on one; list the {spec.tensor_parallel_size} devices of each "
                "replica (tensor_parallel_size) one after the other from one node, or lower tensor_parallel_size"
            )


def torn_copies(job: Job) -> Iterator[str]:
    """Roles with several copies of the model, one of which is on more than one node, where a node has room for it."""
    room = max(len(ranks) for ranks in job.nodes.values())
    for role, placement in job.placements.items():
        size = (placement.fsdp_size or 0) * placement.tp
        if role not in job.mesh.roles or placement.copies == 1 or not 1 < size <= room:
            continue
        copies = (placement.ranks[start : start + size] for start in range(0, len(placement.ranks), size))
        torn = next((ranks for ranks in copies if len({job.node_of[rank] for rank in ranks}) > 1), None)
        if torn is not None:
            key = f"{role}.parallelism.fsdp_size"
            yield (
                f"{job.mesh.place(key)}: {key}: {placement.fsdp_size}: a copy of the model lies on several nodes "
                f"({job.devices(torn)}), between which every layer is then gathered; list the {size} devices of each "
                "copy one after the other from one node, or set fsdp_size to what a node has room for"
            )


def unsuitable(job: Job, models: Mapping[str, ModelShape]) -> Iterator[str]:
    """Degrees that do not divide what they split. `models`: by role; a role whose model is not known is left out."""
    for role in ROLES:
        if role in job.placements and role in models:
            model = models[role]
            repeats = role not in job.mesh.roles and "actor" in models and model.name == models["actor"].name
            if not repeats:
                yield from _of_role(job, role, job.spec(role), model)


def _of_role(job: Job, role: str, spec: RoleSpec, model: ModelShape) -> Iterator[str]:
    tp, pp, parts = spec.tensor_parallel_size, spec.pipeline_parallel_size, spec.parallelism.virtual_stages
    if role == "rollout":
        key = "rollout.tensor_parallel_size"
        if _in_ranks(spec):
            for message in unsupported(model.config, tp, pp=1):
                reason = message.partition(": ")[2].partition("; ")[0]
                yield f"{job.mesh.place(key)}: {key}: {reason} ({model.name}); set it to 1, or use backend vllm"
            return
        wrong = list(_unsplit(model, tp))
        if wrong:
            yield (
                f"{job.mesh.place(key)}: {key}: {tp} does not suit {model.name}: {', '.join(wrong)}; "
                f"{_offer(len(job.placements[role].ranks), model)}"
            )
        return
    for message in unsupported(model.config, tp, pp, spec.context_parallel_size):
        setting, _, rest = message.partition(": ")
        key = f"{role}.parallelism.{setting.removeprefix('parallelism.')}"
        yield f"{job.mesh.place(key)}: {key}: {rest} ({model.name})"
    if pp > 1 and model.uncut:
        key = f"{role}.parallelism.pipeline_parallel_size"
        yield f"{job.mesh.place(key)}: {key}: {pp}: {model.uncut}"
    if parts > 1 and pp <= model.num_layers < pp * parts:
        key = f"{role}.parallelism.virtual_stages"
        yield (
            f"{job.mesh.place(key)}: {key}: {pp} stages of {parts} parts for the {model.num_layers} layers of "
            f"{model.name}; set it to {model.num_layers // pp} or less"
        )


def _in_ranks(spec: RoleSpec) -> bool:
    """A rollout in the ranks' own processes, which cuts a model as training does."""
    return isinstance(spec, RolloutSpec) and spec.backend == "torch"


def _unsplit(model: ModelShape, tp: int) -> Iterator[str]:
    """What an engine on `tp` devices cannot share out. It fills an uneven vocabulary up by itself."""
    if model.num_heads % tp:
        yield f"it does not divide {model.num_heads} attention heads"
    if model.num_kv_heads % tp and tp % model.num_kv_heads:
        yield f"it neither divides {model.num_kv_heads} key-value heads nor is a multiple of them"
    if model.intermediate_size % tp:
        yield f"it does not divide the intermediate size {model.intermediate_size}"


def _offer(count: int, model: ModelShape) -> str:
    fits = [size for size in range(1, count + 1) if count % size == 0 and not any(_unsplit(model, size))]
    devices = "1 device" if count == 1 else f"{count} devices"
    return f"with {devices} it may be {', '.join(map(str, fits[:_MOST_OFFERED]))}"
