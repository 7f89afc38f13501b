"""Runs whose trainers leave shared devices while the engine is awake: who is where, and that nothing else changes."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.support.faults import FOR_EVER
from tests.support.ranks import RankFailed, run_ranks
from tests.support.runs import Split, Task, mesh_of, metrics, run
from tests.support.stalls import announce_hang, watch_for_hangs_alone
from tests.support.turns import Event, Journal, train_in_turns, trainers_of
from verl.config import PPOConfig
from verl.flow.job import start_job
from verl.flow.placement import Placement, make_groups
from verl.generation.residency import Resident, Sharing, Stage, residency, sharing
from verl.monitor.stages import Stages
from verl.roles import turns
from verl.roles.build_rollout import Engines
from verl.roles.role import Here

pytestmark = [pytest.mark.dist, pytest.mark.timeout(600)]

STEPS = 2
UNTIMED = re.compile(r"actor/|critic/|val/|response_length|prompt_length")
CASES: dict[str, tuple[int, dict[str, list[int]], Split, int]] = {
    "colocated": (2, {"actor": [0, 1], "critic": [1, 0], "rollout": [0, 1]}, {}, 1),
    "overlapping": (3, {"actor": [1, 2], "critic": [2], "rollout": [0, 1]}, {}, 1),
    "not the leader's device": (2, {"actor": [1], "critic": [1], "rollout": [0, 1]}, {}, 2),
}
"""Name -> (ranks, devices, splits, tensor-parallel ranks of the rollout)."""


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Task:
    return Task.make(tmp_path_factory.mktemp("turns"), num_prompts=12, num_val=3)


def settings(task: Task, name: str, **changes: Any) -> PPOConfig:
    """With validation after the second step, so that one checkpoint is of trainers that are away, and one is not."""
    return task.config(
        name,
        data__val_files=[str(task.folder / "val.jsonl")],
        trainer__val_before_train=False,
        trainer__total_training_steps=STEPS,
        trainer__save_freq=1,
        trainer__export_final=True,
        rollout__offload_trainers=True,
        **changes,
    )


def run_in_turns(task: Task, name: str, case: str, **changes: Any) -> tuple[list[Event], list[dict[str, Any]]]:
    ranks, devices, split, tp = CASES[case]
    config, journal = settings(task, name, **changes), Journal(task.folder / f"{name}.jsonl")
    run_ranks(ranks, train_in_turns, config, mesh_of(devices, split, tensor_parallel_size=tp), journal.path)
    return journal.read(), metrics(Path(config.trainer.run_dir))


def check(events: list[Event], rollout: Placement, others: list[Placement]) -> None:
    """Every event, in the order in which they happened, with the table of who may be where."""
    shared = {rank: found for rank in rollout.ranks if (found := sharing(rollout, others, rank)) is not None}
    table = {rank: residency(rollout, others, rank, trainers_leave=True) for rank in rollout.ranks}
    home = {rank: set(names) for rank, names in trainers_of(events).items()}
    awake: dict[Sharing, set[Resident]] = {replica: set() for replica in shared.values()}
    freed: set[int] = set()
    for event in events:
        rank, here = event.rank, shared.get(event.rank)
        if here is None:
            assert event.what in ("compute", "generate", "load"), "it shares nothing"
            continue
        there = awake[here] | ({Resident.trainer} if home.get(rank) else set())
        match event.what:
            case "compute":
                assert there == table[rank][Stage.train], event
                freed.discard(rank)
            case "leave":
                home[rank].discard(event.detail)
            case "free":
                assert not home.get(rank), "first they leave"
                freed.add(rank)
            case "wake":
                assert rank == here.leader and freed >= set(here.ranks), "all of the replica's ranks make room first"
                awake[here].add(Resident(event.detail))
            case "load" | "generate":
                assert rank not in home or not home[rank]
                if rank == here.leader:  # the others may be ahead of it
                    assert there == table[rank][Stage(event.what)]
            case "sleep":
                awake[here].clear()
            case "return":
                assert not awake[here], "first it sleeps"
                home[rank].add(event.detail)
                freed.discard(rank)
            case other:
                raise AssertionError(other)
    assert all(home.values()) and not any(awake.values()), "at the end of a run trainers are at home"


def places(case: str) -> tuple[Placement, list[Placement]]:
    _, devices, _, tp = CASES[case]
    others = [Placement(role, tuple(ranks)) for role, ranks in devices.items() if role != "rollout"]
    return Placement("rollout", tuple(devices["rollout"]), tp=tp, leaders_only=True), others


@pytest.mark.parametrize("case", ["overlapping", "not the leader's device"])
def test_who_is_on_a_device_in_a_run(case: str, task: Task) -> None:
    events, lines = run_in_turns(task, case, case)
    rollout, others = places(case)
    check(events, rollout, others)
    assert set(trainers_of(events)) == {1}, "on rank 1 alone trainers share a device"
    assert len(lines) == STEPS + 1 and all(line["timing_s/offload"] > 0 < line["timing_s/onload"] for line in lines)


@pytest.fixture(scope="module")
def plain(task: Task) -> list[dict[str, Any]]:
    """A run without turns; on a CPU the setting does nothing."""
    ranks, devices, split, _ = CASES["colocated"]
    return run(settings(task, "plain"), mesh_of(devices, split), ranks)


def assert_same(task: Task, name: str, lines: list[dict[str, Any]], plain: list[dict[str, Any]]) -> None:
    for line, wanted in zip(lines, plain, strict=True):
        names = [name for name in wanted if UNTIMED.match(name)]
        assert names and [line[name] for name in names] == [wanted[name] for name in names], line["step"]
    weights, wanted = (load_file(task.folder / "runs" / n / "hf" / "model.safetensors") for n in (name, "plain"))
    assert weights.keys() == wanted.keys() and all(torch.equal(weights[n], wanted[n]) for n in wanted)


def test_a_run_in_turns_learns_the_same_bits(task: Task, plain: list[dict[str, Any]]) -> None:
    events, lines = run_in_turns(task, "turns", "colocated", trainer__async_save=True)
    check(events, *places("colocated"))
    assert_same(task, "turns", lines, plain)
    # actor, critic and reference of each rank leave for three loads, and for the second generation of a validation
    assert [sum(e.what == "leave" and e.rank == rank for e in events) for rank in (0, 1)] == [3 * 4, 3 * 4]
    assert all("perf/offload_host_bytes" not in line and "timing_s/offload" not in line for line in plain)
    assert lines[0]["perf/offload_host_bytes"] > 0


def test_an_engine_that_dies_while_trainers_are_away_leaves_a_run_that_goes_on(
    task: Task, plain: list[dict[str, Any]]
) -> None:
    """In the second step: the first one's checkpoint was written while they were away."""
    ranks, devices, split, _ = CASES["colocated"]
    config = settings(task, "died")
    with pytest.raises(RankFailed, match="the engine has died"):
        run_ranks(ranks, train_in_turns, config, mesh_of(devices, split), task.folder / "died.jsonl", 2)
    found = sorted(path.name for path in (Path(config.trainer.run_dir) / "checkpoints").iterdir())
    assert found == ["step_1"]
    _, lines = run_in_turns(task, "died", "colocated")
    assert_same(task, "died", lines, plain)


# -- a rank that does not come back ------------------------------------------------------------------------------------

LIMIT = 4.0


class Away:
    """A trainer that says when it has left."""

    host_bytes = 0

    def __init__(self, folder: Path) -> None:
        self._file = folder / f"left_{os.environ['RANK']}"

    def leave(self) -> None:
        self._file.touch()

    def come_back(self) -> None:
        (self._file.parent / "came_back").touch()


def go_away(how: str, folder: Path) -> None:
    """Ranks 0 and 1 are a replica; once both have left, rank 1 is lost."""
    if how == "hang":
        watch_for_hangs_alone()
    job = start_job(stage_timeout=90.0, check_program=False)
    stages = Stages(listeners=[lambda stage: job.board.at(stage or "between stages")])
    rollout, actor = Placement("rollout", (0, 1), tp=2, leaders_only=True), Placement("actor", (0, 1))
    groups = make_groups([rollout], job.rank, "cpu", job.timeout)["rollout"]
    config = PPOConfig()
    config.rollout.offload_trainers = True
    turns.takes_turns = lambda rollout, others, job: sharing(rollout, others, job.rank)
    trainer: Any = SimpleNamespace(parked=Away(folder))
    taken = turns.make_turns(config, Engines(), rollout, [actor], [trainer], groups, Here(job, stages))
    with stages("reshard"):
        taken.to_load()
    with stages("gen"):
        if job.rank == 1 and how == "hang":
            announce_hang(1)
            time.sleep(FOR_EVER)
        if job.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        job.board.timeout = LIMIT if how == "hang" else 90.0  # from here on rank 1 does nothing any more
    with stages("reshard_back"):
        taken.back_to_train()


@pytest.mark.parametrize("how", ["kill", "hang"])
def test_a_rank_that_is_lost_while_trainers_are_away_ends_the_others(
    how: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(RankFailed) as caught:
        run_ranks(2, go_away, how, tmp_path, grace=0.0 if how == "hang" else 90.0)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["left_0", "left_1"]
    if how == "kill":
        assert caught.value.tracebacks[1] == "exit status -9"
        assert "in barrier" in caught.value.tracebacks[0]
    else:
        said = capfd.readouterr().err
        assert set(re.findall(r"rank (\d) has shown no sign of life", said)) == {"1"}, said
        assert "  rank 0: reshard_back: waits for the device from rank 1 (for " in said
        assert "  rank 1: gen (for " in said
