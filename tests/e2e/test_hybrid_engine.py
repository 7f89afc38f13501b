"""Generation by the ranks that train, split another way: whole runs with `backend: torch`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.e2e.test_placements import difference, samples
from tests.support.runs import Split, Task, mesh_of, run

pytestmark = [pytest.mark.dist, pytest.mark.timeout(900)]

STEPS = 3


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Task:
    return Task.make(tmp_path_factory.mktemp("hybrid"))


@pytest.fixture(scope="module")
def alone(task: Task) -> Path:
    """What one process samples."""
    record(task, "alone", {"actor": [0], "critic": [0], "rollout": [0]}, {}, 1, 1)
    return task.folder / "alone"


def record(
    task: Task, name: str, devices: dict[str, list[int]], split: Split, tp: int, ranks: int
) -> list[dict[str, Any]]:
    config = task.config(name, trainer__total_training_steps=STEPS, debug__record_rollouts=str(task.folder / name))
    return run(config, mesh_of(devices, split, tensor_parallel_size=tp), ranks)


CASES: dict[str, tuple[int, dict[str, list[int]], Split, int]] = {
    "TP 2 as it is trained": (
        2, {"actor": [1, 0], "critic": [0], "rollout": [1, 0]}, {"actor": {"tensor_parallel_size": 2}}, 2,
    ),
    "TP 2 of 2 stages of TP 2": (
        4,
        {"actor": [0, 1, 2, 3], "critic": [3], "rollout": [0, 1, 2, 3]},
        {"actor": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}},
        2,
    ),
    "TP 2, partly elsewhere": (3, {"actor": [0, 1], "critic": [0, 1], "rollout": [2, 1]}, {}, 2),
}  # fmt: skip
"""Name -> (ranks, devices, how the actor is split, tensor-parallel ranks of the rollout)."""


@pytest.mark.parametrize("name", CASES)
def test_a_split_rollout_samples_the_tokens_of_one_process(name: str, task: Task, alone: Path) -> None:
    """After updates too, so that every rank has had the new weights of its part."""
    ranks, devices, split, tp = CASES[name]
    lines = record(task, name, devices, split, tp, ranks)
    drawn, expected = samples(task.folder / name), samples(alone)
    assert drawn.keys() == expected.keys() and len(drawn) == STEPS * 6 * 2
    wrong = [seed for seed in drawn if drawn[seed]["token_ids"] != expected[seed]["token_ids"]]
    assert not wrong, "\n".join(difference(seed, drawn[seed], expected[seed]) for seed in wrong)
    assert len(list((task.folder / name).iterdir())) == len(devices["rollout"]) // tp, "leaders alone have samples"
    for line in lines:
        assert line["timing_s/reshard"] > 0 and line["timing_s/reshard_back"] >= 0
        if name == "TP 2 as it is trained":
            assert line["perf/reshard_wire_bytes"] == 0
