"""Meshes that are out of the ordinary, and what they must not change."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from scripts.make_tiny_model import make_tiny_model
from tests.support.jobs import wait_until
from tests.support.ranks import run_ranks
from tests.support.runs import MESHES, Task, mesh_of, run
from verl.config import AdvantageEstimator, LossAggregation, PPOConfig
from verl.mesh.spec import MeshSpec
from verl.monitor.stages import Stages
from verl.monitor.timeline import overlap, read_timeline
from verl.train import train

pytestmark = [pytest.mark.dist, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Task:
    return Task.make(tmp_path_factory.mktemp("meshes"))


def everywhere(ranks: int) -> dict[str, list[int]]:
    return {role: list(range(ranks)) for role in ("actor", "critic", "reference", "reward", "rollout")}


@pytest.mark.parametrize("dp", [2, 3])
def test_validation_of_seven_prompts_counts_each_once(dp: int, task: Task) -> None:
    """Seven rows do not split over two or three ranks: the rows that fill up must leave no trace."""
    changes = {
        "data__val_files": [str(task.folder / "val.jsonl")],
        "trainer__total_training_steps": 0,
        "actor__ppo_mini_batch_size": 6,
        "critic__ppo_mini_batch_size": 6,
    }
    expected = run(task.config("val alone", **changes), mesh_of(everywhere(1)), 1)
    lines = run(task.config(f"val {dp}", **changes), mesh_of(everywhere(dp)), dp)
    for name in ("val/score/mean", "val/score/max", "val/score/min", "val/sampled_score/mean", "val/score/tiny/mean"):
        assert lines[0][name] == pytest.approx(expected[0][name], abs=1e-6), name


def test_four_samples_a_prompt_on_two_ranks(task: Task) -> None:
    changes = {"rollout__n": 4, "trainer__total_training_steps": 1}
    expected = run(task.config("n alone", **changes), mesh_of(everywhere(1)), 1)
    lines = run(task.config("n on two", **changes), mesh_of(everywhere(2)), 2)
    for name in ("actor/pg_loss", "critic/vf_loss", "critic/score/mean", "response_length/mean"):
        assert lines[0][name] == pytest.approx(expected[0][name], rel=1e-5, abs=1e-7), name


def test_rank_0_may_serve_no_role(task: Task) -> None:
    ranks, devices = MESHES["rank 0 idle"]
    lines = run(task.config("idle"), mesh_of(devices), ranks)
    assert [line["step"] for line in lines] == [1, 2]
    assert all(line["perf/total_num_tokens"] > 0 for line in lines)


@pytest.mark.parametrize("mode", list(LossAggregation))
def test_grpo_without_critic_is_alike_on_one_rank_and_on_two(mode: LossAggregation, task: Task) -> None:
    changes = {
        "algorithm__adv_estimator": AdvantageEstimator.grpo,
        "algorithm__kl_ctrl__kl_coef": 0.0,
        "actor__use_kl_loss": True,
        "actor__loss_agg_mode": mode,
        "actor__entropy_coeff": 0.01,
        "rollout__n": 4,
        "rollout__temperature": 0.7,
    }
    expected = run(task.config(f"grpo {mode}", **changes), mesh_of({"actor": [0], "rollout": [0]}), 1)
    lines = run(task.config(f"grpo {mode} on two", **changes), mesh_of({"actor": [1, 0], "rollout": [0]}), 2)
    assert not any(name.startswith("critic/vf") for name in lines[0])
    for line, other in zip(lines, expected, strict=True):
        tolerance = 1e-5 if line["step"] == 1 else 1e-3
        for name in ("actor/pg_loss", "actor/kl_loss", "actor/entropy", "actor/grad_norm"):
            assert line[name] == pytest.approx(other[name], rel=tolerance, abs=1e-7), name


def test_experts_are_trained_and_rolled_out_alike_on_one_rank_and_on_two(task: Task, tmp_path: Path) -> None:
    """transformers joins a layer's experts into one parameter; the rollout is told of each by its name in the files."""
    folder = make_tiny_model(tmp_path / "experts", "qwen3_moe", num_layers=2)
    changes = {"model__path": str(folder), "trainer__export_final": True}
    expected = run(task.config("experts alone", **changes), mesh_of(everywhere(1)), 1)
    lines = run(task.config("experts on two", **changes), mesh_of(everywhere(2)), 2)
    for line, other in zip(lines, expected, strict=True):
        tolerance = 1e-5 if line["step"] == 1 else 1e-3
        for name in ("actor/pg_loss", "critic/vf_loss", "actor/grad_norm", "critic/score/mean"):
            assert line[name] == pytest.approx(other[name], rel=tolerance, abs=1e-7), name
    before, after = (stored(path) for path in (folder, task.folder / "runs" / "experts on two" / "hf"))
    assert before.keys() == after.keys()
    assert all(not torch.equal(before[name].bfloat16(), after[name]) for name in before if "experts" in name)


def stored(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


PAIRS = (("update_actor", "update_critic"), ("old_log_prob", "values"))


def train_in_step(folder: Path, config: PPOConfig, mesh: MeshSpec) -> None:
    """In a rank. Each stage of a pair waits until the other has begun: for ever, if that one needs what it makes."""
    enter = Stages.__call__
    partner = {**dict(PAIRS), **{other: one for one, other in PAIRS}}

    @contextmanager
    def together(stages: Stages, name: str, role: str | None = None) -> Iterator[None]:
        with enter(stages, name, role):
            if name in partner:
                (folder / f"{name} has begun").touch()
                begun = folder / f"{partner[name]} has begun"
                wait_until(begun.exists, 200.0, lambda: f"{name} and {partner[name]} are not at the same time")
            yield

    Stages.__call__ = together  # type: ignore[method-assign, assignment]
    train(config, mesh)


def test_roles_on_their_own_devices_work_at_the_same_time(task: Task) -> None:
    """Actor and critic update together, and values are worked out beside log-probs: seen on the timeline."""
    ranks, devices = MESHES["disjoint"]
    config = task.config("overlap", debug__timeline=True, trainer__total_training_steps=1)
    run_ranks(ranks, train_in_step, task.folder, config, mesh_of(devices))
    spans = [span for rank in read_timeline(task.folder / "runs" / "overlap").values() for span in rank]
    for one, other in PAIRS:
        assert overlap([s for s in spans if s.name == one], [s for s in spans if s.name == other]) > 0, (one, other)


def test_kl_early_stop_ends_the_actor_s_steps_but_not_the_critic_s(task: Task) -> None:
    changes = {
        "actor__target_kl": 1e-9,
        "actor__ppo_epochs": 2,
        "critic__ppo_epochs": 2,
        "trainer__total_training_steps": 1,
    }
    lines = run(task.config("early", **changes), mesh_of(everywhere(2)), 2)
    # the first mini-batch is on policy, so its KL is 0; the second sees the first step's change
    assert lines[0]["actor/epochs_done"] == pytest.approx(2 / 3)
    assert lines[0]["critic/epochs_done"] == 2


def test_critic_warmup_leaves_the_actor_alone(task: Task, tmp_path: Path) -> None:
    lines = run(task.config("warm-up", trainer__critic_warmup=1), mesh_of(everywhere(1)), 1)
    assert "actor/pg_loss" not in lines[0] and "critic/vf_loss" in lines[0]
    assert "actor/pg_loss" in lines[1]
