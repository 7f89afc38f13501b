"""Faults in the middle of real runs: the job ends in time, the rank that is to blame is named, no process is left."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.faults import Fault
from tests.support.jobs import MARK, Job, started, wait_until
from tests.support.ranks import RankFailed, run_ranks
from tests.support.runs import Task, mesh_of
from verl import train as train_module
from verl.config import PPOConfig
from verl.train import train

pytestmark = [pytest.mark.dist, pytest.mark.timeout(200)]

DEVICES = {"actor": [2, 3], "critic": [1], "reference": [0], "reward": [1], "rollout": [2]}
RANKS = 4
LIMIT = 4.0
"""trainer.stage_timeout where a rank hangs."""
SLACK = 20.0
"""What starting and ending may take on a busy machine."""

RAISES = [
    Fault("raise", "gen", 2, visit=2),
    Fault("raise", "old_log_prob", 3),
    Fault("raise", "values", 1),
    Fault("raise", "ref", 0),
    Fault("raise", "reward", 1),
    Fault("raise", "adv", 1),
    Fault("raise", "update_actor", 3),
    Fault("raise", "update_critic", 1),
    Fault("raise", "reshard", 2, visit=2),
    Fault("raise", "reshard", 3, visit=2),
    Fault("raise", "save_checkpoint", 0),
    Fault("raise", "save_checkpoint", 3),
]
HANGS = [
    Fault("hang", "gen", 2),
    Fault("hang", "update_actor", 3),
    Fault("hang", "save_checkpoint", 3),
    *(
        pytest.param(Fault("hang", stage, rank), marks=pytest.mark.slow)
        for stage, rank in [
            ("old_log_prob", 2),
            ("values", 1),
            ("ref", 0),
            ("reward", 1),
            ("adv", 1),
            ("update_critic", 1),
            ("reshard", 2),
            ("reshard", 3),
        ]
    ),
]


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Task:
    return Task.make(tmp_path_factory.mktemp("faults"), num_prompts=8)


@pytest.fixture(autouse=True)
def no_process_is_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Reward workers are the children that a rank of run_ranks could leave behind; they inherit the mark."""
    mark = f"{os.getpid()} {time.time()}"
    monkeypatch.setenv(MARK, mark)
    yield
    wait_until(lambda: not marked(mark), 10.0, lambda: f"left behind: {marked(mark)}")


def marked(mark: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


def settings(task: Task, name: str, **changes: Any) -> PPOConfig:
    return task.config(
        name,
        data__train_batch_size=2,
        trainer__save_freq=0,
        trainer__total_training_steps=2,
        trainer__progress=False,
        **changes,
    )


def run_with_fault(fault: Fault, config: PPOConfig) -> None:
    """In a rank. Where torchrun looks after the ranks, it ends those that have lost a peer before they fail too."""
    fault.install()
    train_module.BYSTANDER_SECONDS = 0.2
    train(config, mesh_of(DEVICES))


def fail(fault: Fault, config: PPOConfig, limit: float) -> dict[int, str]:
    """How each rank ended."""
    begin = time.monotonic()
    with pytest.raises(RankFailed) as caught:
        run_ranks(RANKS, run_with_fault, fault, config, timeout=60)
    assert time.monotonic() - begin < limit
    return caught.value.tracebacks


@pytest.mark.parametrize("fault", RAISES, ids=str)
def test_an_exception_on_one_rank_ends_the_job_and_no_other_rank_has_one_of_its_own(fault: Fault, task: Task) -> None:
    ends = fail(fault, settings(task, str(fault)), limit=SLACK)
    assert f"InjectedError: in {fault.stage} on rank {fault.rank}" in ends[fault.rank]
    assert set(ends) == set(range(RANKS))
    for rank in set(ends) - {fault.rank}:
        assert re.search(r"Connection closed by peer|Connection reset by peer|Broken pipe", ends[rank]), ends[rank]


@pytest.mark.parametrize("fault", HANGS, ids=lambda fault: str(fault))
def test_a_rank_that_hangs_is_named_with_its_stage_beside_all_others(
    fault: Fault, task: Task, capfd: pytest.CaptureFixture[str]
) -> None:
    fail(fault, settings(task, str(fault), trainer__stage_timeout=LIMIT), limit=LIMIT + SLACK)
    said = capfd.readouterr().err
    assert set(re.findall(r"rank (\d) has shown no sign of life", said)) == {str(fault.rank)}, said
    assert "for trainer.stage_timeout = 4 s. Where every rank is:" in said
    assert f"  rank {fault.rank}: {fault.stage} (for " in said
    assert all(f"  rank {rank}: " in said for rank in range(RANKS))


def test_a_rank_that_is_killed_ends_the_others(task: Task) -> None:
    ends = fail(Fault("kill", "update_critic", 1), settings(task, "killed"), limit=SLACK)
    assert ends[1] == "exit status -9"
    assert all("RuntimeError" in ends[rank] for rank in (0, 2, 3))


# -- under torchrun --------------------------------------------------------------------------------------------------

FAULTY = Path(__file__).parents[1] / "support" / "faulty_train_ppo.py"
SMALL = {"actor": [2, 1], "critic": [0], "reference": [0], "reward": [0], "rollout": [2]}
"""Three ranks; the two of the actor speak with each other in the middle of an update."""
START = 120.0
"""Seconds that three interpreters may take to import torch and transformers on a busy machine."""


def torchrun_settings(task: Task, name: str, **changes: Any) -> PPOConfig:
    mesh: dict[str, dict[str, Any]] = {role: {"devices": d, "dtype": "float32"} for role, d in SMALL.items()}
    mesh["rollout"]["backend"] = "torch"
    return settings(task, name, device_mesh=mesh, **changes)


def end_under_torchrun(fault: Fault, task: Task, folder: Path, **changes: Any) -> tuple[str, str]:
    """(what the ranks said, torchrun's root cause)"""
    config = torchrun_settings(task, f"torchrun {fault}", **changes)
    with started(config, folder, ranks=3, script=FAULTY, VERL_TEST_FAULT=str(fault)) as job:
        assert job.wait(START + SLACK) == 1
        job.assert_nothing_left()
        said, _, root_cause = job.stderr.partition("Root Cause")
        return said, root_cause


FIRST = Fault("raise", "update_actor", 2)


@pytest.mark.parametrize(
    "fault", [FIRST, *(pytest.param(fault, marks=pytest.mark.slow) for fault in RAISES if fault.rank < 3)], ids=str
)
def test_torchrun_names_the_rank_that_raised(fault: Fault, task: Task, tmp_path: Path) -> None:
    fault = Fault(fault.how, fault.stage, _serving(fault.stage), fault.visit)
    _, root_cause = end_under_torchrun(fault, task, tmp_path)
    assert f"rank      : {fault.rank} (local_rank: {fault.rank})" in root_cause
    assert f"InjectedError: in {fault.stage} on rank {fault.rank}" in root_cause


def _serving(stage: str) -> int:
    """A rank of the small mesh that goes through a stage."""
    return {"gen": 2, "old_log_prob": 1, "update_actor": 2, "reshard": 2, "save_checkpoint": 1}.get(stage, 0)


def test_torchrun_shows_who_hangs(task: Task, tmp_path: Path) -> None:
    fault = Fault("hang", "update_actor", 1)
    said, root_cause = end_under_torchrun(fault, task, tmp_path, trainer__stage_timeout=LIMIT)
    for text in (said, root_cause):
        assert "rank 1 has shown no sign of life for trainer.stage_timeout = 4 s. Where every rank is:" in text
        assert "  rank 1: update_actor (for " in text
        assert "  rank 2: update_actor: waits for the others' part from rank 1 (for " in text


def test_torchrun_names_the_rank_that_was_killed(task: Task, tmp_path: Path) -> None:
    _, root_cause = end_under_torchrun(Fault("kill", "values", 0), task, tmp_path)
    assert "rank      : 0 (local_rank: 0)" in root_cause and "SIGKILL" in root_cause


def test_sigterm_to_torchrun_ends_everything(task: Task, tmp_path: Path) -> None:
    """Also a reward worker that is in the middle of a sample, and what that sample has started."""
    (tmp_path / "slow.py").write_text(
        "import subprocess\ndef compute_score(**_):\n    subprocess.run(['sleep', '1000'])\n    return 0.0\n"
    )
    reward = f"{tmp_path / 'slow.py'}:compute_score"
    config = torchrun_settings(task, "terminated", reward__function__path=reward, reward__function__timeout=500.0)
    with started(config, tmp_path / "job", ranks=3) as job:
        wait_until(lambda: bool(job.find("sleep 1000")) or _ended(job), START, lambda: job.stderr[-3000:])
        assert job.find("verl.rewards.worker")
        job.process.send_signal(signal.SIGTERM)
        assert job.wait(SLACK) != 0
        job.assert_nothing_left()


# -- one process -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_one_process_that_is_interrupted_takes_its_children_along(
    number: signal.Signals, task: Task, tmp_path: Path
) -> None:
    (tmp_path / "slow.py").write_text("import time\ndef compute_score(**_):\n    time.sleep(1000)\n    return 0.0\n")
    config = settings(
        task,
        f"interrupted {number}",
        reward__function__path=f"{tmp_path / 'slow.py'}:compute_score",
        reward__function__timeout=500.0,
        device_mesh={
            role: {"devices": [0], "backend": "torch"} if role == "rollout" else {"devices": [0]} for role in SMALL
        },
    )
    with started(config, tmp_path / "job") as job:
        wait_until(lambda: bool(job.find("verl.rewards.worker")) or _ended(job), START, lambda: job.stderr[-3000:])
        time.sleep(3.0)  # into the first step
        job.process.send_signal(number)
        code = job.wait(SLACK)
        job.assert_nothing_left()
        assert code in ({-signal.SIGINT, 130, 1} if number is signal.SIGINT else {-signal.SIGTERM})
        assert "KeyboardInterrupt" in job.stderr or number is signal.SIGTERM


def _ended(job: Job) -> bool:
    return job.process.poll() is not None
