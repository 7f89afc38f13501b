"""A pipeline stage that fails with micro-batches in flight: the job ends in time, and its rank is to blame."""

from __future__ import annotations

import os
import re
import signal
import time
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.ranks import RankFailed, run_ranks
from tests.support.runs import SPLIT_MESHES, Task, mesh_of
from verl import train as train_module
from verl.config import PPOConfig
from verl.model.heads import HeadedModel
from verl.train import train

pytestmark = [pytest.mark.dist, pytest.mark.timeout(400)]

RANKS, DEVICES, SPLIT = SPLIT_MESHES["two stages of two"]
LIMIT = 20.0
"""Seconds that starting and ending may take on a busy machine."""


class InjectedError(Exception):
    """Nothing in the program raises it."""


def fail_in_flight(how: str, rank: int, config: PPOConfig) -> None:
    """In a rank: its second forward in training, while others wait for it or work on other micro-batches."""
    forward, visits = HeadedModel.forward, count(1)

    def faulty(model: HeadedModel, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled() and os.environ["RANK"] == str(rank) and next(visits) == 2:
            if how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise InjectedError(f"on rank {rank}")
        return forward(model, *args, **kwargs)

    HeadedModel.forward = faulty  # type: ignore[method-assign]
    train_module.BYSTANDER_SECONDS = 0.2
    train(config, mesh_of(DEVICES, SPLIT))


@pytest.mark.parametrize(("how", "rank"), [("raise", 0), ("raise", 3), ("kill", 1)])
def test_a_stage_that_fails_ends_the_job(how: str, rank: int, tmp_path: Path) -> None:
    task = Task.make(tmp_path, num_prompts=8)
    config = task.config("faulty", trainer__total_training_steps=2, trainer__progress=False)
    begin = time.monotonic()
    with pytest.raises(RankFailed) as caught:
        run_ranks(RANKS, fail_in_flight, how, rank, config, timeout=150)
    assert time.monotonic() - begin < LIMIT
    ends = caught.value.tracebacks
    assert set(ends) == set(range(RANKS))
    assert ends[rank] == "exit status -9" if how == "kill" else f"InjectedError: on rank {rank}" in ends[rank]
    for other in set(ends) - {rank}:
        assert re.search(r"Connection closed by peer|Connection reset by peer|Broken pipe", ends[other]), ends[other]
