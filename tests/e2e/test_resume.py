"""A run that was stopped and resumed has the weights and metrics of one that was not, bit for bit (CPU)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.support.runs import MESHES, SPLIT_MESHES, Split, Task, mesh_of, run

pytestmark = [pytest.mark.dist, pytest.mark.timeout(900)]

UNTIMED = (
    "actor/pg_loss",
    "critic/vf_loss",
    "actor/grad_norm",
    "critic/score/mean",
    "actor/entropy",
    "actor/lr",
    "critic/returns/mean",
)


def weights(run_dir: Path) -> dict[str, torch.Tensor]:
    return load_file(run_dir / "hf" / "model.safetensors")


@pytest.mark.parametrize(
    ("mesh", "async_save"),
    [("one process", False), ("rank 0 idle", True), ("two stages of two", False)],
)
def test_resumed_equals_undisturbed(mesh: str, async_save: bool, tmp_path: Path) -> None:
    task = Task.make(tmp_path)
    split: Split | None = None
    if mesh in MESHES:
        ranks, devices = MESHES[mesh]
    else:
        ranks, devices, split = SPLIT_MESHES[mesh]
    spec = mesh_of(devices, split)
    common = {
        "data__val_files": [str(tmp_path / "val.jsonl")],
        "trainer__test_freq": 2,
        "trainer__export_final": True,
        "actor__optim__lr_warmup_steps": 5,
        "algorithm__kl_ctrl__type": "adaptive",
    }
    whole = run(task.config("whole", trainer__total_training_steps=6, **common), spec, ranks)
    saved = {"trainer__save_freq": 2, "trainer__async_save": async_save}
    first = run(task.config("parts", trainer__total_training_steps=6, **saved, **common), spec, ranks)
    # an attempt that died after step 4 was saved, in the middle of what came after
    parts = tmp_path / "runs" / "parts"
    for later in parts.glob("checkpoints/step_6"):
        later.rename(parts / "gone")
    resumed = run(task.config("parts", trainer__total_training_steps=6, **saved, **common), spec, ranks)
    kept = [line["time"] for line in first if line["step"] <= 4]
    assert [line["time"] for line in resumed][: len(kept)] == kept, "steps that were done were done again"
    assert [line["step"] for line in resumed] == [line["step"] for line in whole]
    for line, expected in zip(resumed, whole, strict=True):
        for name in UNTIMED:
            assert line.get(name) == expected.get(name), (line["step"], name)
        assert line.get("val/best_score") == expected.get("val/best_score")
    before, after = weights(tmp_path / "runs" / "whole"), weights(parts)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
