"""From the ranks of a mesh's roles to their placements. Pure, so that what is said of a mesh is what a run does."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from verl.flow.placement import Placement
from verl.mesh.spec import MeshSpec


def place_roles(mesh: MeshSpec, ranks: Mapping[str, tuple[int, ...]], absent: Collection[str]) -> dict[str, Placement]:
    """The placement of every role that a run builds.

    Args:
        mesh: the degrees; a role that it does not name has the actor's.
        ranks: of each role, as `verl.mesh.resolve.resolve` gives them.
        absent: roles that the run's algorithm does without.
    Returns:
        Placements by role. `reward` is on the rollout's leaders where the mesh does not name it.
    """
    placements: dict[str, Placement] = {}
    for role, listed in ranks.items():
        if role not in absent:
            spec = mesh.roles.get(role, mesh.roles["actor"])
            leaders_only = role == "rollout"
            pp = 1 if leaders_only else spec.pipeline_parallel_size
            placements[role] = Placement(role, listed, spec.tensor_parallel_size, pp, leaders_only)
    placements.setdefault("reward", Placement("reward", placements["rollout"].leaders))
    return placements
