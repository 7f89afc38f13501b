"""FSDP2 over a role's data-parallel ranks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from verl.model.heads import Head, HeadedModel


def apply_fsdp(
    model: HeadedModel,
    mesh: DeviceMesh,
    compute_dtype: torch.dtype,
    reshard_after_forward: bool,
    offload_parameters: bool = False,
) -> None:
    """Shards the layers one by one, then the rest; a mesh of one rank still gives mixed precision.

    `mesh`: the ranks that share a copy of the model out, or (copies, those ranks). Gradients are summed, not averaged:
    the loss is normalised by the global token count already. Sums are in float32, over a copy's ranks and then over the
    copies, whose gradients and so whose steps are the same bits.
    """
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    offload = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda") if offload_parameters else OffloadPolicy()
    shard = partial(fully_shard, mesh=mesh, offload_policy=offload)
    for layer in decoder_layers(model):
        shard(layer, mp_policy=policy, reshard_after_forward=reshard_after_forward)
    if model.head is not Head.lm and model.ends_with_head:
        in_float32 = MixedPrecisionPolicy(reduce_dtype=torch.float32)
        shard(model.score, mp_policy=in_float32, reshard_after_forward=reshard_after_forward)
    shard(model, mp_policy=policy, reshard_after_forward=reshard_after_forward)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # gloo has no scaled sum, which a divide factor alone would ask for
            module.set_force_sum_reduction_for_comms(True)
            if mesh.size() > 1:
                module.set_gradient_divide_factor(1.0)
            else:  # FSDP would divide even so, into new memory, and then copy
                module.set_custom_reduce_scatter(cast(Any, _OneRank()))


class _OneRank:
    """Of one rank the sum is what goes into it: FSDP copies its input to its output, which here are one tensor."""

    def __init__(self) -> None:
        self._given: Tensor | None = None

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Called for the input, then for the output."""
        if self._given is None:
            self._given = torch.empty(*size, dtype=dtype, device=device)
            return self._given
        given, self._given = self._given, None
        assert given.shape == torch.Size(size) and given.dtype == dtype, "the output of another input"
        return given

    def __call__(self, output_tensor: Tensor, *_: object, **__: object) -> None:
        raise AssertionError("one rank sends nothing")


def decoder_layers(model: HeadedModel) -> list[nn.Module]:
    """Those that are here."""
    layers = model.hf.base_model.get_submodule("layers")
    assert isinstance(layers, nn.ModuleList)
    return [layer for layer in layers if next(layer.parameters(), None) is not None]  # others stand on other stages
