"""The tensor-parallel ranks of a model, which share the time between its layers out among them."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

TIME = 1
"""The dimension of [batch, time, hidden] that is shared out (sequence parallelism, Korthikanti et al. 2022)."""


@dataclass(frozen=True)
class Peers:
    """Its methods are collective over the ranks, in the forward pass and in the backward."""

    mesh: DeviceMesh
    """One-dimensional."""

    @property
    def size(self) -> int:
        return self.mesh.size()

    @property
    def rank(self) -> int:
        return self.mesh.get_local_rank()

    @property
    def group(self) -> dist.ProcessGroup:
        return self.mesh.get_group()

    def gather_time(self, states: Tensor, gradients_are_parts: bool = True) -> Tensor:
        """[batch, time / ranks, hidden] -> [batch, time, hidden].

        `gradients_are_parts`: what comes back is each rank's part of a sum (each went on with other weights); else it
        is the same on all ranks.
        """
        shared = DTensor.from_local(states, self.mesh, [Shard(TIME)], run_check=False)
        whole = shared.redistribute(placements=[Replicate()])
        return whole.to_local(grad_placements=[Partial() if gradients_are_parts else Replicate()])

    def sum_and_share_time(self, states: Tensor) -> Tensor:
        """[batch, time, hidden], each rank's part of a sum -> [batch, time / ranks, hidden] of the sum."""
        parts = DTensor.from_local(states, self.mesh, [Partial()], run_check=False)
        return parts.redistribute(placements=[Shard(TIME)]).to_local()
