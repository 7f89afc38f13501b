"""A job of one process is an ordinary script: a debugger works, a large mesh folds into it, runs follow each other."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.jobs import TRAIN_PPO, started_command, write_config
from tests.support.ranks import run_ranks
from tests.support.runs import Task, mesh_of, metrics
from verl import ppo
from verl.cli import command_line
from verl.config import PPOConfig
from verl.train import train

pytestmark = [pytest.mark.dist, pytest.mark.timeout(900)]

FOUR = {"actor": [3, 2], "critic": [1], "reference": [0], "reward": [1], "rollout": [2, 3]}


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Task:
    return Task.make(tmp_path_factory.mktemp("alone"), num_prompts=8)


def settings(task: Task, name: str, devices: dict[str, list[int]], **changes: Any) -> PPOConfig:
    mesh: dict[str, Any] = {role: {"devices": listed, "dtype": "float32"} for role, listed in devices.items()}
    mesh["rollout"]["backend"] = "torch"
    changes = {"data__train_batch_size": 2, "trainer__progress": False, "trainer__total_training_steps": 2} | changes
    return task.config(name, device_mesh=mesh, **changes)


def on_one_device() -> dict[str, list[int]]:
    return {role: [0] for role in FOUR}


def pdb(config: PPOConfig, folder: Path, commands: str) -> str:
    """What train_ppo.py and the debugger say."""
    command = ["-m", "pdb", str(TRAIN_PPO), "--config", str(write_config(config, folder / "config.yaml"))]
    with started_command(command, folder, stdin=commands) as job:
        job.wait(600)
        job.assert_nothing_left()
        return job.stdout + job.stderr


def test_a_breakpoint_in_the_step_works(task: Task, tmp_path: Path) -> None:
    file = Path(ppo.__file__)
    line = next(
        n for n, text in enumerate(file.read_text().splitlines(), 1) if "metrics = judge.with_advantages(" in text
    )
    config = settings(task, "debugged", on_one_device())
    commands = (
        f"b verl/ppo.py:{line}\nc\np prompts.step, responses.response_ids.size\nc\np 10 + prompts.step\ncl 1\nc\nq\n"
    )
    said = pdb(config, tmp_path, commands)
    assert f"Breakpoint 1 at {file}:{line}" in said
    assert "(0, 4)" in said, "at the first step: two prompts, two responses each"
    assert "(Pdb) 11" in said, "and at the second"
    assert "The program exited via sys.exit(). Exit status: 0" in said
    assert [entry["step"] for entry in metrics(Path(config.trainer.run_dir))] == [1, 2]


def run_command(*arguments: str) -> int:
    """train_ppo.py's exit code, in a process that torchrun has not started."""
    del os.environ["RANK"]
    sys.argv = [str(TRAIN_PPO), *arguments]
    return command_line.run(train, arguments)


def test_a_mesh_of_four_devices_collapses_into_one_process(task: Task, tmp_path: Path) -> None:
    file = write_config(settings(task, "collapsed", FOUR), tmp_path / "config.yaml")
    assert run_ranks(1, run_command, "--config", str(file), "debug.collapse_mesh=true") == [0]
    alone = settings(task, "not collapsed", on_one_device())
    run_ranks(1, train, alone, mesh_of(on_one_device()))
    collapsed, expected = (metrics(task.folder / "runs" / name) for name in ("collapsed", "not collapsed"))
    for name in ("actor/pg_loss", "critic/vf_loss", "actor/grad_norm", "response_length/mean"):
        assert [line[name] for line in collapsed] == [line[name] for line in expected]


def test_multirun_trains_one_after_the_other(task: Task, tmp_path: Path) -> None:
    file = write_config(settings(task, "sweep", on_one_device()), tmp_path / "config.yaml")
    argv = ("--config", str(file), "--multirun", "actor.optim.lr=1e-3,1e-2", "trainer.trackers=[tensorboard]")
    assert run_ranks(1, run_command, *argv) == [0]
    folder = task.folder / "runs" / "sweep"
    slow, fast = (metrics(folder / f"actor.optim.lr={rate}") for rate in ("0.001", "0.01"))
    assert [line["actor/lr"] for line in slow + fast] == [1e-3, 1e-3, 1e-2, 1e-2]
    assert slow[0]["actor/pg_loss"] == fast[0]["actor/pg_loss"], "both start afresh"
    assert slow[1]["actor/pg_loss"] != fast[1]["actor/pg_loss"]


def test_multirun_goes_on_after_a_job_that_is_refused(
    task: Task, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = write_config(settings(task, "partly", on_one_device()), tmp_path / "config.yaml")
    argv = ("--config", str(file), "--multirun", "data.max_prompt_length=2,64", "trainer.total_training_steps=1")
    assert run_ranks(1, run_command, *argv) == [2]
    assert capfd.readouterr().err.count("job 0: No prompt of data.train_files is left") == 1
    assert len(metrics(task.folder / "runs" / "partly" / "data.max_prompt_length=64")) == 1
