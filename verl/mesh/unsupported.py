"""What a mesh may say and the engine cannot do yet. This file goes when it can."""

from __future__ import annotations

from verl.errors import MeshError
from verl.mesh.spec import MeshSpec


def refuse_unsupported(spec: MeshSpec) -> None:
    """Raises MeshError where a role other than the rollout is split by tensor or pipeline parallelism."""
    problems = [
        f"{spec.source}: {role}.parallelism.{key}: {size} is not supported yet outside the rollout; set it to 1, "
        "and let fsdp: true spread the model over the role's devices"
        for role, entry in spec.roles.items()
        if role != "rollout"
        for key, size in (
            ("tensor_parallel_size", entry.tensor_parallel_size),
            ("pipeline_parallel_size", entry.pipeline_parallel_size),
        )
        if size > 1
    ]
    if problems:
        raise MeshError(*problems)
