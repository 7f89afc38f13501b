"""From the ranks of a mesh's roles to their placements. Pure, so that what is said of a mesh is what a run does."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from verl.config import PPOConfig
from verl.flow.placement import Placement
from verl.flow.regroup import generation_order
from verl.mesh.spec import MeshSpec, RolloutSpec


def reference_is_actor(config: PPOConfig, mesh: MeshSpec, placements: Mapping[str, Placement]) -> bool:
    """Whether the reference is the actor without its adapters, and has no model of its own: the actor trains adapters,
    and both are of one model, on the same ranks, split alike and in one dtype.
    """
    if not config.actor.lora.rank or "reference" not in placements:
        return False
    if config.reference.path not in (None, config.model.path):
        return False
    actor, reference = placements["actor"], placements["reference"]
    dtype = mesh.roles.get("reference", mesh.roles["actor"]).dtype
    return replace(reference, role="actor") == actor and dtype == mesh.roles["actor"].dtype


def place_roles(mesh: MeshSpec, ranks: Mapping[str, tuple[int, ...]], absent: Collection[str]) -> dict[str, Placement]:
    """The placement of every role that a run builds.

    Args:
        mesh: the degrees; a role that it does not name has the actor's.
        ranks: of each role, as `verl.mesh.resolve.resolve` gives them.
        absent: roles that the run's algorithm does without.
    Returns:
        Placements by role. `reward` is on the rollout's leaders where the mesh does not name it. A rollout with
        `backend: torch` on the actor's devices, listed alike, forms its replicas as `verl.flow.regroup` says.
    """
    placements: dict[str, Placement] = {}
    for role, listed in ranks.items():
        if role not in absent:
            spec = mesh.roles.get(role, mesh.roles["actor"])
            leaders_only = role == "rollout"
            pp = 1 if leaders_only else spec.pipeline_parallel_size
            copy, cp = spec.parallelism.fsdp_size, spec.context_parallel_size
            placements[role] = Placement(role, listed, spec.tensor_parallel_size, pp, leaders_only, copy, cp)
    rollout, actor, spec = placements["rollout"], placements["actor"], mesh.roles["rollout"]
    if isinstance(spec, RolloutSpec) and spec.backend == "torch" and rollout.ranks == actor.ranks:
        placements["rollout"] = replace(rollout, ranks=generation_order(actor, rollout.tp))
    placements.setdefault("reward", Placement("reward", placements["rollout"].leaders))
    return placements
