"""How the losses of single tokens become one number that no split into micro-batches or ranks changes."""

from __future__ import annotations

import torch
from torch import Tensor

from verl.config import LossAggregation


def loss_counts(lengths: Tensor, row_weights: Tensor) -> Tensor:
    """float64 [2]: trainable tokens, and rows that have any, among the rows of weight 1.

    lengths [rows], trainable tokens of each row; row_weights [rows], 1 or 0. Add them up over the micro-batches and
    ranks of a mini-batch: these are `token_weights`' global counts.
    """
    assert lengths.shape == row_weights.shape, (lengths.shape, row_weights.shape)
    row_weights = row_weights.double()
    return torch.stack([(row_weights * lengths).sum(), (row_weights * (lengths > 0)).sum()])


def token_weights(
    lengths: Tensor, row_weights: Tensor, mode: LossAggregation, global_tokens: float, global_rows: float
) -> Tensor:
    """float64 [k]: the weight of each trainable token, row after row, so that the sum of weight * loss over all
    micro-batches and ranks is the loss of the mini-batch.

    lengths, row_weights [rows] as in `loss_counts`; global_tokens and global_rows are its counts of the whole
    mini-batch. token_mean: the mean over tokens. seq_mean_token_sum, seq_mean_token_mean: the mean over rows that have
    trainable tokens of the sum or mean over a row's tokens. Rows of weight 0 are in no numerator and no denominator.

    It is a sum over ranks that is exact: where gradients are averaged over n ranks, multiply the loss by n.
    """
    assert lengths.shape == row_weights.shape, (lengths.shape, row_weights.shape)
    row_weights = row_weights.double()
    # Counts are 0 only where every weight is: 0 / 1 then, not 0 / 0.
    match mode:
        case LossAggregation.token_mean:
            each = row_weights / max(global_tokens, 1)
        case LossAggregation.seq_mean_token_sum:
            each = row_weights / max(global_rows, 1)
        case LossAggregation.seq_mean_token_mean:
            each = row_weights / (max(global_rows, 1) * lengths.clamp(min=1))
    return each.repeat_interleave(lengths)


def zero_unweighted(x: Tensor, weights: Tensor) -> Tensor:
    """x [k] with 0 at the tokens of weight 0 in weights [k]: neither a value nor a gradient passes there, NaN included.

    For what a model gives (log-probs, values), before the losses: `weighted_sum` keeps a NaN at such a token out of the
    loss, but 0 times the slope of a NaN is NaN again on the way back.
    """
    assert x.shape == weights.shape, (x.shape, weights.shape)
    return torch.where(weights != 0, x, 0.0)


def weighted_sum(loss: Tensor, weights: Tensor) -> Tensor:
    """The sum of loss * weights, both [k], summed in float64; a token of weight 0 adds exactly nothing, even NaN.

    With no token, or none of weight other than 0, it is 0 with a zero gradient, never NaN.
    """
    return (zero_unweighted(loss, weights).double() * weights).sum()
