"""Checkpoints that are written while training goes on: the same as others, and never half a one."""

from __future__ import annotations

import os
import re
import resource
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from scripts.make_tiny_model import make_tiny_model
from tests.support.engines import Layout, assert_equal, learnt, make_engines, merged, placed, train
from tests.support.jobs import wait_until
from tests.support.ranks import RankFailed, run_ranks
from verl.engine import shards
from verl.engine.background import Background
from verl.engine.checkpoint import Checkpoints
from verl.errors import SharedError
from verl.flow.job import Job, start_job
from verl.flow.placement import Placement

pytestmark = pytest.mark.dist

TWO: Layout = {"actor": (0, 1), "critic": (0, 1)}
LAYOUTS: dict[str, tuple[int, Layout]] = {
    "one rank": (1, {"actor": (0,), "critic": (0,)}),
    "two, the critic on one, in a job of three": (3, {"actor": (2, 1), "critic": (1,)}),
    "two stages of TP 2, and FSDP 2": (
        4,
        {"actor": Placement("actor", (3, 1, 0, 2), tp=2, pp=2), "critic": Placement("critic", (2, 3))},
    ),
}
ITEM_SECONDS = 0.01
"""That a slow disk takes for a tensor; a model has some dozens."""
FULL = 60_000
"""Bytes that a file may have on a disk that is full: less than a rank's shards."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {
        "actor": make_tiny_model(folder / "tied", num_layers=2, tied=True),
        "critic": make_tiny_model(folder / "untied", "qwen3", num_layers=2, seed=1),
    }


def begin(
    layout: Layout, models: dict[str, Path], run_dir: Path, timeout: float = 30.0
) -> tuple[Job, Any, Checkpoints]:
    """(job, trained engines, checkpoints that are written in the background)"""
    job = start_job(stage_timeout=timeout, check_program=True)
    checkpoints = Checkpoints(run_dir, 0, job, background=Background(job, placed(layout)))
    engines = make_engines(job, layout, models)
    train(engines, 1)
    return job, engines, checkpoints


def slow_disk() -> None:
    """From now on each tensor takes its time."""
    resolve = shards._SavePlanner.resolve_data

    def slowly(planner: Any, item: Any) -> Any:
        time.sleep(ITEM_SECONDS)
        return resolve(planner, item)

    shards._SavePlanner.resolve_data = slowly  # type: ignore[method-assign]


def steps(run_dir: Path) -> set[str]:
    """None before the first save has made the folder."""
    return {path.name for path in (run_dir / "checkpoints").glob("*")}


# -- what is in it -----------------------------------------------------------------------------------------------------


def save_twice_and_train(layout: Layout, models: dict[str, Path], run_dir: Path) -> tuple[Any, Any]:
    """What was learnt at the time of each save, while later steps changed it during the writing."""
    job, engines, checkpoints = begin(layout, models, run_dir)
    slow_disk()
    found = []
    for step in (1, 2):
        checkpoints.save(step, engines, {"step": step}, {"random": bytes([step, job.rank])})
        found.append({role: learnt(engine) for role, engine in engines.items()})
        train(engines, 1)
    assert "step_2" not in steps(run_dir), "training has waited for the disk"
    checkpoints.finish()
    job.close()
    return found[0], found[1]


def load(layout: Layout, models: dict[str, Path], folder: Path) -> tuple[Any, dict[str, Any], Any]:
    job = start_job(stage_timeout=30, check_program=True)
    engines = make_engines(job, layout, models)
    checkpoints = Checkpoints(folder.parent.parent, 0, job)
    trainer_state, rank_state = checkpoints.load(checkpoints.at(folder), engines)
    found = {role: learnt(engine) for role, engine in engines.items()}
    job.close()
    return found, trainer_state, rank_state


@pytest.mark.parametrize("name", LAYOUTS)
def test_it_holds_what_was_learnt_when_the_step_ended(name: str, models: dict[str, Path], tmp_path: Path) -> None:
    world, layout = LAYOUTS[name]
    saved = run_ranks(world, save_twice_and_train, layout, models, tmp_path)
    for number, step in enumerate((1, 2)):
        folder = tmp_path / "checkpoints" / f"step_{step}"
        loaded = run_ranks(world, load, layout, models, folder)
        before = merged([found[number] for found in saved])
        for role, whole in merged([found for found, _, _ in loaded]).items():
            assert_equal(whole, before[role])
        assert [state for _, state, _ in loaded] == [{"step": step}] * world
        assert [state for _, _, state in loaded] == [{"random": bytes([step, rank])} for rank in range(world)]
    first, second = (merged([found[number] for found in saved])["actor"]["model.norm.weight"] for number in (0, 1))
    assert not torch.equal(first, second)


# -- who waits ---------------------------------------------------------------------------------------------------------


def save_and_look(models: dict[str, Path], run_dir: Path) -> tuple[set[str], set[str], float, float]:
    """(what there is after the first save returned; after the second one did; seconds of the first; of waiting)"""
    job, engines, checkpoints = begin(TWO, models, run_dir)
    slow_disk()
    job.everywhere(None)
    begun = time.monotonic()
    checkpoints.save(1, engines, {}, {})
    first, seconds = steps(run_dir), time.monotonic() - begun
    checkpoints.save(2, engines, {}, {})
    second = steps(run_dir)
    begun = time.monotonic()
    checkpoints.finish()
    waited = time.monotonic() - begun
    job.close()
    return first, second, seconds, waited


def test_a_save_waits_for_the_one_before_and_the_end_of_the_run_for_the_last(
    models: dict[str, Path], tmp_path: Path
) -> None:
    for rank, (first, second, seconds, waited) in enumerate(run_ranks(2, save_and_look, models, tmp_path)):
        assert "step_1" not in first and seconds < waited
        assert "step_2" not in second
        assert rank != 0 or "step_1" in second, "rank 0 publishes, and begins no other one before"
    assert steps(tmp_path) == {"step_1", "step_2"}


# -- what goes wrong ---------------------------------------------------------------------------------------------------


def killed_while_it_writes(models: dict[str, Path], run_dir: Path) -> None:
    job, engines, checkpoints = begin(TWO, models, run_dir)
    checkpoints.save(1, engines, {}, {})
    checkpoints.finish()
    slow_disk()
    checkpoints.save(2, engines, {}, {})
    if job.rank == 1:
        file = run_dir / "checkpoints" / ".step_2.part" / "critic" / "__1_0.distcp"
        wait_until(lambda: file.exists() and file.stat().st_size > 0, 20, lambda: "it writes nothing")
        os.kill(os.getpid(), signal.SIGKILL)
    while True:
        train(engines, 1)


def test_a_rank_that_is_killed_while_it_writes_leaves_the_last_whole_one(
    models: dict[str, Path], tmp_path: Path
) -> None:
    with pytest.raises(RankFailed) as failure:
        run_ranks(2, killed_while_it_writes, models, tmp_path)
    assert failure.value.tracebacks[1] == "exit status -9"
    assert steps(tmp_path) == {"step_1", ".step_2.part"}
    assert run_ranks(2, newest, tmp_path) == [1, 1]
    assert steps(tmp_path) == {"step_1"}


def newest(run_dir: Path) -> int:
    job = start_job(stage_timeout=30, check_program=True)
    checkpoints = Checkpoints(run_dir, 0, job)
    checkpoints.prepare()
    found = checkpoints.latest()
    job.close()
    assert found is not None
    return found.step


def fill_the_disk(run_dir: Path) -> None:
    """For rank 1 alone."""
    if os.environ["RANK"] == "1":
        resource.setrlimit(resource.RLIMIT_FSIZE, (FULL, FULL))


def put_a_file_in_the_way(run_dir: Path) -> None:
    if os.environ["RANK"] == "0":
        (run_dir / "checkpoints" / ".step_2.part").write_text("in the way")


def save_where_the_disk_refuses(spoil: Callable[[Path], None], models: dict[str, Path], run_dir: Path) -> str:
    job, engines, checkpoints = begin(TWO, models, run_dir)
    checkpoints.save(1, engines, {}, {})
    checkpoints.finish()
    spoil(run_dir)
    job.everywhere(None)
    checkpoints.save(2, engines, {}, {})
    try:
        while True:
            checkpoints.raise_if_failed()
            time.sleep(0.05)
    except SharedError as error:
        message = str(error)
    with pytest.raises(SharedError):
        checkpoints.finish()
    with pytest.raises(SharedError):
        checkpoints.save(3, engines, {}, {})
    return message


@pytest.mark.parametrize(
    ("spoil", "file", "why"),
    [
        (fill_the_disk, ".step_2.part/actor/__1_0.distcp", "File too large"),
        (put_a_file_in_the_way, ".step_2.part", "Not a directory"),
    ],
    ids=["full disk", "folder that cannot be made"],
)
def test_a_disk_that_refuses_ends_the_run_on_every_rank_with_file_and_remedy(
    spoil: Callable[[Path], None], file: str, why: str, models: dict[str, Path], tmp_path: Path
) -> None:
    for message in run_ranks(2, save_where_the_disk_refuses, spoil, models, tmp_path):
        assert f"trainer.run_dir: {tmp_path}/checkpoints/{file} cannot be written: {why}" in message
        assert "Make room" in message and "trainer.keep_checkpoints" in message
    assert "step_1" in steps(tmp_path) and not {"step_2", "step_3"} & steps(tmp_path)
    if spoil is fill_the_disk:
        assert run_ranks(2, newest, tmp_path) == [1, 1]


def hang_while_writing(models: dict[str, Path], run_dir: Path) -> None:
    """Rank 1's disk never answers; both ranks have come to the end of the run."""
    job, engines, checkpoints = begin({"actor": (0, 1)}, models, run_dir, timeout=2.0)
    if job.rank == 1:
        shards._SavePlanner.resolve_data = lambda *_: time.sleep(60)  # type: ignore[assignment, method-assign]
    checkpoints.save(1, engines, {}, {})
    job.board.at("save_checkpoint")
    checkpoints.finish()


def test_a_disk_that_hangs_ends_the_job_and_its_rank_is_named(
    models: dict[str, Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(RankFailed):
        run_ranks(2, hang_while_writing, models, tmp_path, timeout=30)
    said = capfd.readouterr().err
    assert set(re.findall(r"rank (\d) has shown no sign of life", said)) == {"1"}
    assert "rank 0: save_checkpoint: writes step_1: waits for its shards of actor from rank 1 (for " in said
    assert "rank 1: save_checkpoint: writes step_1 (for " in said


def fail_in_the_thread(models: dict[str, Path], run_dir: Path) -> None:
    """What nobody foresees, on rank 1."""
    job, engines, checkpoints = begin(TWO, models, run_dir)
    if job.rank == 1:
        checkpoints._write_share = lambda *_: {}["a fault of the program"]  # type: ignore[method-assign]
    checkpoints.save(1, engines, {}, {})
    checkpoints.finish()


def test_an_error_in_the_thread_is_raised_with_its_traceback(models: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(RankFailed) as failure:
        run_ranks(2, fail_in_the_thread, models, tmp_path)
    assert "KeyError: 'a fault of the program'" in failure.value.tracebacks[1]
    assert "_run" in failure.value.tracebacks[1], "from the thread"
    assert "step_1" not in steps(tmp_path)
