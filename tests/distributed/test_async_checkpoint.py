"""Checkpoints that are written while training goes on: the same as others, and never half a one."""

from __future__ import annotations

import itertools
import os
import re
import resource
import signal
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.engines import Layout, actor_and_critic, assert_equal, learnt, make_engines, merged, placed, train
from tests.support.ranks import RankFailed, run_ranks
from tests.support.stalls import announce_hang, watch_for_hangs_alone
from verl.config import LoraConfig
from verl.engine import shards
from verl.engine.background import Background
from verl.engine.checkpoint import Checkpoints
from verl.errors import SharedError
from verl.flow.job import Job, start_job
from verl.flow.placement import Placement

pytestmark = pytest.mark.dist

TWO: Layout = {"actor": (0, 1), "critic": (0, 1)}
INTERLEAVED = "interleaved stages of CP 2, and of FSDP 2"
LAYOUTS: dict[str, tuple[int, Layout, Mapping[str, Any]]] = {
    "one rank": (1, {"actor": (0,), "critic": (0,)}, {}),
    "two, the critic on one, in a job of three": (3, {"actor": (2, 1), "critic": (1,)}, {}),
    "two stages of TP 2, and FSDP 2": (
        4,
        {"actor": Placement("actor", (3, 1, 0, 2), tp=2, pp=2), "critic": Placement("critic", (2, 3))},
        {},
    ),
    "two copies of two, two copies of TP 2": (
        4,
        {
            "actor": Placement("actor", (3, 1, 0, 2), fsdp_size=2),
            "critic": Placement("critic", (0, 1, 2, 3), tp=2, fsdp_size=1),
        },
        {},
    ),
    "adapters on two copies of TP 2, and on one rank": (
        4,
        {"actor": Placement("actor", (3, 1, 0, 2), tp=2, fsdp_size=1), "critic": (2,)},
        {"lora": LoraConfig(rank=3, alpha=6)},
    ),
    INTERLEAVED: (
        4,
        {"actor": Placement("actor", (3, 1, 0, 2), pp=2, cp=2), "critic": Placement("critic", (2, 3, 0, 1), pp=2)},
        {"virtual_stages": 2},
    ),
}
"""Name -> (ranks of the job, places, settings of EngineSpec)."""
HELD_SECONDS = 0.5
"""That a disk is held up while somebody waits for it: those who do not wait are gone by then."""
HANGS = 300.0
FULL = 60_000
"""Bytes that a file may have on a disk that is full: less than a rank's shards."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return actor_and_critic(tmp_path_factory.mktemp("models"), num_layers=4)


def begin(
    layout: Layout, models: dict[str, Path], run_dir: Path, timeout: float = 300.0, **settings: Any
) -> tuple[Job, Any, Checkpoints]:
    """(job, trained engines, checkpoints that are written in the background)"""
    job = start_job(stage_timeout=timeout, check_program=True)
    checkpoints = Checkpoints(run_dir, 0, job, background=Background(job, placed(layout)))
    engines = make_engines(job, layout, models, **settings)
    train(engines, 1)
    return job, engines, checkpoints


class HeldDisk:
    """From now on nothing of step 1 or 2 is written on this rank before it is let through."""

    def __init__(self) -> None:
        self._let = {step: threading.Event() for step in (1, 2)}
        start, resolve = Background.start, shards._SavePlanner.resolve_data
        writes = [0]

        def noted(background: Background, what: str, do: Callable[[], None]) -> None:
            def held() -> None:
                writes[0] = int(what.removeprefix("writes step_"))
                do()

            start(background, what, held)

        def resolve_later(planner: Any, item: Any) -> Any:
            assert self._let[writes[0]].wait(HANGS), "nobody has let it through"
            return resolve(planner, item)

        Background.start = noted  # type: ignore[method-assign]
        shards._SavePlanner.resolve_data = resolve_later  # type: ignore[method-assign]

    def let(self, step: int) -> None:
        self._let[step].set()

    def let_later(self, step: int) -> None:
        threading.Timer(HELD_SECONDS, self.let, [step]).start()


def steps(run_dir: Path) -> set[str]:
    """None before the first save has made the folder."""
    return {path.name for path in (run_dir / "checkpoints").glob("*")}


# -- what is in it -----------------------------------------------------------------------------------------------------


def save_twice_and_train(
    layout: Layout, models: dict[str, Path], run_dir: Path, settings: Mapping[str, Any]
) -> tuple[Any, Any, Any]:
    """What was learnt at the time of each save and one step later, while these steps changed it during the writing."""
    job, engines, checkpoints = begin(layout, models, run_dir, **settings)
    disk = HeldDisk()
    found = []
    for step in (1, 2):
        checkpoints.save(step, engines, {"step": step}, {"random": bytes([step, job.rank])})
        found.append({role: learnt(engine) for role, engine in engines.items()})
        train(engines, 1)
        disk.let(step)
    checkpoints.finish()
    later = {role: learnt(engine) for role, engine in engines.items()}
    job.close()
    return found[0], found[1], later


def load_and_train(
    layout: Layout, models: dict[str, Path], folder: Path, settings: Mapping[str, Any]
) -> tuple[Any, Any, dict[str, Any], Any]:
    """(what was learnt, and one step later; state of the run and of the rank)"""
    job = start_job(stage_timeout=300, check_program=True)
    engines = make_engines(job, layout, models, **settings)
    checkpoints = Checkpoints(folder.parent.parent, 0, job)
    trainer_state, rank_state = checkpoints.load(checkpoints.at(folder), engines)
    found = {role: learnt(engine) for role, engine in engines.items()}
    train(engines, 1)
    later = {role: learnt(engine) for role, engine in engines.items()}
    job.close()
    return found, later, trainer_state, rank_state


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name == INTERLEAVED else []) for name in LAYOUTS]
)
def test_a_run_goes_on_from_what_was_learnt_when_the_step_ended(
    name: str, models: dict[str, Path], tmp_path: Path
) -> None:
    """Bit for bit, with what the undisturbed run learns next."""
    world, layout, settings = LAYOUTS[name]
    saved = run_ranks(world, save_twice_and_train, layout, models, tmp_path, settings)
    at_steps = [merged(found) for found in zip(*saved, strict=True)]
    for step in (1, 2) if world == 1 else (2,):  # the second is copied to where the first one was
        folder = tmp_path / "checkpoints" / f"step_{step}"
        loaded = run_ranks(world, load_and_train, layout, models, folder, settings)
        for when, ranks in enumerate(zip(*(found[:2] for found in loaded), strict=True)):
            for role, whole in merged(ranks).items():
                assert_equal(whole, at_steps[step - 1 + when][role])
        assert [state for _, _, state, _ in loaded] == [{"step": step}] * world
        assert [state for *_, state in loaded] == [{"random": bytes([step, rank])} for rank in range(world)]
    for first, second in itertools.pairwise(whole["actor"] for whole in at_steps):
        assert any(not torch.equal(first[name], second[name]) for name in first)


# -- who waits ---------------------------------------------------------------------------------------------------------


def save_and_look(models: dict[str, Path], run_dir: Path) -> list[set[str]]:
    """What there is after the first save, after the second one, and after the end."""
    job, engines, checkpoints = begin(TWO, models, run_dir)
    disk, found = HeldDisk(), []
    checkpoints.save(1, engines, {}, {})
    found.append(steps(run_dir))
    disk.let_later(1)
    checkpoints.save(2, engines, {}, {})
    found.append(steps(run_dir))
    disk.let_later(2)
    checkpoints.finish()
    found.append(steps(run_dir))
    job.close()
    return found


def test_a_save_waits_for_the_one_before_and_the_end_of_the_run_for_the_last(
    models: dict[str, Path], tmp_path: Path
) -> None:
    for rank, (first, second, third) in enumerate(run_ranks(2, save_and_look, models, tmp_path)):
        assert "step_1" not in first
        assert "step_2" not in second
        if rank == 0:
            assert "step_1" in second, "rank 0 publishes, and begins no other one before"
            assert "step_2" in third
    assert steps(tmp_path) == {"step_1", "step_2"}


# -- what goes wrong ---------------------------------------------------------------------------------------------------


def killed_while_it_writes(models: dict[str, Path], run_dir: Path) -> None:
    job, engines, checkpoints = begin(TWO, models, run_dir)
    checkpoints.save(1, engines, {}, {})
    checkpoints.finish()
    file = run_dir / "checkpoints" / ".step_2.part" / "critic" / "__1_0.distcp"
    resolve = shards._SavePlanner.resolve_data

    def resolve_or_die(planner: Any, item: Any) -> Any:
        if job.rank == 1 and file.exists() and file.stat().st_size > 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return resolve(planner, item)

    shards._SavePlanner.resolve_data = resolve_or_die  # type: ignore[method-assign]
    checkpoints.save(2, engines, {}, {})
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
    job = start_job(stage_timeout=300, check_program=True)
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


def never_answers() -> None:
    announce_hang(1)
    time.sleep(1000)


def hang_while_writing(models: dict[str, Path], run_dir: Path) -> None:
    """Rank 1's disk never answers; both ranks have come to the end of the run."""
    watch_for_hangs_alone()
    job, engines, checkpoints = begin({"actor": (0, 1)}, models, run_dir, timeout=2.0)
    if job.rank == 1:
        shards._SavePlanner.resolve_data = lambda *_: never_answers()  # type: ignore[assignment, method-assign]
    checkpoints.save(1, engines, {}, {})
    job.board.at("save_checkpoint")
    checkpoints.finish()


def test_a_disk_that_hangs_ends_the_job_and_its_rank_is_named(
    models: dict[str, Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(RankFailed):
        run_ranks(2, hang_while_writing, models, tmp_path, grace=0.0)
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
