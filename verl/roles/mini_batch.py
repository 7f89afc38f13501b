"""How a step's rows become mini-batches, and the weight of every token in its mini-batch's loss."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from verl.algo.aggregate import loss_counts, token_weights
from verl.config import LossAggregation


@dataclass(frozen=True)
class MiniBatch:
    rows: list[int]
    """This rank's rows of it."""
    weights: Tensor
    """float64 [the rank's response tokens]: each token's in the loss of the mini-batch over all ranks; 0 outside it."""


def rows_of_mini_batch(number: int, num_mini_batches: int, rows: range, group_size: int) -> list[int]:
    """Which of a rank's `rows` (global numbers) are in mini-batch `number`, counted from the rank's first row.

    Prompt group g is in mini-batch g mod `num_mini_batches`, whatever the mesh, and a group is never split.
    """
    return [row - rows.start for row in rows if row // group_size % num_mini_batches == number]


def make_mini_batches(
    num_mini_batches: int,
    rows: range,
    group_size: int,
    lengths: Tensor,
    row_weights: Tensor,
    mode: LossAggregation,
    group: dist.ProcessGroup,
) -> list[MiniBatch]:
    """The mini-batches of an epoch. `lengths`, `row_weights` [rows here]; `group`: the ranks that hold other rows."""
    members = [rows_of_mini_batch(j, num_mini_batches, rows, group_size) for j in range(num_mini_batches)]
    counts = torch.stack([loss_counts(lengths[m], row_weights[m]) for m in members])
    dist.all_reduce(counts, group=group)
    tokens = torch.arange(int(lengths.sum())).split(lengths.tolist())
    mini_batches = []
    for m, (num_tokens, num_rows) in zip(members, counts.tolist(), strict=True):
        weights = torch.zeros(int(lengths.sum()), dtype=torch.float64)
        if m:
            weights[torch.cat([tokens[row] for row in m])] = token_weights(
                lengths[m], row_weights[m], mode, num_tokens, num_rows
            )
        mini_batches.append(MiniBatch(m, weights))
    return mini_batches
