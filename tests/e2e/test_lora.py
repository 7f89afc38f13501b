"""Runs that train adapters: resumed bit for bit, with the actor's own base as the reference, and with one elsewhere."""

from __future__ import annotations

from pathlib import Path

import peft  # noqa: F401 - takes seconds; ranks are forks of this process
import pytest
import torch
from safetensors.torch import load_file

from tests.support.runs import Task, mesh_of, run

pytestmark = [pytest.mark.dist, pytest.mark.timeout(900)]

LORA = {"actor__lora__rank": 8, "critic__lora__rank": 4, "actor__optim__lr": 1e-2}
MESHES = {
    "one process": (1, {role: [0] for role in ("actor", "critic", "rollout")}, {}),
    "two ranks": (
        2,
        {"actor": [0, 1], "critic": [1, 0], "reference": [0, 1], "rollout": [0, 1]},
        {role: {"tensor_parallel_size": 2} for role in ("actor", "reference")},
    ),
    "a reference of its own": (2, {"actor": [0], "critic": [1], "reference": [1], "rollout": [0]}, {}),
}


@pytest.mark.parametrize("mesh", ["one process", pytest.param("two ranks", marks=pytest.mark.slow)])
def test_resumed_equals_undisturbed(mesh: str, tmp_path: Path) -> None:
    task = Task.make(tmp_path)
    ranks, devices, split = MESHES[mesh]
    spec = mesh_of(devices, split)
    common = {**LORA, "trainer__export_final": True, "trainer__total_training_steps": 3}
    whole = run(task.config("whole", **common), spec, ranks)
    run(task.config("parts", **common, trainer__save_freq=2), spec, ranks)
    parts = tmp_path / "runs" / "parts"
    (parts / "checkpoints" / "step_3").rename(parts / "gone")
    resumed = run(task.config("parts", **common, trainer__save_freq=2), spec, ranks)
    assert [line["step"] for line in resumed] == [line["step"] for line in whole]
    for name in ("actor/pg_loss", "critic/vf_loss", "actor/grad_norm", "critic/score/mean", "actor/reward_kl_penalty"):
        assert [line[name] for line in resumed] == [line[name] for line in whole], name
    before, after = (load_file(tmp_path / "runs" / name / "hf" / "model.safetensors") for name in ("whole", "parts"))
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    base = load_file(tmp_path / "model" / "model.safetensors")
    changed = {name for name in base if not torch.equal(base[name].bfloat16(), before[name])}
    assert changed == {name for name in base if name.endswith("_proj.weight")}


def test_the_actor_without_adapters_is_the_reference(tmp_path: Path) -> None:
    """The KL to it is that to a reference that was loaded: 0 at first, since B begins with 0, and then not."""
    task = Task.make(tmp_path)
    kl = {}
    for mesh in ("one process", "a reference of its own"):
        ranks, devices, split = MESHES[mesh]
        lines = run(task.config(mesh, **LORA), mesh_of(devices, split), ranks)
        kl[mesh] = [line["actor/reward_kl_penalty"] for line in lines]
    own, loaded = kl.values()
    assert own[0] == 0 and loaded[0] == pytest.approx(0, abs=1e-6)
    assert abs(own[1]) > 1e-4 and own[1] == pytest.approx(loaded[1], rel=1e-3)
