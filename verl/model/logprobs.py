"""Log-probs and entropies of chosen tokens, straight from hidden states, a chunk of tokens at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class VocabShard:
    """This rank's rows of a head's weight; the ranks of `group` together hold all of them."""

    group: dist.ProcessGroup
    first: int
    """The token that row 0 here is for."""


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float,
    chunk_tokens: int,
    softcap: float | None = None,
    shard: VocabShard | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-prob of each target, and the entropy of its distribution, under softmax(hidden @ weight.T / temperature).

    `hidden` [k, h], `weight` [vocab, h], `targets` [k]; both results [k] in float32. [k, vocab] never exists whole: the
    backward pass computes the logits of a chunk again. `softcap`: logits become softcap * tanh(logits / softcap) first.

    `shard`: `weight` holds a part of the vocabulary, and all ranks of its group call this with the same `hidden` and
    `targets`. The results are the same on all of them; the gradient of `hidden` is each rank's part of a sum.
    """
    return _Logprobs.apply(hidden, weight, targets, temperature, chunk_tokens, softcap, shard)  # type: ignore[return-value]


class _Logprobs(torch.autograd.Function):
    """With a shard: two small all-reduces a chunk, [chunk] and [3, chunk], in the forward pass alone."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        temperature: float,
        chunk_tokens: int,
        softcap: float | None,
        shard: VocabShard | None,
    ) -> tuple[Tensor, Tensor]:
        places = targets if shard is None else targets - shard.first
        here = (places >= 0) & (places < len(weight))
        places = places.clamp(0, len(weight) - 1)
        logprobs = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
        entropy, largest, log_sum = (torch.empty_like(logprobs) for _ in range(3))
        for at in _chunks(len(hidden), chunk_tokens):
            logits = _logits(hidden[at], weight, temperature, softcap)
            top = _over_ranks(logits.amax(-1), dist.ReduceOp.MAX, shard)
            logits.sub_(top[:, None])  # or the entropy of a sharp distribution would be lost in log Z - E[logit]
            chosen = logits.gather(-1, places[at, None]).squeeze(-1) * here[at]
            exps = logits.exp()
            sums = torch.stack([exps.sum(-1), exps.mul_(logits).sum(-1), chosen])
            sums = _over_ranks(sums, dist.ReduceOp.SUM, shard)
            largest[at], log_sum[at] = top, sums[0].log()
            logprobs[at] = sums[2] - log_sum[at]
            entropy[at] = log_sum[at] - sums[1] / sums[0]
            del logits, exps  # before there are the next chunk's
        ctx.save_for_backward(hidden, weight, places, here, largest, log_sum, entropy)
        ctx.settings = (temperature, chunk_tokens, softcap)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_logprobs, grad_entropy = grads
        hidden, weight, places, here, largest, log_sum, entropy = ctx.saved_tensors
        with_entropy = bool(grad_entropy.any())

        def gradient(at: slice, logits: Tensor) -> Tensor:
            # in place: on a CPU a pass over [chunk, vocab] takes as long as its memory does
            every = logits.sub_(largest[at, None]).sub_(log_sum[at, None])
            if with_entropy:
                # dH/dlogit = -p (log p + H)
                grad = every.exp()
                grad *= every.add_(entropy[at, None]).mul_(grad_entropy[at, None]).add_(grad_logprobs[at, None]).neg_()
            else:
                grad = every.exp_().mul_(-grad_logprobs[at, None])
            return grad.scatter_add_(-1, places[at, None], (grad_logprobs[at] * here[at])[:, None])

        return *_through_head(gradient, hidden, weight, ctx.needs_input_grad[1], *ctx.settings), *[None] * 5


def _over_ranks(parts: Tensor, op: dist.ReduceOp.RedOpType, shard: VocabShard | None) -> Tensor:
    """In place."""
    if shard is not None:
        dist.all_reduce(parts, op, group=shard.group)
    return parts


def _through_head(
    gradient: Callable[[slice, Tensor], Tensor],
    hidden: Tensor,
    weight: Tensor,
    trained: bool,
    temperature: float,
    chunk_tokens: int,
    softcap: float | None,
) -> tuple[Tensor, Tensor | None]:
    """Gradients of `hidden` and `weight` from `gradient` of a chunk's capped and scaled logits, which it may use up.

    `trained`: whether the weight is; else it gets none.
    """
    grad_hidden = torch.empty_like(hidden)
    # summed in float32 over the chunks, whatever the model's dtype
    grad_weight = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device) if trained else None
    for at in _chunks(len(hidden), chunk_tokens):
        logits, slope = _logits_and_slope(hidden[at], weight, temperature, softcap)
        grad = gradient(at, logits)
        del logits
        if slope is not None:
            grad *= slope
        if temperature != 1.0:
            grad /= temperature
        grad = grad.to(hidden.dtype)
        grad_hidden[at] = grad @ weight
        if grad_weight is None:
            pass
        elif weight.dtype == torch.float32:
            grad_weight.addmm_(grad.T, hidden[at])
        else:
            grad_weight += grad.T @ hidden[at]
        del grad, slope
    return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype)


def _logits(hidden: Tensor, weight: Tensor, temperature: float, softcap: float | None) -> Tensor:
    """In float32."""
    logits = (hidden @ weight.T).float()
    if softcap is None:
        return logits if temperature == 1.0 else logits.div_(temperature)
    return logits.div_(softcap).tanh_().mul_(softcap / temperature)


def _logits_and_slope(
    hidden: Tensor, weight: Tensor, temperature: float, softcap: float | None
) -> tuple[Tensor, Tensor | None]:
    """(logits, d softcap(logit) / d logit where there is a softcap)."""
    if softcap is None:
        return _logits(hidden, weight, temperature, softcap), None
    squashed = (hidden @ weight.T).float().div_(softcap).tanh_()
    slope = squashed.square().neg_().add_(1)
    return squashed.mul_(softcap / temperature), slope


def _chunks(total: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, total)) for start in range(0, total, size)]
