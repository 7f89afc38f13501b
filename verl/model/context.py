"""The context-parallel ranks of a model, which share the time of every row out through the whole of it.

DeepSpeed-Ulysses (Jacobs et al. 2023, arXiv:2309.14509): what is computed token by token, each rank computes for its
part of the time. Attention, which looks at whole rows, is shared out by heads instead: an all-to-all in front of it
turns [time / ranks, all heads] into [all time, heads / ranks], and one behind it turns that back. Any kernel for
attention runs in between, on whole rows and their masks.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import AttentionInterface, PretrainedConfig

CONTEXT_ATTENTION = "context_parallel"
"""Its name in transformers: the `attn_implementation` of attention layers alone, the model keeps the kernel's."""


@dataclass(frozen=True)
class Context:
    """Its methods are collective over the ranks, in the forward pass and in the backward."""

    group: dist.ProcessGroup
    """The ranks in the order of their parts of the time."""

    @property
    def size(self) -> int:
        return self.group.size()

    @property
    def rank(self) -> int:
        return dist.get_rank(self.group)

    def share_heads(self, *states: Tensor) -> tuple[Tensor, ...]:
        """Queries, keys and values, [batch, heads, time / ranks, dim] each -> [batch, heads / ranks, time, dim].

        Of fewer heads than ranks each goes to neighbours, whose gradients of it add up.
        """
        states = tuple(x.repeat_interleave(max(1, self.size // x.shape[1]), 1) for x in states)
        sizes = [x.shape[1] // self.size for x in states]
        of_ranks = zip(*(x.chunk(self.size, 1) for x in states), strict=True)
        return self._exchange([torch.cat(parts, 1) for parts in of_ranks], 2).split(sizes, 1)

    def share_time(self, out: Tensor) -> Tensor:
        """What attention gives, [batch, time, heads / ranks, dim] -> [batch, time / ranks, heads, dim]."""
        return self._exchange(out.chunk(self.size, 1), 2)

    def all_outputs(self, here: Tensor, places: Tensor, count: int) -> Tensor:
        """[n, k] of this rank's part of the time -> [n, count] of all parts, the same bits on all ranks.

        `places` [k]: where the k stand. All ranks go on with the same computation, each for its own gradient.
        """
        return _AllOutputs.apply(here, places, count, self.group)  # type: ignore[return-value]

    def _exchange(self, shares: Sequence[Tensor], dim: int) -> Tensor:
        """Share i goes to rank i. What comes from all ranks, in their order along `dim`."""
        received: Tensor = _AllToAll.apply(torch.stack(tuple(shares)), self.group)  # type: ignore[assignment]
        return torch.cat(received.unbind(), dim)


@dataclass(frozen=True)
class WholeRows:
    """What attention must know and a rank's part of the time does not say."""

    context: Context
    config: PretrainedConfig
    """The model's, with the kernel's name."""
    position_ids: Tensor
    """[batch, time]"""


def context_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    whole_rows: WholeRows,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """As transformers calls it. `query`, `key`, `value` are of this rank's part of the time, the mask of all of it."""
    context, config, positions = whole_rows.context, whole_rows.config, whole_rows.position_ids
    assert attention_mask is None or attention_mask.shape[-1] == positions.shape[1], "the mask is of a part of the time"
    query, key, value = context.share_heads(query, key, value)
    # kernels read their settings from the layer
    layer: Any = copy.copy(module)
    layer.config, layer.num_key_value_groups = config, query.shape[1] // key.shape[1]
    out, _ = _kernel(config, module)(layer, query, key, value, attention_mask, **kwargs | {"position_ids": positions})
    return context.share_time(out), None


def _kernel(config: PretrainedConfig, module: nn.Module) -> Callable[..., tuple[Tensor, object]]:
    name = config._attn_implementation
    if name == "eager":
        # every family's own, with what it does to scores
        return vars(sys.modules[type(module).__module__])["eager_attention_forward"]
    assert name is not None
    return AttentionInterface()[name]


class _AllToAll(torch.autograd.Function):
    """[ranks, ...]: entry i goes to rank i, and so does its gradient on its way back."""

    @staticmethod
    def forward(ctx: Any, sent: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _all_to_all(sent, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _all_to_all(grads[0].contiguous(), ctx.group), None


def _all_to_all(sent: Tensor, group: dist.ProcessGroup) -> Tensor:
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return received


class _AllOutputs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, here: Tensor, places: Tensor, count: int, group: dist.ProcessGroup) -> Tensor:
        ctx.save_for_backward(places)
        every = here.new_zeros(len(here), count)
        every[:, places] = here
        dist.all_reduce(every, group=group)  # each place is filled by one rank: a sum with zeros keeps its bits
        return every

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (places,) = ctx.saved_tensors
        return grads[0][:, places], None, None, None


AttentionInterface.register(CONTEXT_ATTENTION, context_attention)
