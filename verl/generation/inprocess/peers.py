"""The ranks that generate together, each with a part of every layer: all run the same requests in the same order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

_LEADER = 0
"""By number in the group."""


@dataclass(frozen=True)
class Peers:
    """Its methods are collective over the ranks of one replica."""

    group: dist.ProcessGroup
    """In the replica's order: rank i has part i of what is cut."""

    @property
    def size(self) -> int:
        return self.group.size()

    @property
    def number(self) -> int:
        """Of this rank."""
        return self.group.rank()

    def sum(self, part: Tensor) -> Tensor:
        """Of all ranks' parts, in the memory of this one's."""
        dist.all_reduce(part, group=self.group)
        return part

    def draw(self, part: Tensor, draw: Callable[[Tensor], tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """What the leader draws, on every rank: devices may round sums differently, and ranks that went on with
        different tokens would wait for each other for ever.

        Args:
            part: logits [B, V / ranks].
            draw: ids [B] and log-probs [B] of logits [B, V].
        """
        leads = self.number == _LEADER
        parts = [torch.empty_like(part) for _ in range(self.size)] if leads else None
        dist.gather(part.contiguous(), parts, group=self.group, group_dst=_LEADER)
        drawn = torch.empty(2, len(part), dtype=torch.float64, device=part.device)  # holds ids up to 2^53 exactly
        if parts is not None:
            ids, logprobs = draw(torch.cat(parts, dim=-1))
            drawn[0], drawn[1] = ids, logprobs
        dist.broadcast(drawn, group=self.group, group_src=_LEADER)
        return drawn[0].long(), drawn[1].float()
