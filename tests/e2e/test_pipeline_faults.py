"""A rank that fails or hangs with micro-batches in flight: the job ends in time, and that rank is to blame."""

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

from tests.support.faults import FOR_EVER
from tests.support.ranks import RankFailed, run_ranks
from tests.support.runs import MESHES, SPLIT_MESHES, Task, mesh_of
from tests.support.stalls import announce_hang, watch_for_hangs_alone
from verl import train as train_module
from verl.config import PPOConfig
from verl.mesh.spec import MeshSpec
from verl.model.heads import HeadedModel
from verl.train import train

pytestmark = [pytest.mark.dist, pytest.mark.timeout(900)]

RANKS, DEVICES, SPLIT = SPLIT_MESHES["two stages of two"]
LIMIT = 4.0
"""trainer.stage_timeout where a rank hangs."""


class InjectedError(Exception):
    """Nothing in the program raises it."""


def fail_in_flight(how: str, rank: int, config: PPOConfig, mesh: MeshSpec) -> None:
    """In a rank: its second forward in training, while others wait for it or work on other micro-batches."""
    if how == "hang":
        watch_for_hangs_alone()
    forward, visits = HeadedModel.forward, count(1)

    def faulty(model: HeadedModel, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled() and os.environ["RANK"] == str(rank) and next(visits) == 2:
            if how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if how == "hang":
                announce_hang(rank)
                time.sleep(FOR_EVER)
            raise InjectedError(f"on rank {rank}")
        return forward(model, *args, **kwargs)

    HeadedModel.forward = faulty  # type: ignore[method-assign]
    train_module.BYSTANDER_SECONDS = 0.2
    train(config, mesh)


@pytest.mark.parametrize(("how", "rank"), [("raise", 0), ("raise", 3), ("kill", 1)])
def test_a_stage_that_fails_ends_the_job(how: str, rank: int, tmp_path: Path) -> None:
    task = Task.make(tmp_path, num_prompts=8)
    config = task.config(
        "faulty", trainer__total_training_steps=2, trainer__progress=False, trainer__stage_timeout=1000.0
    )
    with pytest.raises(RankFailed) as caught:
        run_ranks(RANKS, fail_in_flight, how, rank, config, mesh_of(DEVICES, SPLIT))
    ends = caught.value.tracebacks
    assert set(ends) == set(range(RANKS))
    assert ends[rank] == "exit status -9" if how == "kill" else f"InjectedError: on rank {rank}" in ends[rank]
    for other in set(ends) - {rank}:
        assert re.search(r"Connection closed by peer|Connection reset by peer|Broken pipe", ends[other]), ends[other]


PIECES = "(forward|backward) of micro-batch"
HANGS = {
    "a stage of one rank": ("two stages", 0, 1, rf"rank 1: update_critic: waits for the (receipt of the )?{PIECES} "),
    "a stage of two": ("two stages of two", 0, 1, rf"rank 1: update_critic: waits for the (receipt of the )?{PIECES} "),
    "no pipeline": ("colocated", 1, None, r"rank 0: update_critic: micro-batch \d+ of \d+ "),
}
"""(mesh, the rank that hangs in the critic's update, its stage, what the one says that waits for it)"""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name == "a stage of one rank" else ()) for name in HANGS]
)
def test_a_rank_that_hangs_in_flight_is_named_with_its_micro_batch_and_those_who_wait_for_it(
    name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """All ranks of a role do its steps together, and wait for each other as far as the stage goes."""
    mesh, rank, stage, waits = HANGS[name]
    ranks, devices, split = SPLIT_MESHES[mesh] if mesh in SPLIT_MESHES else (*MESHES[mesh], None)
    changes = {
        "trainer__stage_timeout": LIMIT,
        "critic__max_tokens_per_micro_batch": 30,
        "critic__ppo_mini_batch_size": 6,
    }
    task = Task.make(tmp_path, num_prompts=8)
    config = task.config("hangs", trainer__total_training_steps=2, trainer__progress=False, **changes)
    with pytest.raises(RankFailed):
        run_ranks(ranks, fail_in_flight, "hang", rank, config, mesh_of(devices, split), grace=0.0)
    said = capfd.readouterr().err
    assert set(re.findall(r"rank (\d) has shown no sign of life", said)) == {str(rank)}, said
    at = r"micro-batch 2 of \d+" if stage is None else rf"forward of micro-batch 2 of \d+ on stage {stage}"
    assert re.search(rf"  rank {rank}: update_critic: {at} \(for ", said), said
    assert re.search(rf"  {waits}.*\(for ", said), said
