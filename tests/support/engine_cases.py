"""Cases for the training engine: a batch, a model and settings, run on any split and held against a plain loop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from scripts.make_tiny_model import make_tiny_model
from tests.support import plain_loop
from tests.support.adapters import PeftPlain, fill_adapters
from tests.support.plain_loop import Batch, Steps, make_batch
from verl.config import LoraConfig, LossAggregation, OptimConfig, Schedule
from verl.engine.train_engine import EngineSpec, Loss, TrainEngine
from verl.flow.job import Job, start_job
from verl.flow.placement import Groups, Placement, make_groups
from verl.model.heads import Head, TokenOutputs
from verl.model.load import hf_parameters
from verl.model.packing import Sequences
from verl.roles.mini_batch import MiniBatch, make_mini_batches

SEED, TOTAL_STEPS = 11, 10
# a large epsilon: Adam divides by the size of a gradient, and where that is nearly 0 its sign is a matter of rounding
OPTIM = OptimConfig(lr=1e-2, eps=1e-2, weight_decay=0.1, clip_grad=0.05, lr_scheduler=Schedule.linear)
MIXED = [(3, 9), (1, 20), (7, 0), (5, 5), (2, 1), (12, 3), (4, 4), (1, 1), (9, 14), (3, 3), (6, 2), (2, 8)]
LONG = [(10, 50), *[(2, 0)] * 5, *[(2, 3)] * 6]
"""With two data-parallel ranks the first has one long row and the other many short ones."""
MODELS: dict[str, tuple[str, bool]] = {
    "llama": ("llama", False),
    "tied llama": ("llama", True),
    "qwen2": ("qwen2", False),
    "tied": ("qwen2", True),
    "qwen3": ("qwen3", False),
}
"""Name -> (architecture, tied)."""


@dataclass(frozen=True)
class Case:
    model: str = "llama"
    shapes: tuple[tuple[int, int], ...] = tuple(MIXED)
    dead: tuple[int, ...] = ()
    """Rows of weight 0."""
    blocks: bool = False
    """Mini-batch 0 is the first half of the rows and 1 the second, so that a rank may have none of one."""
    head: Head = Head.lm
    max_tokens: int = 40
    checkpointing: bool = False
    reshard: bool | None = None
    virtual_stages: int = 1
    offload: tuple[str, ...] = ()
    """Of activations, parameters and optimizer."""
    lora: LoraConfig | None = None
    """Adapters are trained; they begin with `adapter_values`."""

    @property
    def batch(self) -> Batch:
        return make_batch(list(self.shapes), [0.0 if row in self.dead else 1.0 for row in range(len(self.shapes))])

    @property
    def mini_batches(self) -> list[list[int]]:
        rows = range(len(self.shapes))
        return [[r for r in rows if (r * 2 // len(rows) if self.blocks else r % 2) == j] for j in range(2)]

    def token_loss(self) -> plain_loop.TokenLoss:
        return (plain_loop.policy if self.head is Head.lm else plain_loop.value)(self.batch)

    def plainly(self, folder: Path) -> Steps:
        """The same in one process with Hugging Face's model."""
        seed = SEED if self.head is Head.token_value else None
        if self.lora is not None:
            model = PeftPlain(folder, seed, self.lora)
            return plain_loop.train_model(model, self.batch, self.mini_batches, self.token_loss(), OPTIM, TOTAL_STEPS)
        return plain_loop.train(folder, seed, self.batch, self.mini_batches, self.token_loss(), OPTIM, TOTAL_STEPS)


def make_models(folder: Path, names: Sequence[str], num_layers: int = 2) -> dict[str, Path]:
    return {
        name: make_tiny_model(folder / name, MODELS[name][0], num_layers=num_layers, tied=MODELS[name][1])
        for name in names
    }


def make_engine(job: Job, groups: Groups, case: Case, folder: Path, dtype: torch.dtype = torch.float32) -> TrainEngine:
    spec = EngineSpec(
        folder,
        case.head,
        trained=True,
        dtype=dtype,
        seed=SEED,
        max_tokens_per_micro_batch=case.max_tokens,
        logprob_chunk_tokens=7,
        reshard_after_forward=case.reshard,
        activation_checkpointing=case.checkpointing,
        virtual_stages=case.virtual_stages,
        offload_activations="activations" in case.offload,
        offload_parameters="parameters" in case.offload,
        offload_optimizer="optimizer" in case.offload,
        lora=case.lora,
    )
    engine = TrainEngine(spec, groups, job.device, job.board)
    fill_adapters(engine)
    engine.add_optimizer(OPTIM, TOTAL_STEPS)
    return engine


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


class Rank:
    """A rank's part of a case's batch."""

    def __init__(self, case: Case, place: Placement, rank: int, groups: Groups) -> None:
        batch = case.batch
        self.rows = place.inputs.rows(rank, len(case.shapes))
        part = slice(self.rows.start, self.rows.stop)
        self.sequences = Sequences.responses(batch.prompts[part], batch.responses[part])
        self.tokens = torch.cat([batch.tokens(row) for row in self.rows])
        lengths = torch.tensor([len(r) for r in batch.responses[part]])
        live = torch.tensor(batch.row_weights[part])
        made = make_mini_batches(2, self.rows, 1, lengths, live, LossAggregation.token_mean, groups.rows)
        if case.blocks:
            made = self._blocks(case, lengths)
        self.mini_batches = made
        self._token_loss = case.token_loss()
        self.losses: list[float] = []

    def _blocks(self, case: Case, lengths: Tensor) -> list[MiniBatch]:
        made = []
        for rows in case.mini_batches:
            count = sum(case.shapes[row][1] for row in rows)
            weights = torch.tensor([float(row in rows) / count for row in self.rows]).repeat_interleave(lengths)
            made.append(MiniBatch([row - self.rows.start for row in rows if row in self.rows], weights.double()))
        return made

    def loss(self, batch: MiniBatch) -> Loss:
        self.losses.append(0.0)

        def loss(outputs: TokenOutputs, at: Tensor) -> Tensor:
            losses = self._token_loss(outputs.values, outputs.entropy, self.tokens[at])
            total = (losses * batch.weights[at]).sum()
            self.losses[-1] += total.item()
            return total

        return loss


def train_case(job: Job, place: Placement, groups: Groups, case: Case, folder: Path) -> Steps:
    """The two steps on this rank; losses and outputs are its share, parameters and gradients those of its stage."""
    engine, part = make_engine(job, groups, case, folder), Rank(case, place, job.rank, groups)
    assert engine.optimizer is not None
    steps = Steps(before=outputs(engine, part))

    def keep(*_: object) -> None:
        if len(steps.gradients) == len(steps.norms):  # offloaded moments are stepped in several parts
            steps.gradients.append({n: whole(p.grad) for n, p in hf_parameters(engine.model) if p.grad is not None})

    engine.optimizer.adamw.register_step_pre_hook(keep)
    for batch in part.mini_batches:
        norm, rate = engine.train_step(part.sequences, batch.rows, part.loss(batch))
        steps.norms.append(norm)
        steps.rates.append(rate)
    steps.losses = part.losses
    steps.after = outputs(engine, part)
    steps.parameters = {n: whole(p) for n, p in hf_parameters(engine.model) if p.requires_grad}
    return steps


def outputs(engine: TrainEngine, part: Rank) -> Tensor:
    """Of a rank's tokens; none where the head is not."""
    made = engine.forward(part.sequences)
    return torch.empty(0) if made is None else made.values


def train_on_ranks(place: Placement, cases: Mapping[str, Case], models: Mapping[str, Path]) -> dict[str, Steps]:
    """All cases, one after the other; nothing on a rank that does not train."""
    job = start_job(stage_timeout=300, check_program=False)
    groups = make_groups([place], job.rank, "cpu", job.timeout).get("actor")
    results = {}
    if groups is not None:
        results = {name: train_case(job, place, groups, case, models[case.model]) for name, case in cases.items()}
    job.close()
    return results


def distance(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> float:
    """The largest difference in any of our parameters, relative to the parameter's largest entry."""
    return max(float((ours[n] - theirs[n]).abs().max() / theirs[n].abs().max().clamp(min=1e-12)) for n in ours)


def assert_same_steps(place: Placement, ranks: Mapping[int, Steps], wanted: Steps) -> None:
    """What the ranks of a split saw and left is what a plain loop did: losses within 1e-6, all else within 1e-5."""
    leaders = [ranks[rank] for rank in place.leaders]
    torch.testing.assert_close(torch.cat([r.before for r in leaders]), wanted.before, rtol=1e-5, atol=1e-5)
    losses = [sum(parts) for parts in zip(*(r.losses for r in leaders), strict=True)]
    assert losses == pytest.approx(wanted.losses, rel=1e-6, abs=1e-6)
    for rank in ranks.values():
        assert rank.norms == pytest.approx(wanted.norms, rel=1e-5)
        assert rank.rates == pytest.approx(wanted.rates)
        assert [distance(*both) < 1e-5 for both in zip(rank.gradients, wanted.gradients, strict=True)] == [True, True]
        assert distance(rank.parameters, wanted.parameters) < 1e-5
        assert rank.gradients[0].keys() == rank.parameters.keys()
    assert {name for rank in ranks.values() for name in rank.parameters} == wanted.parameters.keys()
    torch.testing.assert_close(torch.cat([r.after for r in leaders]), wanted.after, rtol=1e-5, atol=1e-5)
