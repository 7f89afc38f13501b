"""Attention for training on a CPU: SDPA, with a backward of its own for short rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

CPU_ATTENTION = "sdpa_short_rows"
"""Its name in transformers, an `attn_implementation`."""
SHORT = 256
"""Tokens of a row up to which the backward here is the faster one, in bfloat16; in float32 SDPA's own is. A layer of 16
rows of 108 tokens, 9 heads of 64, one thread: 16 ms where SDPA's takes 46. At 512 tokens they are level."""


def short_rows_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """As transformers calls it. `query` [batch, heads, time, dim]; `key`, `value` with a divisor of its heads.

    It is SDPA, and gives SDPA's bits where it differentiates itself, too: log-probs from before an update and from
    within are those of one function.
    """
    plain = dropout == 0.0 and scaling is not None and (attention_mask is None or attention_mask.dtype == torch.bool)
    short = query.dtype != torch.float32 and query.shape[2] <= SHORT
    if torch.is_grad_enabled() and short and plain and kwargs.get("position_bias") is None:
        return _ShortRows.apply(module, query, key, value, attention_mask, scaling), None  # type: ignore[return-value]
    return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **kwargs)


class _ShortRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float
    ) -> Tensor:
        out, _ = sdpa_attention_forward(module, query, key, value, mask, scaling=scaling)
        ctx.save_for_backward(query, key, value, mask, out)
        ctx.scaling = scaling
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """The softmax's gradient; row sums come from the output (Dao et al. 2022, FlashAttention, appendix B.2)."""
        query, key, value, mask, out = ctx.saved_tensors
        (grad,) = grads  # [batch, time, heads, dim], like `out`
        batch, heads, time, _ = query.shape
        groups = key.shape[1]

        def grouped(x: Tensor) -> Tensor:
            """[batch, heads, time, n] -> [batch, key heads, their query heads * time, n]"""
            return x.reshape(batch, groups, heads // groups * time, x.shape[-1])

        row_sums = grouped((grad.float() * out).sum(-1, keepdim=True).transpose(1, 2))
        queries, grad = grouped(query), grouped(grad.transpose(1, 2))
        scores = (queries @ key.mT).float().mul_(ctx.scaling)
        visible = _visible(mask, time, query.device)
        scores.view(batch, groups, -1, time, time).masked_fill_(~visible, -torch.inf)
        probs = scores.softmax(-1)
        grad_value = probs.to(grad.dtype).mT @ grad
        grad_scores = (grad @ value.mT).float().sub_(row_sums).mul_(probs).mul_(ctx.scaling).to(query.dtype)
        grad_query = (grad_scores @ key).view(batch, heads, time, -1)
        return None, grad_query, grad_scores.mT @ queries, grad_value, None, None


def _visible(mask: Tensor | None, time: int, device: torch.device) -> Tensor:
    """Which key each query sees, [batch or 1, 1, 1, time, time]; without a mask attention is causal."""
    if mask is None:
        return torch.ones(time, time, dtype=torch.bool, device=device).tril()[None, None, None]
    return mask[:, :, None]


AttentionInterface.register(CPU_ATTENTION, short_rows_attention)
AttentionMaskInterface.register(CPU_ATTENTION, sdpa_mask)
