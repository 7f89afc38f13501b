"""Faults in the middle of real runs: the job ends in time, the rank that is to blame is named, no process is left."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.faults import FOR_EVER, Fault
from tests.support.jobs import MARK, Job, started, wait_until
from tests.support.ranks import RankFailed, run_ranks
from tests.support.runs import Task, mesh_of
from tests.support.stalls import announce_hang, watch_for_hangs_alone, withdraw_hang
from verl import train as train_module
from verl.config import PPOConfig
from verl.monitor.stages import Stages
from verl.rewards.pool import RewardPool
from verl.roles import folders
from verl.train import train

pytestmark = [pytest.mark.dist, pytest.mark.timeout(900)]

DEVICES = {"actor": [2, 3], "critic": [1], "reference": [0], "reward": [1], "rollout": [2]}
RANKS = 4
LIMIT = 4.0
"""trainer.stage_timeout where a rank hangs."""
END = 120.0
"""Seconds that a job may take to end on a busy machine."""

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
    wait_until(lambda: not marked(mark), END, lambda: f"left behind: {marked(mark)}")


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
        **({"trainer__stage_timeout": 10 * END} | changes),  # an end must not be left to it
    )


def run_with_fault(fault: Fault, config: PPOConfig) -> None:
    """In a rank. Where torchrun looks after the ranks, it ends those that have lost a peer before they fail too."""
    fault.install()
    train_module.BYSTANDER_SECONDS = 0.2
    train(config, mesh_of(DEVICES))


def fail(fault: Fault, config: PPOConfig) -> dict[int, str]:
    """How each rank ended."""
    with pytest.raises(RankFailed) as caught:
        run_ranks(RANKS, run_with_fault, fault, config, grace=0.0 if fault.how == "hang" else END)
    return caught.value.tracebacks


@pytest.mark.parametrize("fault", RAISES, ids=str)
def test_an_exception_on_one_rank_ends_the_job_and_no_other_rank_has_one_of_its_own(fault: Fault, task: Task) -> None:
    ends = fail(fault, settings(task, str(fault)))
    assert f"InjectedError: in {fault.stage} on rank {fault.rank}" in ends[fault.rank]
    assert set(ends) == set(range(RANKS))
    for rank in set(ends) - {fault.rank}:
        assert re.search(r"Connection closed by peer|Connection reset by peer|Broken pipe", ends[rank]), ends[rank]


@pytest.mark.parametrize("fault", HANGS, ids=str)
def test_a_rank_that_hangs_is_named_with_its_stage_beside_all_others(
    fault: Fault, task: Task, capfd: pytest.CaptureFixture[str]
) -> None:
    fail(fault, settings(task, str(fault), trainer__stage_timeout=LIMIT))
    said = capfd.readouterr().err
    assert set(re.findall(r"rank (\d) has shown no sign of life", said)) == {str(fault.rank)}, said
    assert "for trainer.stage_timeout = 4 s. Where every rank is:" in said
    assert f"  rank {fault.rank}: {fault.stage} (for " in said
    assert all(f"  rank {rank}: " in said for rank in range(RANKS))


def raise_with_children_that_stay(config: PPOConfig) -> None:
    Fault("raise", "values", 1).install()
    train_module.EXIT_SECONDS = 1.0
    RewardPool.close = lambda pool: time.sleep(FOR_EVER)  # type: ignore[method-assign, assignment]
    train(config, mesh_of(DEVICES))


def test_a_clean_up_that_hangs_loses_no_error(task: Task, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RankFailed) as caught:
        run_ranks(RANKS, raise_with_children_that_stay, settings(task, "stays"), grace=END)
    assert "exit status 1" in caught.value.tracebacks[1], "by force"
    assert "InjectedError: in values on rank 1" in capfd.readouterr().err


SLOW = "import time\ndef compute_score(**_):\n    time.sleep(0.4)\n    return 0.5\n"


def score_slowly(config: PPOConfig) -> None:
    """The watchdog looks at the rewards alone."""
    watch_for_hangs_alone()
    enter: Callable[..., Any] = Stages.__call__

    @contextmanager
    def watched(stages: Stages, name: str, role: str | None = None) -> Iterator[None]:
        with enter(stages, name, role):
            if name == "reward":
                announce_hang(1)
            yield
            if name == "reward":
                withdraw_hang()

    Stages.__call__ = watched  # type: ignore[method-assign, assignment]
    train(config, mesh_of(DEVICES))


def test_a_reward_function_that_is_slow_is_no_hang(task: Task) -> None:
    """Sixteen samples one after the other take longer than the limit, each of them much less."""
    (task.folder / "slow.py").write_text(SLOW)
    reward = f"{task.folder / 'slow.py'}:compute_score"
    changes = {"trainer__stage_timeout": 5.0, "reward__function__path": reward, "rollout__n": 8}
    config = settings(task, "slow", **changes)
    config.trainer.total_training_steps = 1
    begin = time.monotonic()
    run_ranks(RANKS, score_slowly, config)
    assert time.monotonic() - begin > 16 * 0.4 > config.trainer.stage_timeout


def fetch_slowly(config: PPOConfig) -> None:
    find = folders.local_folder

    def local_folder(path: str, role: str, fetch: bool, of_model: bool = True) -> Path:
        if fetch:
            announce_hang(int(os.environ["RANK"]))
            time.sleep(8.0)
            withdraw_hang()
        return find(path, role, fetch, of_model)

    watch_for_hangs_alone()
    folders.local_folder = local_folder
    train(config, mesh_of(DEVICES))


@pytest.mark.slow
def test_a_download_that_takes_long_is_no_hang(task: Task) -> None:
    config = settings(task, "fetched", trainer__stage_timeout=4.0)
    config.trainer.total_training_steps = 0
    run_ranks(RANKS, fetch_slowly, config)


def test_a_rank_that_is_killed_ends_the_others(task: Task) -> None:
    ends = fail(Fault("kill", "update_critic", 1), settings(task, "killed"))
    assert ends[1] == "exit status -9"
    assert all("RuntimeError" in ends[rank] for rank in (0, 2, 3))


# -- under torchrun --------------------------------------------------------------------------------------------------

FAULTY = Path(__file__).parents[1] / "support" / "faulty_train_ppo.py"
SMALL = {"actor": [2, 1], "critic": [0], "reference": [0], "reward": [0], "rollout": [2]}
"""Three ranks; the two of the actor speak with each other in the middle of an update."""
START = 400.0
"""Seconds that three interpreters may take to import torch and transformers on a busy machine."""


def torchrun_settings(task: Task, name: str, **changes: Any) -> PPOConfig:
    mesh: dict[str, dict[str, Any]] = {role: {"devices": d, "dtype": "float32"} for role, d in SMALL.items()}
    mesh["rollout"]["backend"] = "torch"
    return settings(task, name, device_mesh=mesh, **changes)


def end_under_torchrun(fault: Fault, task: Task, folder: Path, **changes: Any) -> tuple[str, str]:
    """(what the ranks said, torchrun's root cause)"""
    config = torchrun_settings(task, f"torchrun {fault}", **changes)
    with started(config, folder, ranks=3, script=FAULTY, VERL_TEST_FAULT=str(fault)) as job:
        assert job.wait(START + END) == 1
        job.assert_nothing_left()
        said, _, root_cause = job.stderr.partition("Root Cause")
        return said, root_cause


SERVING = {
    "update_actor": 2,  # the other one loses its peer in the middle of a message, and has the lower number
    "gen": 2,
    "old_log_prob": 1,
    "values": 0,
    "ref": 0,
    "reward": 0,
    "adv": 0,
    "update_critic": 0,
    "reshard": 2,
    "save_checkpoint": 1,
}
"""A rank of the small mesh for each stage."""


@pytest.mark.parametrize(
    "stage", ["update_actor", *(pytest.param(stage, marks=pytest.mark.slow) for stage in list(SERVING)[1:])]
)
def test_torchrun_names_the_rank_that_raised(stage: str, task: Task, tmp_path: Path) -> None:
    rank = SERVING[stage]
    _, root_cause = end_under_torchrun(Fault("raise", stage, rank), task, tmp_path)
    assert f"rank      : {rank} (local_rank: {rank})" in root_cause
    assert f"InjectedError: in {stage} on rank {rank}" in root_cause


def test_torchrun_shows_who_hangs(task: Task, tmp_path: Path) -> None:
    fault = Fault("hang", "update_actor", 1)
    said, root_cause = end_under_torchrun(fault, task, tmp_path, trainer__stage_timeout=LIMIT)
    for text in (said, root_cause):
        assert "rank 1 has shown no sign of life for trainer.stage_timeout = 4 s. Where every rank is:" in text
        assert "  rank 1: update_actor (for " in text
        assert "  rank 2: update_actor: waits for the others' part from rank 1 (for " in text


@pytest.mark.slow
def test_torchrun_names_the_rank_that_was_killed(task: Task, tmp_path: Path) -> None:
    _, root_cause = end_under_torchrun(Fault("kill", "values", 0), task, tmp_path)
    assert "rank      : 0 (local_rank: 0)" in root_cause and "SIGKILL" in root_cause


def slow_reward(folder: Path) -> str:
    """A reward function that waits for a program which it has started."""
    code = "import subprocess\ndef compute_score(**_):\n    subprocess.run(['sleep', '1000'])\n    return 0.0\n"
    (folder / "slow.py").write_text(code)
    return f"{folder / 'slow.py'}:compute_score"


def wait_for_a_sample(job: Job) -> None:
    """Until the reward function is in the middle of one."""
    wait_until(lambda: bool(job.find("sleep 1000")) or _ended(job), START, lambda: job.stderr[-3000:])
    assert job.find("verl.rewards.worker"), job.stderr[-3000:]


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)], ids=["SIGTERM", "SIGINT"]
)
def test_a_signal_to_torchrun_ends_everything(number: signal.Signals, task: Task, tmp_path: Path) -> None:
    """Also the reward workers, and what they have started. A terminal sends SIGINT to all processes at once."""
    changes = {"reward__function__path": slow_reward(tmp_path), "reward__function__timeout": 500.0}
    config = torchrun_settings(task, f"ended by {number.name}", **changes)
    with started(config, tmp_path / "job", ranks=3) as job:
        wait_for_a_sample(job)
        if number is signal.SIGINT:
            os.killpg(job.process.pid, number)
        else:
            job.process.send_signal(number)
        assert job.wait(END) != 0
        job.assert_nothing_left()


# -- one process -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "codes"),
    [
        (signal.SIGINT, {-signal.SIGINT, 128 + signal.SIGINT, 1}),
        pytest.param(signal.SIGTERM, {128 + signal.SIGTERM}, marks=pytest.mark.slow),
    ],
    ids=["SIGINT", "SIGTERM"],
)
def test_one_process_that_is_interrupted_takes_its_children_along(
    number: signal.Signals, codes: set[int], task: Task, tmp_path: Path
) -> None:
    mesh: dict[str, dict[str, Any]] = {role: {"devices": [0]} for role in SMALL}
    mesh["rollout"]["backend"] = "torch"
    changes = {"reward__function__path": slow_reward(tmp_path), "reward__function__timeout": 500.0}
    config = settings(task, f"interrupted by {number.name}", device_mesh=mesh, **changes)
    with started(config, tmp_path / "job") as job:
        wait_for_a_sample(job)
        job.process.send_signal(number)
        assert job.wait(END) in codes
        job.assert_nothing_left()


def _ended(job: Job) -> bool:
    return job.process.poll() is not None
