"""Whole runs on a tiny model: the folder with model, prompts and reward function, the config, and the ranks."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.make_tiny_model import make_tiny_model
from tests.support.ranks import run_ranks
from verl.config import PPOConfig
from verl.mesh.parse import parse_value
from verl.mesh.spec import ROLES, MeshSpec
from verl.train import train

REWARD = '''
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """Higher the more of the response is lower-case letters; something that a random model can learn a little of."""
    return sum(c.islower() for c in solution_str) / 10 + len(solution_str) / 100
'''

MESHES: dict[str, tuple[int, dict[str, list[int]]]] = {
    "one process": (1, {role: [0] for role in ROLES}),
    "colocated": (2, {role: [0, 1] for role in ROLES}),
    "disjoint": (4, {"actor": [3], "critic": [1], "reference": [0], "rollout": [2]}),
    "rank 0 idle": (3, {"actor": [2, 1], "critic": [1], "reference": [2], "reward": [1], "rollout": [2, 1]}),
}
"""Name -> (ranks, devices of each role)."""

Split = Mapping[str, Mapping[str, Any]]
"""Role -> what stands under its `parallelism`."""

SPLIT_MESHES: dict[str, tuple[int, dict[str, list[int]], Split]] = {
    "two stages": (
        2,
        {"actor": [0, 1], "critic": [1, 0], "reference": [0, 1], "rollout": [0, 1]},
        {role: {"pipeline_parallel_size": 2} for role in ("actor", "critic", "reference")},
    ),
    "two stages of two": (
        4,
        {"actor": [0, 1, 2, 3], "critic": [3, 1, 2, 0], "reference": [2, 1], "rollout": [1, 3]},
        {
            "actor": {"pipeline_parallel_size": 2},
            "critic": {"pipeline_parallel_size": 2},
            "reference": {"pipeline_parallel_size": 2},
        },
    ),
    "two copies, offloaded": (
        2,
        {"actor": [1, 0], "critic": [0, 1], "reference": [0, 1], "rollout": [0, 1]},
        {
            "actor": {"fsdp_size": 1, "hybrid_engine": {"offload_optimizer": True, "offload_activations": True}},
            "critic": {"fsdp_size": 1, "hybrid_engine": {"offload_parameters": True}},
            "reference": {"fsdp_size": 1, "hybrid_engine": {"offload_parameters": True}},
        },
    ),
    "TP 2": (
        2,
        {"actor": [1, 0], "critic": [0, 1], "reference": [0, 1], "rollout": [0, 1]},
        {role: {"tensor_parallel_size": 2} for role in ("actor", "critic", "reference")},
    ),
    "FSDP 2 x TP 2": (
        4,
        {"actor": [0, 2, 1, 3], "critic": [3, 1], "reference": [1, 2], "rollout": [0, 3]},
        {"actor": {"tensor_parallel_size": 2}, "critic": {"tensor_parallel_size": 2}},
    ),
    "CP 2 x FSDP 2": (
        4,
        {"actor": [0, 2, 1, 3], "critic": [3, 1], "reference": [1, 2], "reward": [2, 0], "rollout": [0, 3]},
        {"actor": {"context_parallel_size": 2}, "critic": {"context_parallel_size": 2}}
        | {"reward": {"context_parallel_size": 2}},
    ),
    "two stages of TP 2": (
        4,
        {"actor": [0, 1, 2, 3], "critic": [2, 3, 0, 1], "reference": [3], "reward": [1, 0], "rollout": [1, 2]},
        {role: {"pipeline_parallel_size": 2, "tensor_parallel_size": 2} for role in ("actor", "critic")}
        | {"reward": {"tensor_parallel_size": 2}},
    ),
}
"""Name -> (ranks, devices of each role, how the roles are split)."""


@dataclass(frozen=True)
class Task:
    """A folder with all that a run reads."""

    folder: Path

    @classmethod
    def make(cls, folder: Path, num_prompts: int = 24, num_val: int = 7) -> Task:
        make_tiny_model(folder / "model", num_layers=2)
        (folder / "reward.py").write_text(REWARD)
        for name, count in (("train", num_prompts), ("val", num_val)):
            rows = [
                {
                    "data_source": "tiny",
                    "prompt": [{"role": "user", "content": f"{name} {i}: " + "word " * (i % 5)}],
                    "reward_model": {"style": "rule", "ground_truth": str(i)},
                    "extra_info": {"index": i},
                }
                for i in range(count)
            ]
            (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return cls(folder)

    def config(self, run: str, **changes: Any) -> PPOConfig:
        """Small, fp32-friendly settings; `changes` by dotted name with __ for the dot: trainer__seed=3."""
        config = PPOConfig()
        config.model.path = str(self.folder / "model")
        config.data.train_files = [str(self.folder / "train.jsonl")]
        config.data.train_batch_size = 6
        config.data.max_prompt_length = 64
        config.data.max_response_length = 12
        config.actor.ppo_mini_batch_size = config.critic.ppo_mini_batch_size = 2
        config.actor.max_tokens_per_micro_batch = config.critic.max_tokens_per_micro_batch = 120
        for optim in (config.actor.optim, config.critic.optim):
            optim.lr, optim.eps = 1e-3, 1e-5
        config.rollout.n = 2
        config.reward.function.path = f"{self.folder / 'reward.py'}:compute_score"
        config.trainer.run_dir = str(self.folder / "runs" / run)
        config.trainer.trackers = []
        config.trainer.save_freq = -1
        config.trainer.total_training_steps = 2
        config.trainer.stage_timeout = 300.0
        config.debug.check_program = True
        for name, value in changes.items():
            *path, last = name.split("__")
            at: Any = config
            for part in path:
                at = getattr(at, part)
            assert hasattr(at, last), name
            setattr(at, last, value)
        return config


def mesh_of(devices: Mapping[str, list[int]], split: Split | None = None, **rollout: Any) -> MeshSpec:
    """All roles in float32; the rollout by the torch backend."""
    entries: dict[str, dict[str, Any]] = {role: {"devices": list(d), "dtype": "float32"} for role, d in devices.items()}
    for role, parallelism in (split or {}).items():
        entries[role]["parallelism"] = dict(parallelism)
    entries["rollout"] |= {"backend": "torch", **rollout}
    return parse_value(entries, "test")


def run(config: PPOConfig, mesh: MeshSpec, ranks: int, timeout: float = 600.0) -> list[dict[str, Any]]:
    """The lines of the run's metrics.jsonl."""
    run_ranks(ranks, train, config, mesh, timeout=timeout)
    return metrics(Path(config.trainer.run_dir))


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
