"""The learning rate against transformers' schedulers, which take the number of a step in another way in warm-up."""

from __future__ import annotations

import pytest
import torch
from transformers import (
    get_constant_schedule_with_warmup,
    get_cosine_schedule_with_warmup,
    get_linear_schedule_with_warmup,
)

from verl.config import OptimConfig, Schedule
from verl.engine.optimizer import learning_rate

TOTAL = 20


def theirs(schedule: Schedule, warmup: int) -> list[float]:
    """Rates by step: with `warmup` steps of warm-up theirs has 0 at step 0 and the peak at step `warmup`."""
    adamw = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = {
        Schedule.constant: lambda: get_constant_schedule_with_warmup(adamw, warmup),
        Schedule.linear: lambda: get_linear_schedule_with_warmup(adamw, warmup, TOTAL),
        Schedule.cosine: lambda: get_cosine_schedule_with_warmup(adamw, warmup, TOTAL),
    }[schedule]()
    rates = []
    for _ in range(TOTAL + 1):
        rates.append(scheduler.get_last_lr()[0])
        adamw.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize("warmup", [0, 1, 6])
@pytest.mark.parametrize("schedule", Schedule)
def test_the_rate_of_every_step(schedule: Schedule, warmup: int) -> None:
    """In warm-up ours is a step ahead, so that the first step is not lost; after it both are the same."""
    config = OptimConfig(lr=0.5, lr_scheduler=schedule, lr_warmup_steps=warmup)
    ours, rates = [learning_rate(config, step, TOTAL) for step in range(TOTAL)], theirs(schedule, warmup)
    assert ours[:warmup] == pytest.approx([0.5 * rate for rate in rates[1 : warmup + 1]])
    assert ours[warmup:] == pytest.approx([0.5 * rate for rate in rates[warmup:TOTAL]])
    assert min(ours) > 0


@pytest.mark.parametrize("schedule", [Schedule.linear, Schedule.cosine])
def test_past_the_end_the_rate_is_zero(schedule: Schedule) -> None:
    config = OptimConfig(lr=0.5, lr_scheduler=schedule)
    assert [learning_rate(config, step, 3) for step in (3, 4, 100)] == [0.0, 0.0, 0.0]


def test_a_warm_up_longer_than_the_run_only_rises() -> None:
    config = OptimConfig(lr=1.0, lr_scheduler=Schedule.cosine, lr_warmup_steps=10)
    assert [learning_rate(config, step, 4) for step in range(4)] == pytest.approx([0.1, 0.2, 0.3, 0.4])
