"""A mesh never changes what is learnt: every placement draws the tokens and has the losses of one process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.runs import MESHES, SPLIT_MESHES, Task, mesh_of, run
from verl.mesh.spec import MeshSpec

LOSSES = (
    "actor/pg_loss",
    "critic/vf_loss",
    "actor/entropy",
    "actor/grad_norm",
    "critic/grad_norm",
    "critic/score/mean",
)
OTHERS = [name for name in (*MESHES, *SPLIT_MESHES) if name != "one process"]

pytestmark = [pytest.mark.dist, pytest.mark.timeout(900)]


def layout(name: str) -> tuple[int, MeshSpec]:
    """(ranks, mesh)"""
    if name in MESHES:
        ranks, devices = MESHES[name]
        return ranks, mesh_of(devices)
    ranks, devices, split = SPLIT_MESHES[name]
    return ranks, mesh_of(devices, split)


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Task:
    return Task.make(tmp_path_factory.mktemp("placements"))


@pytest.fixture(scope="module")
def alone(task: Task) -> list[dict[str, Any]]:
    """One process, five steps, its responses recorded."""
    ranks, mesh = layout("one process")
    config = task.config("alone", trainer__total_training_steps=5, debug__record_rollouts=str(task.folder / "recorded"))
    return run(config, mesh, ranks)


@pytest.mark.parametrize("name", OTHERS)
def test_replayed_responses_give_the_losses_of_one_process(name: str, task: Task, alone: list[dict[str, Any]]) -> None:
    ranks, mesh = layout(name)
    config = task.config(
        f"replay {name}", trainer__total_training_steps=5, debug__replay_rollouts=str(task.folder / "recorded")
    )
    lines = run(config, mesh, ranks)
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]
    for line, expected in zip(lines, alone, strict=True):
        tolerance = 1e-5 if line["step"] == 1 else 1e-3
        for loss in LOSSES:
            assert line[loss] == pytest.approx(expected[loss], rel=tolerance, abs=1e-7), (line["step"], loss)


@pytest.mark.parametrize("name", OTHERS)
def test_every_placement_samples_the_tokens_of_one_process(name: str, task: Task, alone: list[dict[str, Any]]) -> None:
    ranks, mesh = layout(name)
    folder = task.folder / f"recorded {name}"
    run(
        task.config(f"sampled {name}", trainer__total_training_steps=3, debug__record_rollouts=str(folder)),
        mesh,
        ranks,
    )
    drawn, expected = samples(folder), samples(task.folder / "recorded")
    assert len(drawn) == 3 * 6 * 2
    differences = [
        difference(seed, drawn[seed], expected[seed])
        for seed in drawn
        if drawn[seed]["token_ids"] != expected[seed]["token_ids"]
    ]
    assert not differences, "\n".join(differences)


def test_the_engines_log_probs_in_place_of_recomputed_ones(task: Task, alone: list[dict[str, Any]]) -> None:
    """Both engines compute in float32 here, so that the two are alike."""
    ranks, mesh = layout("disjoint")
    settings = {"algorithm__recompute_old_logprobs": False, "debug__replay_rollouts": str(task.folder / "recorded")}
    lines = run(task.config("engine's", trainer__total_training_steps=3, **settings), mesh, ranks)
    for line, expected in zip(lines, alone[:3], strict=True):
        for loss in LOSSES:
            assert line[loss] == pytest.approx(expected[loss], rel=1e-3, abs=1e-5), (line["step"], loss)
        assert "timing_s/old_log_prob" in expected and "rollout/kl" in expected
        assert "timing_s/old_log_prob" not in line and "rollout/kl" not in line


def samples(folder: Path) -> dict[int, dict[str, Any]]:
    lines = [json.loads(line) for file in folder.glob("*.jsonl") for line in file.read_text().splitlines()]
    return {line["seed"]: line for line in lines}


def difference(seed: int, drawn: dict[str, Any], expected: dict[str, Any]) -> str:
    pairs = zip(drawn["token_ids"], expected["token_ids"], strict=False)
    at = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(drawn["token_ids"]), len(expected["token_ids"])))
    gap = (
        abs(drawn["logprobs"][at] - expected["logprobs"][at])
        if at < min(len(drawn["logprobs"]), len(expected["logprobs"]))
        else None
    )
    return f"row {drawn['row']}, position {at}: log-probs of the two tokens differ by {gap}"
