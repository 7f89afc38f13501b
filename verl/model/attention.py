"""Attention for training on a CPU: SDPA, and products of matrices for short rows."""

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
"""Tokens of a row up to which products of whole matrices are faster, in bfloat16; in float32 SDPA is. A layer of 16
rows of 108 tokens, 9 heads of 64, one thread: forward 6 ms where SDPA takes 11, backward 16 where it takes 46. At 512
tokens the backward is level."""


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

    The bits are the same with and without a gradient: log-probs from before an update and from within are those of one
    function. Those of short rows are the ones of transformers' `eager`.
    """
    plain = dropout == 0.0 and scaling is not None and (attention_mask is None or attention_mask.dtype == torch.bool)
    short = query.dtype != torch.float32 and query.shape[2] <= SHORT
    if short and plain and kwargs.get("position_bias") is None:
        return _ShortRows.apply(query, key, value, attention_mask, scaling), None  # type: ignore[return-value]
    return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **kwargs)


class _ShortRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float) -> Tensor:
        probs = _probs(_grouped(query, key), key, mask, scaling)
        out = (probs.to(query.dtype) @ value).view(query.shape).transpose(1, 2).contiguous()
        ctx.save_for_backward(query, key, value, mask, out)
        ctx.scaling = scaling
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """The softmax's gradient; row sums come from the output (Dao et al. 2022, FlashAttention, appendix B.2)."""
        query, key, value, mask, out = ctx.saved_tensors
        (grad,) = grads  # [batch, time, heads, dim], like `out`
        row_sums = _grouped((grad.float() * out).sum(-1, keepdim=True).transpose(1, 2), key)
        queries, grad = _grouped(query, key), _grouped(grad.transpose(1, 2), key)
        probs = _probs(queries, key, mask, ctx.scaling)
        grad_value = probs.to(grad.dtype).mT @ grad
        grad_scores = (grad @ value.mT).float().sub_(row_sums).mul_(probs).mul_(ctx.scaling).to(query.dtype)
        grad_query = (grad_scores @ key).view(query.shape)
        return grad_query, grad_scores.mT @ queries, grad_value, None, None


def _grouped(x: Tensor, key: Tensor) -> Tensor:
    """[batch, heads, time, n] -> [batch, key heads, their query heads * time, n]"""
    return x.reshape(len(x), key.shape[1], -1, x.shape[-1])


def _probs(queries: Tensor, key: Tensor, mask: Tensor | None, scaling: float) -> Tensor:
    """[batch, key heads, their query heads * time, time], in float32. `mask` [batch, 1, time, time]: True where a query
    sees a key; without one attention is causal.
    """
    time = key.shape[2]
    if mask is None:
        mask = torch.ones(1, 1, time, time, dtype=torch.bool, device=key.device).tril()
    hidden = torch.zeros(mask.shape, device=key.device).masked_fill_(~mask, -torch.inf)
    scores = (queries @ key.mT).view(*key.shape[:2], -1, time, time)
    return torch.add(hidden[:, :, None], scores, alpha=scaling).softmax(-1).view(*key.shape[:2], -1, time)


AttentionInterface.register(CPU_ATTENTION, short_rows_attention)
AttentionMaskInterface.register(CPU_ATTENTION, sdpa_mask)
