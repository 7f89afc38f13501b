"""Log-probs and entropies of chosen tokens, straight from hidden states, a chunk of tokens at a time."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def token_logprobs(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, chunk_tokens: int, softcap: float | None = None
) -> tuple[Tensor, Tensor]:
    """Log-prob of each target, and the entropy of its distribution, under softmax(hidden @ weight.T / temperature).

    `hidden` [k, h], `weight` [vocab, h], `targets` [k]; both results [k] in float32. [k, vocab] never exists whole: the
    backward pass computes the logits of a chunk again. `softcap`: logits become softcap * tanh(logits / softcap) first.
    """
    return _ChunkedLogprobs.apply(hidden, weight, targets, temperature, chunk_tokens, softcap)  # type: ignore[return-value]


class _ChunkedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        temperature: float,
        chunk_tokens: int,
        softcap: float | None,
    ) -> tuple[Tensor, Tensor]:
        logprobs = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
        entropy = torch.empty_like(logprobs)
        for at in _chunks(len(hidden), chunk_tokens):
            logits, _ = _logits(hidden[at], weight, temperature, softcap)
            # log_softmax takes the largest logit away first: log Z - E[logit] would lose the entropy of a sharp one
            every = logits.log_softmax(-1)
            logprobs[at] = every.gather(-1, targets[at, None]).squeeze(-1)
            entropy[at] = -every.exp().mul_(every).sum(-1)
        ctx.save_for_backward(hidden, weight, targets)
        ctx.settings = (temperature, chunk_tokens, softcap)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_logprobs, grad_entropy = grads
        hidden, weight, targets = ctx.saved_tensors
        temperature, chunk_tokens, softcap = ctx.settings
        with_entropy = bool(grad_entropy.any())
        grad_hidden = torch.empty_like(hidden)
        # summed in float32 over the chunks, whatever the model's dtype
        grad_weight = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
        for at in _chunks(len(hidden), chunk_tokens):
            logits, slope = _logits(hidden[at], weight, temperature, softcap)
            # in place: on a CPU a pass over [chunk, vocab] takes as long as its memory does
            grad = logits.softmax(-1)
            if with_entropy:
                # dH/dlogit = -p (log p + H)
                logprobs = logits.log_softmax(-1)
                entropy = -(grad * logprobs).sum(-1, keepdim=True)
                grad *= logprobs.add_(entropy).mul_(grad_entropy[at, None]).add_(grad_logprobs[at, None]).neg_()
            else:
                grad *= -grad_logprobs[at, None]
            grad.scatter_add_(-1, targets[at, None], grad_logprobs[at, None])
            if slope is not None:
                grad *= slope
            if temperature != 1.0:
                grad /= temperature
            grad = grad.to(hidden.dtype)
            grad_hidden[at] = grad @ weight
            if weight.dtype == torch.float32:
                grad_weight.addmm_(grad.T, hidden[at])
            else:
                grad_weight += grad.T @ hidden[at]
        return grad_hidden, grad_weight.to(weight.dtype), None, None, None, None


def _logits(hidden: Tensor, weight: Tensor, temperature: float, softcap: float | None) -> tuple[Tensor, Tensor | None]:
    """(logits in float32, d softcap(logit) / d logit where there is a softcap)."""
    logits = (hidden @ weight.T).float()
    if softcap is None:
        return (logits if temperature == 1.0 else logits.div_(temperature)), None
    squashed = torch.tanh(logits.div_(softcap))
    return squashed * (softcap / temperature), 1 - squashed * squashed


def _chunks(total: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, total)) for start in range(0, total, size)]
