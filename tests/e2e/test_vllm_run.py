"""Runs whose rollout is vLLM on the CPU, in fp32: its own log-probs of its samples are those of the trainer."""

from __future__ import annotations

import contextlib
import re
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.jobs import MARK, started
from tests.support.runs import Task, mesh_of, run
from verl.config import PPOConfig
from verl.generation.vllm.probe import probe

pytestmark = [
    pytest.mark.dist,
    pytest.mark.vllm,
    pytest.mark.skipif(not probe("cpu").usable, reason=probe("cpu").message),
    pytest.mark.timeout(900),
]

SHARED = {"actor": [0], "critic": [1], "rollout": [0, 1]}
APART = {"actor": [0], "critic": [0], "rollout": [1]}
START = 600.0
"""Seconds that an engine may take to start on a busy machine."""


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Task:
    return Task.make(tmp_path_factory.mktemp("vllm"))


def settings(task: Task, name: str, **changes: Any) -> PPOConfig:
    # steps that are large, so that weights of the step before would be noticed
    return task.config(name, trainer__stage_timeout=300.0, actor__optim__lr=1e-2, **changes)


@pytest.mark.parametrize("tensor_parallel_size", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_the_engine_samples_with_the_trainers_weights_of_each_step(
    tensor_parallel_size: int, task: Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two replicas, or one of two workers, share their devices with actor and critic."""
    monkeypatch.setenv(MARK, str(tmp_path))
    mesh = mesh_of(SHARED, backend="vllm", tensor_parallel_size=tensor_parallel_size)
    config = settings(task, f"tp {tensor_parallel_size}", data__val_files=[str(task.folder / "val.jsonl")])
    lines = run(config, mesh, 2, timeout=START + 100)
    trained = [line for line in lines if "actor/pg_loss" in line]
    assert [line["step"] for line in trained] == [1, 2]
    for line in trained:
        assert line["rollout/logprob_gap_mean"] <= 1e-4
        assert line["rollout/logprob_gap_max"] <= 1e-3
        assert line["actor/grad_norm"] > 0
    validated = [line for line in lines if "val/score/mean" in line]
    assert [line["step"] for line in validated] == [0, 2]
    assert all(line["val/score/mean"] > 0 and line["val/sampled_score/mean"] > 0 for line in validated)
    assert not engines(tmp_path), "the engines are gone as soon as the ranks are"


def engines(mark: Path) -> list[psutil.Process]:
    """Living engine processes of the run that bears this mark."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(MARK) == str(mark) and "verl.generation.vllm.entry" in process.cmdline():
                found.append(process)
    return found


def test_an_engine_that_is_killed_ends_the_job_and_shows_its_log(task: Task, tmp_path: Path) -> None:
    mesh: dict[str, Any] = {role: {"devices": devices, "dtype": "float32"} for role, devices in APART.items()}
    mesh["rollout"]["backend"] = "vllm"
    config = settings(task, "killed", device_mesh=mesh, trainer__total_training_steps=100_000)
    with started(config, tmp_path, ranks=2) as job:
        job.wait_for_line("step 2/", START)
        (engine,) = job.find("verl.generation.vllm.entry")
        engine.send_signal(signal.SIGKILL)
        assert job.wait(300.0) == 1
        job.assert_nothing_left()
        root_cause = job.stderr.partition("Root Cause")[2]
        assert "rank      : 1 (local_rank: 1)" in root_cause
        assert re.search(r"EngineError: rollout replica 0 of rank 1: the engine ended while \w+", root_cause)
        assert f"Process {engine.pid} was killed by signal 9, SIGKILL" in root_cause
        assert f"The end of its log, {config.trainer.run_dir}/logs/vllm_0.log:" in root_cause
        assert "reset prefix cache" in root_cause, "what it did last"
