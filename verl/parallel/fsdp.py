"""FSDP2 over a role's data-parallel ranks."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from verl.model.heads import Head, HeadedModel


def apply_fsdp(model: HeadedModel, mesh: DeviceMesh, compute_dtype: torch.dtype, reshard_after_forward: bool) -> None:
    """Shards the layers one by one, then the rest, over the 1-D `mesh`; a mesh of one rank still gives mixed precision.

    Gradients are summed, not averaged: the loss is normalised by the global token count already. Sums are in float32.
    """
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for layer in decoder_layers(model):
        fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard_after_forward)
    if model.head is not Head.lm and model.ends_with_head:
        fully_shard(model.score, mesh=mesh, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard_after_forward)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # gloo has no scaled sum, which a divide factor alone would ask for
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(1.0)


def decoder_layers(model: HeadedModel) -> list[nn.Module]:
    """Those that are here."""
    layers = model.hf.base_model.get_submodule("layers")
    assert isinstance(layers, nn.ModuleList)
    return [layer for layer in layers if next(layer.parameters(), None) is not None]  # others stand on other stages
