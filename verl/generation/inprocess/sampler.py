"""Draws tokens. A draw depends on its logits, its request's seed and its place in the response, and on nothing else.

B sequences, V tokens of the vocabulary.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

from verl.generation.types import Sampling

_CPU_LOGITS = 1 << 17
"""Logits drawn from at once on a CPU (at least one row). Malloc gives larger temporaries back to the system after each
use, and every page of the next is faulted in anew: three times slower."""

_NUCLEUS_WIDTH = 512
"""Tokens sorted at first when the edge of a nucleus is looked for."""


def uniform(seed: int, position: int) -> float:
    """A number of [0, 1) that is a function of its arguments alone (BLAKE2b of both)."""
    digest = hashlib.blake2b(f"{seed}:{position}".encode(), digest_size=8).digest()
    # 52 bits, one fewer than a double holds: the product with a sum of probabilities stays below that sum.
    return (int.from_bytes(digest, "little") >> 12) / (1 << 52)


def draw(logits: Tensor, sampling: Sampling, uniforms: Sequence[float]) -> tuple[Tensor, Tensor]:
    """One token for each row of logits [B, V], at the inverse of the cumulative distribution in vocabulary order.

    Greedy decoding has no distribution to speak of: its log-probs are those of the model's own softmax.

    Returns:
        ids [B] and fp32 log-probs [B], under the distribution drawn from. Where a row's logits are not finite, its
        log-prob is NaN.
    """
    assert len(uniforms) == len(logits)
    num_rows = max(1, _CPU_LOGITS // logits.shape[1]) if logits.device.type == "cpu" else len(logits)
    columns = torch.tensor(uniforms, dtype=torch.float64, device=logits.device)[:, None]
    parts = [
        _draw_rows(rows.float(), sampling, column)
        for rows, column in zip(logits.split(num_rows), columns.split(num_rows), strict=True)
    ]
    ids, logprobs = zip(*parts, strict=True)
    return torch.cat(ids), torch.cat(logprobs)


def _draw_rows(logits: Tensor, sampling: Sampling, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """`draw` for fp32 logits [B, V] and double uniforms [B, 1]."""
    if sampling.temperature == 0:
        ids = logits.argmax(-1)
    else:
        logits = truncate(logits / sampling.temperature, sampling.top_k, sampling.top_p)
    log_total = logits.logsumexp(-1, keepdim=True)
    if sampling.temperature != 0:
        cumulative = (logits - log_total).exp_().cumsum(-1, dtype=torch.float64)
        drawn = uniforms * cumulative[:, -1:]
        # `right`: the first token whose cumulative probability exceeds the draw, hence never one of probability 0.
        # NaN exceeds nothing; the clamp only keeps its index in range.
        ids = torch.searchsorted(cumulative, drawn, right=True)[:, 0].clamp_(max=logits.shape[1] - 1)
    logprobs = logits.gather(-1, ids[:, None]) - log_total
    return ids, logprobs[:, 0]


def truncate(logits: Tensor, top_k: int, top_p: float) -> Tensor:
    """-inf for every token outside of the `top_k` likeliest and, of those, outside of the nucleus of mass `top_p`.

    The nucleus is the smallest set of likeliest tokens with a mass of at least `top_p` (Holtzman et al. 2020). Tokens
    as likely as the last one kept are kept too, so no order of equal logits matters.
    """
    if 0 < top_k < logits.shape[-1]:
        least = logits.topk(top_k).values[:, -1:]
        logits = logits.masked_fill(logits < least, float("-inf"))
    if top_p < 1:
        logits = logits.masked_fill(logits < _nucleus_floor(logits, top_p), float("-inf"))
    return logits


def _nucleus_floor(logits: Tensor, top_p: float) -> Tensor:
    """[B, 1], the smallest logit in the nucleus. Sorts no more of the vocabulary than the widest nucleus needs."""
    vocabulary = logits.shape[-1]
    log_total = logits.logsumexp(-1, keepdim=True)
    width = min(_NUCLEUS_WIDTH, vocabulary)
    while True:
        values = logits.topk(width).values
        probs = (values - log_total).exp().double()
        mass = probs.cumsum(-1)
        if width == vocabulary or bool((mass[:, -1] >= top_p).all()):
            break
        width = min(8 * width, vocabulary)
    num_kept = (mass - probs < top_p).sum(-1, keepdim=True)
    return values.gather(-1, (num_kept - 1).clamp_(min=0))
