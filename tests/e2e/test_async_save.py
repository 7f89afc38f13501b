"""Runs whose checkpoints are written beside them: killed in the middle of it, or on a disk that is full."""

from __future__ import annotations

import os
import re
import resource
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.support.ranks import RankFailed, run_ranks
from tests.support.runs import MESHES, Task, mesh_of, run
from verl import train as train_module
from verl.config import PPOConfig
from verl.engine import shards
from verl.train import train

pytestmark = [pytest.mark.dist, pytest.mark.timeout(900)]

RANKS, DEVICES = MESHES["colocated"]
NUM_STEPS = 4
UNTIMED = ("actor/pg_loss", "critic/vf_loss", "actor/grad_norm", "critic/score/mean", "actor/lr")
FULL = 60_000
"""Bytes that a file may have on a disk that is full: more than metrics, less than shards."""


def train_until_step_3_is_being_written(config: PPOConfig) -> None:
    """Rank 1 is killed then."""
    file = Path(config.trainer.run_dir) / "checkpoints" / ".step_3.part" / "critic" / "__1_0.distcp"
    resolve = shards._SavePlanner.resolve_data

    def resolve_or_die(planner: Any, item: Any) -> Any:
        if os.environ["RANK"] == "1" and file.exists() and file.stat().st_size > 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return resolve(planner, item)

    shards._SavePlanner.resolve_data = resolve_or_die  # type: ignore[method-assign]
    train(config, mesh_of(DEVICES))


def test_a_run_that_is_killed_while_a_checkpoint_is_written_goes_on_from_the_last_whole_one(tmp_path: Path) -> None:
    task = Task.make(tmp_path)
    common = {"trainer__total_training_steps": NUM_STEPS, "trainer__export_final": True}
    whole = run(task.config("whole", **common), mesh_of(DEVICES), RANKS)
    config = task.config("parts", trainer__save_freq=1, trainer__async_save=True, **common)
    with pytest.raises(RankFailed) as failure:
        run_ranks(RANKS, train_until_step_3_is_being_written, config)
    assert failure.value.tracebacks[1] == "exit status -9"
    checkpoints = Path(config.trainer.run_dir) / "checkpoints"
    assert {path.name for path in checkpoints.iterdir()} == {"step_1", "step_2", ".step_3.part"}
    resumed = run(config, mesh_of(DEVICES), RANKS)
    assert {path.name for path in checkpoints.iterdir()} == {"step_3", "step_4"}
    assert [line["step"] for line in resumed] == [1, 2, 3, 4]
    for line, expected in zip(resumed, whole, strict=True):
        assert [line[name] for name in UNTIMED] == [expected[name] for name in UNTIMED], line["step"]
    before, after = (load_file(tmp_path / "runs" / name / "hf" / "model.safetensors") for name in ("whole", "parts"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def train_until_the_disk_is_full(config: PPOConfig) -> None:
    """Rank 1's is, as soon as there is one checkpoint."""
    train_module.BYSTANDER_SECONDS = 0.2
    if os.environ["RANK"] == "1":
        published = Path(config.trainer.run_dir) / "checkpoints" / "step_1"

        def fill() -> None:
            while not published.exists():
                time.sleep(0.01)
            resource.setrlimit(resource.RLIMIT_FSIZE, (FULL, FULL))

        threading.Thread(target=fill, daemon=True).start()
    train(config, mesh_of(DEVICES))


def test_a_full_disk_ends_the_run_at_a_step_s_end_with_file_and_remedy(tmp_path: Path) -> None:
    task = Task.make(tmp_path)
    config = task.config("full", trainer__save_freq=1, trainer__async_save=True, trainer__total_training_steps=200)
    with pytest.raises(RankFailed) as failure:
        run_ranks(RANKS, train_until_the_disk_is_full, config)
    ends = failure.value.tracebacks
    assert set(ends) == set(range(RANKS))
    told = [end for end in ends.values() if "SharedError" in end]
    assert told
    for end in told:
        assert re.search(
            r"trainer\.run_dir: \S+/\.step_\d+\.part/\w+/__1_0\.distcp cannot be written: File too large", end
        )
        assert "Make room there" in end
    for end in set(ends.values()) - set(told):
        assert re.search(r"Connection closed by peer|Connection reset by peer|Broken pipe", end), end
