"""How a role's model is split: one technique after the other, in the order that they need."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh

from verl.model.heads import HeadedModel
from verl.parallel.fsdp import apply_fsdp
from verl.parallel.tensor import apply_tensor_parallelism


@dataclass(frozen=True)
class ParallelPlan:
    compute_dtype: torch.dtype
    reshard_after_forward: bool
    """Free gathered parameters after each forward and gather them again in backward: less memory, more messages."""
    activation_checkpointing: bool


def parallelize(model: HeadedModel, mesh: DeviceMesh, plan: ParallelPlan) -> None:
    """Splits a model on the meta device over `mesh` (pp, dp, tp). Its shards have no memory yet."""
    if mesh["tp"].size() > 1:
        apply_tensor_parallelism(model, mesh["tp"])
    if plan.activation_checkpointing:
        # before FSDP, whose hooks must run inside the recomputation
        model.hf.gradient_checkpointing_enable({"use_reentrant": False})
    apply_fsdp(model, mesh["dp"], plan.compute_dtype, plan.reshard_after_forward)
