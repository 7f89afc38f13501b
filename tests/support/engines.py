"""Engines of tiny models on chosen ranks, trained a little, and what they have learnt as whole tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from scripts.make_tiny_model import make_tiny_model
from verl.config import OptimConfig
from verl.engine.train_engine import EngineSpec, TrainEngine
from verl.flow.job import Job
from verl.flow.placement import Placement, make_groups
from verl.model.heads import Head
from verl.model.load import hf_parameters
from verl.model.packing import Sequences

HEADS = {"actor": Head.lm, "critic": Head.token_value}

Layout = Mapping[str, tuple[int, ...] | Placement]
"""Role -> its place, or just its data-parallel ranks."""


def placed(layout: Layout) -> dict[str, Placement]:
    return {role: at if isinstance(at, Placement) else Placement(role, at) for role, at in layout.items()}


def actor_and_critic(folder: Path, num_layers: int = 2) -> dict[str, Path]:
    """Models so small that some parameters have fewer rows than there are ranks: the value head has one."""
    return {
        "actor": make_tiny_model(folder / "tied", num_layers=num_layers, tied=True),
        "critic": make_tiny_model(folder / "untied", "qwen3", num_layers=num_layers, seed=1),
    }


def make_engines(job: Job, layout: Layout, models: Mapping[str, Path], **settings: Any) -> dict[str, TrainEngine]:
    """The trained roles of `layout` that this rank serves, in float32; `settings` of EngineSpec."""
    groups = make_groups(list(placed(layout).values()), job.rank, "cpu", job.timeout)
    engines = {}
    for role, mine in groups.items():
        spec = EngineSpec(
            models[role], HEADS[role], True, torch.float32, seed=5, max_tokens_per_micro_batch=64, **settings
        )
        engines[role] = TrainEngine(spec, mine, job.device, job.board)
        engines[role].add_optimizer(OptimConfig(lr=1e-2, weight_decay=0.1), total_steps=100)
    return engines


def train(engines: Mapping[str, TrainEngine], num_steps: int) -> None:
    """Steps on rows that depend on the data-parallel index and on the steps done before."""
    for engine in engines.values():
        assert engine.optimizer is not None
        index = dist.get_rank(engine.groups.rows)
        for _ in range(num_steps):
            draws = torch.Generator().manual_seed(100 * engine.optimizer.steps_done + index)
            ids = [torch.randint(3, 300, (2, 9), generator=draws) for _ in range(3)]
            rows = Sequences.responses([i[0] for i in ids], [i[1] for i in ids])
            engine.train_step(rows, range(3), lambda outputs, at: -outputs.values.mean())


def learnt(engine: TrainEngine) -> dict[str, Tensor]:
    """Parameters by Hugging Face name, AdamW's state by that name and its own: those of this rank's pipeline stage.

    Collective on the engine's ranks.
    """
    assert engine.optimizer is not None
    whole = {}
    for name, parameter in hf_parameters(engine.model):
        whole[name] = _whole(parameter)
        state = engine.optimizer.adamw.state[parameter]
        whole |= {f"{name}/{key}": _whole(value) for key, value in state.items()}
    return whole


def merged(parts: Sequence[Mapping[str, Mapping[str, Tensor]]]) -> dict[str, dict[str, Tensor]]:
    """What all ranks say of each role. What several say must be the same."""
    whole: dict[str, dict[str, Tensor]] = {}
    for part in parts:
        for role, tensors in part.items():
            known = whole.setdefault(role, {})
            assert all(torch.equal(known[name], tensor) for name, tensor in tensors.items() if name in known)
            known |= tensors
    return whole


def _whole(tensor: Tensor) -> Tensor:
    full = tensor.detach().full_tensor() if isinstance(tensor, DTensor) else tensor.detach()
    return full.clone()


def assert_equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    """Exactly, bit for bit."""
    assert one.keys() == other.keys()
    different = [name for name in one if not torch.equal(one[name], other[name])]
    assert not different, different
