"""How a role's model is split: one technique after the other, in the order that they need."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from verl.model.heads import HeadedModel
from verl.parallel.context import apply_context_parallelism
from verl.parallel.fsdp import apply_fsdp
from verl.parallel.tensor import apply_tensor_parallelism


@dataclass(frozen=True)
class ParallelPlan:
    compute_dtype: torch.dtype
    reshard_after_forward: bool
    """Free gathered parameters after each forward and gather them again in backward: less memory, more messages."""
    activation_checkpointing: bool
    offload_parameters: bool = False
    """Shards, their gradients and so the optimizer are in host memory; a layer is on the device while it computes."""


def parallelize(
    model: HeadedModel, mesh: DeviceMesh, plan: ParallelPlan, context: dist.ProcessGroup | None = None
) -> None:
    """Splits a model on the meta device over `mesh`, as `verl.flow.placement` makes it. Shards have no memory yet.

    `context`: those of the mesh's shards that share out the time of this rank's rows.
    """
    if mesh["tp"].size() > 1:
        apply_tensor_parallelism(model, mesh["tp"])
    if context is not None:
        apply_context_parallelism(model, context)
    if plan.activation_checkpointing:
        # before FSDP, whose hooks must run inside the recomputation
        model.hf.gradient_checkpointing_enable({"use_reentrant": False})
    assert mesh.mesh_dim_names is not None
    shards = mesh["copies", "shards"] if "copies" in mesh.mesh_dim_names else mesh["shards"]
    apply_fsdp(model, shards, plan.compute_dtype, plan.reshard_after_forward, plan.offload_parameters)
