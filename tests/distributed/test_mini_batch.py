"""The weights of tokens in a mini-batch that lies on several ranks, against the whole batch on one."""

from __future__ import annotations

import pytest
import torch

from tests.support.ranks import run_ranks
from verl.config import LossAggregation
from verl.flow.job import start_job
from verl.flow.placement import Placement, make_groups
from verl.roles.mini_batch import make_mini_batches

pytestmark = pytest.mark.dist

LENGTHS = [3, 0, 5, 1, 2, 4, 7, 1, 0, 6, 2, 3]
LIVE = [1, 1, 0, 1, 1, 1, 1, 0, 1, 1, 0, 0]
"""The last two rows, which are the whole of a prompt group, are dead."""
LAYOUTS = {"one": (1, (0,)), "two": (2, (1, 0)), "three": (3, (0, 1, 2))}


def on_ranks(ranks: tuple[int, ...]) -> dict[LossAggregation, list[tuple[list[int], list[float]]]]:
    """By mode: this rank's rows and token weights of both mini-batches."""
    job = start_job(stage_timeout=300, check_program=False)
    place = Placement("actor", ranks)
    group = make_groups([place], job.rank, "cpu", job.timeout)["actor"].rows
    rows = place.inputs.rows(job.rank, len(LENGTHS))
    lengths, live = torch.tensor(LENGTHS)[rows.start : rows.stop], torch.tensor(LIVE)[rows.start : rows.stop].float()
    made = {
        mode: [(b.rows, b.weights.tolist()) for b in make_mini_batches(2, rows, 2, lengths, live, mode, group)]
        for mode in LossAggregation
    }
    job.close()
    return made


def by_hand(mode: LossAggregation, number: int) -> list[float]:
    """Of every token of the batch: the loss is a mean over the mini-batch's live tokens, or over its live rows."""
    rows = [r for r in range(len(LENGTHS)) if (r // 2) % 2 == number and LIVE[r] and LENGTHS[r]]
    tokens = sum(LENGTHS[r] for r in rows)
    weights = []
    for row, length in enumerate(LENGTHS):
        each = {
            LossAggregation.token_mean: 1 / tokens,
            LossAggregation.seq_mean_token_sum: 1 / len(rows),
            LossAggregation.seq_mean_token_mean: 1 / len(rows) / max(length, 1),
        }[mode]
        weights += [each if row in rows else 0.0] * length
    return weights


@pytest.mark.parametrize("layout", LAYOUTS)
def test_weights_are_those_of_the_whole_mini_batch(layout: str) -> None:
    world, ranks = LAYOUTS[layout]
    results = run_ranks(world, on_ranks, ranks)
    share = len(LENGTHS) // len(ranks)
    for mode in LossAggregation:
        for number in range(2):
            parts = [results[rank][mode][number] for rank in ranks]
            assert [w for _, weights in parts for w in weights] == pytest.approx(by_hand(mode, number))
            rows = [i * share + row for i, (mine, _) in enumerate(parts) for row in mine]
            assert rows == [row for row in range(len(LENGTHS)) if (row // 2) % 2 == number]
