"""Checkpoints on real ranks: exact on any mesh, and never half a one."""

from __future__ import annotations

import logging
import os
import resource
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from scripts.make_tiny_model import make_tiny_model
from tests.support.engines import Layout, actor_and_critic, assert_equal, learnt, make_engines, merged, placed, train
from tests.support.ranks import RankFailed, run_ranks
from tests.support.stalls import announce_hang, watch_for_hangs_alone
from verl.engine import checkpoint as checkpoint_module
from verl.engine.checkpoint import Checkpoints
from verl.errors import SharedError, UserError
from verl.flow.job import start_job
from verl.flow.placement import Placement

pytestmark = pytest.mark.dist

Learnt = dict[str, dict[str, Tensor]]

TWO: Layout = {"actor": (0, 1), "critic": (0, 1)}
LAYOUTS: dict[str, tuple[int, Layout]] = {
    "one rank": (1, {"actor": (0,), "critic": (0,)}),
    "the same two": (2, TWO),
    "the same two of three": (3, TWO),
    "two in another order": (2, {"actor": (1, 0), "critic": (0, 1)}),
    "three": (3, {"actor": (0, 1, 2), "critic": (1,)}),
    "two of four, descending": (4, {"actor": (2, 1), "critic": (3, 1, 0)}),
    "two stages": (2, {"actor": Placement("actor", (0, 1), pp=2), "critic": Placement("critic", (1, 0), pp=2)}),
    "two stages of two": (
        4,
        {"actor": Placement("actor", (3, 1, 0, 2), pp=2), "critic": Placement("critic", (0, 1, 2, 3), pp=2)},
    ),
    "TP 2": (2, {"actor": Placement("actor", (1, 0), tp=2), "critic": Placement("critic", (0, 1), tp=2)}),
    "FSDP 2 x TP 2": (
        4,
        {"actor": Placement("actor", (0, 2, 1, 3), tp=2), "critic": Placement("critic", (2, 3, 0, 1), tp=4)},
    ),
    "two copies of two, two copies of TP 2": (
        4,
        {
            "actor": Placement("actor", (3, 1, 0, 2), fsdp_size=2),
            "critic": Placement("critic", (0, 1, 2, 3), tp=2, fsdp_size=1),
        },
    ),
    "FSDP 3 x TP 2, two stages of TP 2": (
        6,
        {
            "actor": Placement("actor", (5, 4, 0, 1, 2, 3), tp=2),
            "critic": Placement("critic", (0, 1, 2, 3), tp=2, pp=2),
        },
    ),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return actor_and_critic(tmp_path_factory.mktemp("models"))


@dataclass
class Saved:
    run_dir: Path
    learnt: Learnt
    """When the checkpoint was saved."""
    later: Learnt
    """Two optimizer steps after."""


def save_and_go_on(world: int, layout: Layout, models: dict[str, Path], run_dir: Path) -> tuple[Learnt, Learnt]:
    job = start_job(stage_timeout=300, check_program=True)
    engines = make_engines(job, layout, models)
    train(engines, 2)
    state = {"step": 7, "kl_coef": 0.25, "position": [3, 4], "said_by": job.rank}
    Checkpoints(run_dir, 2, job).save(7, engines, state, {"random": bytes([job.rank, 255]), "none": b""})
    before = {role: learnt(engine) for role, engine in engines.items()}
    train(engines, 2)
    after = {role: learnt(engine) for role, engine in engines.items()}
    job.close()
    return before, after


@pytest.fixture(scope="module")
def saved(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Saved:
    run_dir = tmp_path_factory.mktemp("run")
    results = run_ranks(2, save_and_go_on, 2, TWO, models, run_dir)
    return Saved(run_dir, merged([before for before, _ in results]), merged([after for _, after in results]))


@dataclass
class Loaded:
    step: int
    trainer_state: dict[str, Any]
    rank_state: dict[str, bytes] | None
    steps_done: dict[str, int]
    learnt: Learnt
    later: Learnt


def load_and_go_on(layout: Layout, models: dict[str, Path], run_dir: Path, num_steps: int) -> Loaded:
    job = start_job(stage_timeout=300, check_program=True)
    engines = make_engines(job, layout, models)
    checkpoints = Checkpoints(run_dir, 2, job)
    found = checkpoints.latest()
    assert found is not None
    trainer_state, rank_state = checkpoints.load(found, engines)
    steps_done = {role: engine.optimizer.steps_done for role, engine in engines.items() if engine.optimizer}
    loaded = {role: learnt(engine) for role, engine in engines.items()}
    train(engines, num_steps)
    later = {role: learnt(engine) for role, engine in engines.items()}
    job.close()
    return Loaded(found.step, trainer_state, rank_state, steps_done, loaded, later)


@pytest.mark.parametrize("name", LAYOUTS)
def test_parameters_and_moments_are_the_saved_ones_on_any_mesh(
    name: str, saved: Saved, models: dict[str, Path]
) -> None:
    world, layout = LAYOUTS[name]
    loaded = run_ranks(world, load_and_go_on, layout, models, saved.run_dir, 0)
    for rank, result in enumerate(loaded):
        assert result.step == 7
        assert result.trainer_state == {"step": 7, "kl_coef": 0.25, "position": [3, 4], "said_by": 0}
        assert set(result.learnt) == {role for role, place in placed(layout).items() if rank in place.ranks}
        assert set(result.steps_done.values()) <= {2}
        own = {"random": bytes([rank, 255]), "none": b""} if (world, layout) == (2, TWO) else None
        assert result.rank_state == own
    for role, whole in merged([result.learnt for result in loaded]).items():
        assert_equal(whole, saved.learnt[role])


def test_the_moments_are_there_at_all(saved: Saved) -> None:
    """What the tests above compare is not zeros with zeros."""
    actor = saved.learnt["actor"]
    assert "lm_head.weight" not in actor, "tied, so saved once"
    for name in ("model.embed_tokens.weight", "model.norm.weight"):
        assert actor[f"{name}/exp_avg"].abs().max() > 0
        assert actor[f"{name}/exp_avg_sq"].abs().max() > 0
        assert actor[f"{name}/step"] == 2
    assert saved.learnt["critic"]["score.weight/exp_avg"].abs().max() > 0


def test_a_resumed_run_learns_what_the_undisturbed_one_does(saved: Saved, models: dict[str, Path]) -> None:
    resumed = merged([loaded.later for loaded in run_ranks(2, load_and_go_on, TWO, models, saved.run_dir, 2)])
    for role, whole in resumed.items():
        assert_equal(whole, saved.later[role])
        assert not torch.equal(whole["model.norm.weight"], saved.learnt[role]["model.norm.weight"])


@pytest.mark.parametrize(
    "name",
    [
        "two of four, descending",
        "two stages of two",
        "FSDP 2 x TP 2",
        "two copies of two, two copies of TP 2",
        "FSDP 3 x TP 2, two stages of TP 2",
    ],
)
def test_what_a_crooked_mesh_saves_a_straight_one_loads(name: str, models: dict[str, Path], tmp_path: Path) -> None:
    world, layout = LAYOUTS[name]
    before = merged([first for first, _ in run_ranks(world, save_and_go_on, world, layout, models, tmp_path)])
    (loaded,) = run_ranks(1, load_and_go_on, LAYOUTS["one rank"][1], models, tmp_path, 0)
    for role in ("actor", "critic"):
        assert_equal(loaded.learnt[role], before[role])


# -- models and roles that do not fit ------------------------------------------------------------------------------


def refusal(layout: Layout, models: dict[str, Path], run_dir: Path) -> str:
    try:
        load_and_go_on(layout, models, run_dir, 0)
    except UserError as error:
        return str(error)
    raise AssertionError("loaded")


def test_another_model_is_refused_on_every_rank_and_both_are_named(
    saved: Saved, models: dict[str, Path], tmp_path: Path
) -> None:
    wider = make_tiny_model(tmp_path / "wider", num_layers=2, hidden_size=128, tied=True)
    for message in run_ranks(2, refusal, TWO, models | {"actor": wider}, saved.run_dir):
        assert str(saved.run_dir / "checkpoints" / "step_7" / "actor") in message and str(wider) in message
        assert "(320, 64)" in message and "(320, 128)" in message


@pytest.mark.parametrize(
    ("num_layers", "where"), [(1, "of the checkpoint is not in the model"), (3, "is not in the checkpoint")]
)
def test_a_deeper_or_shallower_model_is_refused(
    num_layers: int, where: str, saved: Saved, models: dict[str, Path], tmp_path: Path
) -> None:
    other = make_tiny_model(tmp_path / "other", num_layers=num_layers, tied=True)
    (message,) = run_ranks(1, refusal, LAYOUTS["one rank"][1], models | {"actor": other}, saved.run_dir)
    assert "model.layers." in message and where in message


def save_steps(layout: Layout, models: dict[str, Path], run_dir: Path, keep: int, steps: list[int]) -> None:
    job = start_job(stage_timeout=300, check_program=False)
    engines = make_engines(job, layout, models)
    for step in steps:
        Checkpoints(run_dir, keep, job).save(step, engines, {"step": step}, {})
    job.close()


def test_a_checkpoint_without_the_role_is_refused(models: dict[str, Path], tmp_path: Path) -> None:
    run_ranks(1, save_steps, {"actor": (0,)}, models, tmp_path, 0, [1])
    (message,) = run_ranks(1, refusal, LAYOUTS["one rank"][1], models, tmp_path)
    assert "holds actor" in message and "trains the critic" in message


# -- broken ones -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pair(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("pair")
    run_ranks(1, save_steps, {"actor": (0,)}, models, run_dir, 0, [9, 10])
    return run_dir


def truncate(folder: Path) -> str:
    file = next((folder / "actor").glob("*.distcp"))
    os.truncate(file, file.stat().st_size - 1)
    return file.name


def remove_manifest(folder: Path) -> str:
    (folder / "manifest.json").unlink()
    return "manifest.json"


def remove_file(folder: Path) -> str:
    (folder / "ranks" / "rank_0.json").unlink()
    return "rank_0.json"


def garble_trainer_state(folder: Path) -> str:
    file = folder / "trainer.json"
    file.write_bytes(b"x" * file.stat().st_size)
    return "step_10"


def look(run_dir: Path) -> tuple[int | None, list[str]]:
    """(step of the latest one, what was logged)"""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("verl").addHandler(handler)
    job = start_job(stage_timeout=300, check_program=True)
    checkpoints = Checkpoints(run_dir, 2, job)
    checkpoints.prepare()
    found = checkpoints.latest()
    job.close()
    return (None if found is None else found.step), lines


@pytest.mark.parametrize("damage", [truncate, remove_manifest, remove_file, garble_trainer_state])
def test_a_broken_one_is_skipped_with_a_warning(damage: Callable[[Path], str], pair: Path, tmp_path: Path) -> None:
    checkpoints = tmp_path / "checkpoints"
    checkpoints.mkdir()
    for step in (9, 10):
        (checkpoints / f"step_{step}").symlink_to(pair / "checkpoints" / f"step_{step}")
    assert run_ranks(2, look, tmp_path)[1][0] == 10
    (checkpoints / "step_10").unlink()
    os.system(f"cp -r {pair}/checkpoints/step_10 {checkpoints}")
    named = damage(checkpoints / "step_10")
    (first, lines), (second, silence) = run_ranks(2, look, tmp_path)
    assert first == second == 9
    assert len(lines) == 1 and named in lines[0] and not silence


def test_no_checkpoint_at_all(tmp_path: Path) -> None:
    assert run_ranks(2, look, tmp_path) == [(None, [])] * 2


def fail_in_the_middle(how: str, models: dict[str, Path], run_dir: Path) -> None:
    """Rank 1 ends after the actor's part of the second checkpoint is written and before the critic's."""
    job = start_job(stage_timeout=300, check_program=False)
    engines = make_engines(job, TWO, models)
    checkpoints = Checkpoints(run_dir, 2, job)
    checkpoints.save(1, engines, {}, {})
    save_tensors = checkpoint_module.save_tensors

    def save_or_fail(tensors: Any, folder: Path, *others: Any) -> None:
        if folder.name == "critic" and job.rank == 1:
            if how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise OSError("no space left on device")
        save_tensors(tensors, folder, *others)

    checkpoint_module.save_tensors = save_or_fail
    checkpoints.save(2, engines, {}, {})


@pytest.mark.parametrize("how", ["killed", "raised"])
def test_a_save_that_did_not_end_is_never_seen(how: str, models: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(RankFailed) as failure:
        run_ranks(2, fail_in_the_middle, how, models, tmp_path)
    assert ("exit status -9" if how == "killed" else "no space left") in failure.value.tracebacks[1]
    checkpoints = tmp_path / "checkpoints"
    assert sorted(path.name for path in checkpoints.iterdir()) == [".step_2.part", "step_1"]
    assert next((checkpoints / ".step_2.part" / "actor").glob("*.distcp")).stat().st_size > 0
    (first, lines), (second, _) = run_ranks(2, look, tmp_path)
    assert first == second == 1
    assert "step_2" in lines[0]
    assert [path.name for path in checkpoints.iterdir()] == ["step_1"]


def save_on_a_full_disk(models: dict[str, Path], run_dir: Path) -> str:
    """Rank 1's."""
    job = start_job(stage_timeout=300, check_program=False)
    engines = make_engines(job, TWO, models)
    if job.rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000))
    with pytest.raises(SharedError) as refused:
        Checkpoints(run_dir, 2, job).save(1, engines, {}, {})
    job.close()
    return str(refused.value)


def test_a_full_disk_is_said_on_every_rank_with_file_and_remedy(models: dict[str, Path], tmp_path: Path) -> None:
    for message in run_ranks(2, save_on_a_full_disk, models, tmp_path):
        for role in ("actor", "critic"):
            file = tmp_path / "checkpoints" / ".step_1.part" / role / "__1_0.distcp"
            assert f"trainer.run_dir: {file} cannot be written: File too large. Make room" in message
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == [".step_1.part"]


def never_ends() -> None:
    announce_hang(1)
    time.sleep(1000)


def hang_in_the_middle(models: dict[str, Path], run_dir: Path) -> None:
    """Rank 1's disk never answers."""
    watch_for_hangs_alone()
    job = start_job(stage_timeout=2, check_program=False)
    engines = make_engines(job, {"actor": (0, 1)}, models)
    if job.rank == 1:
        dcp.FileSystemWriter.write_data = lambda *_: never_ends()  # type: ignore[assignment]
    Checkpoints(run_dir, 2, job).save(1, engines, {}, {})


def test_a_disk_that_hangs_ends_the_job_and_its_rank_is_named(
    models: dict[str, Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(RankFailed):
        run_ranks(2, hang_in_the_middle, models, tmp_path, grace=0.0)
    said = capfd.readouterr().err
    assert "rank 1 has shown no sign of life" in said
    assert "rank 0 has shown no sign of life" not in said
    assert "rank 0: start: waits for its shards of actor from rank 1" in said


# -- which ones stay -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keep", "steps", "stay"),
    [
        (2, [1, 2, 10, 9999, 10000], ["step_9999", "step_10000"]),
        (1, [5, 5], ["step_5"]),
        (0, [1, 2, 3], ["step_1", "step_2", "step_3"]),
        (2, [4, 8, 6], ["step_4", "step_6", "abandoned_step_8"]),
    ],
)
def test_the_newest_stay(keep: int, steps: list[int], stay: list[str], models: dict[str, Path], tmp_path: Path) -> None:
    run_ranks(1, save_steps, {"actor": (0,)}, models, tmp_path, keep, steps)
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == set(stay)
    assert run_ranks(1, look, tmp_path)[0][0] == steps[-1]


def test_broken_ones_do_not_count(models: dict[str, Path], tmp_path: Path) -> None:
    run_ranks(1, save_steps, {"actor": (0,)}, models, tmp_path, 2, [1, 2])
    truncate(tmp_path / "checkpoints" / "step_2")
    run_ranks(1, save_steps, {"actor": (0,)}, models, tmp_path, 2, [3])
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {"step_1", "step_2", "step_3"}
    run_ranks(1, save_steps, {"actor": (0,)}, models, tmp_path, 2, [4])
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {"step_3", "step_4"}


# -- where they are --------------------------------------------------------------------------------------------------


def on_folders_of_their_own(run_dir: Path) -> str:
    job = start_job(stage_timeout=300, check_program=True)
    try:
        Checkpoints(run_dir / f"node{job.rank // 2}", 2, job).prepare()
    except UserError as error:
        return str(error)
    raise AssertionError("not noticed")


def test_nodes_that_do_not_share_the_folder_are_named_before_anything_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "node1" / "checkpoints").mkdir(parents=True)
    for message in run_ranks(4, on_folders_of_their_own, tmp_path):
        assert "trainer.run_dir" in message and "rank 2, 3 does not see" in message


def open_at(folder: Path) -> str:
    job = start_job(stage_timeout=300, check_program=True)
    try:
        found = Checkpoints(folder.parent.parent, 2, job).at(folder)
    except UserError as error:
        return str(error)
    return f"step {found.step}"


def test_a_named_folder_must_be_a_whole_checkpoint(pair: Path) -> None:
    assert run_ranks(2, open_at, pair / "checkpoints" / "step_9") == ["step 9"] * 2
    for message in run_ranks(2, open_at, pair / "checkpoints" / "step_11"):
        assert "step_11 has no manifest.json" in message and "trainer.resume_path" in message
