"""The training engine on real ranks against a plain loop of one process: no mesh, no packing changes what is learnt."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from scripts.make_tiny_model import make_tiny_model
from tests.support import plain_loop
from tests.support.plain_loop import Batch, Steps, make_batch
from tests.support.ranks import run_ranks
from verl.config import LossAggregation, OptimConfig, Schedule
from verl.engine.train_engine import EngineSpec, Loss, TrainEngine
from verl.flow.job import Job, start_job
from verl.flow.placement import Groups, Placement, make_groups
from verl.model.heads import Head, TokenOutputs
from verl.model.load import hf_parameters
from verl.model.packing import Sequences
from verl.roles.mini_batch import MiniBatch, make_mini_batches

pytestmark = pytest.mark.dist

LAYOUTS = {"one": (1, (0,)), "two": (2, (0, 1)), "three": (3, (0, 1, 2)), "two of three, descending": (3, (2, 0))}
SEED, TOTAL_STEPS = 11, 10
# a large epsilon: Adam divides by the size of a gradient, and where that is nearly 0 its sign is a matter of rounding
OPTIM = OptimConfig(lr=1e-2, eps=1e-2, weight_decay=0.1, clip_grad=0.05, lr_scheduler=Schedule.linear)
MIXED = [(3, 9), (1, 20), (7, 0), (5, 5), (2, 1), (12, 3), (4, 4), (1, 1), (9, 14), (3, 3), (6, 2), (2, 8)]
LONG = [(10, 50), *[(2, 0)] * 5, *[(2, 3)] * 6]
"""With two ranks the first has one long row and the other many short ones."""


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

    @property
    def batch(self) -> Batch:
        return make_batch(list(self.shapes), [0.0 if row in self.dead else 1.0 for row in range(len(self.shapes))])

    @property
    def mini_batches(self) -> list[list[int]]:
        rows = range(len(self.shapes))
        return [[r for r in rows if (r * 2 // len(rows) if self.blocks else r % 2) == j] for j in range(2)]

    def token_loss(self) -> plain_loop.TokenLoss:
        return (plain_loop.policy if self.head is Head.lm else plain_loop.value)(self.batch)


CASES = {
    "actor": Case(),
    "critic": Case("qwen3", head=Head.token_value),
    "tied, each sequence alone": Case("tied", max_tokens=1),
    "one long row": Case(shapes=tuple(LONG), max_tokens=12, checkpointing=True),
    "a rank of dead rows": Case(dead=(0, 1, 2, 3, 4, 5), max_tokens=1000),
    "a rank without rows": Case("tied", blocks=True, head=Head.token_value, max_tokens=15),
    "parameters gathered twice": Case("qwen3", reshard=True, checkpointing=True),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {
        "llama": make_tiny_model(folder / "llama", num_layers=2),
        "qwen3": make_tiny_model(folder / "qwen3", "qwen3", num_layers=2),
        "tied": make_tiny_model(folder / "tied", "qwen2", num_layers=2, tied=True),
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
    )
    engine = TrainEngine(spec, groups, job.device, job.board.beat)
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
    """The two steps on this rank; losses and outputs are its share."""
    engine, part = make_engine(job, groups, case, folder), Rank(case, place, job.rank, groups)
    assert engine.optimizer is not None
    steps = Steps(before=engine.forward(part.sequences).values)

    def keep(*_: object) -> None:
        steps.gradients.append({n: whole(p.grad) for n, p in hf_parameters(engine.model) if p.grad is not None})

    engine.optimizer.adamw.register_step_pre_hook(keep)
    for batch in part.mini_batches:
        norm, rate = engine.train_step(part.sequences, batch.rows, part.loss(batch))
        steps.norms.append(norm)
        steps.rates.append(rate)
    steps.losses = part.losses
    steps.after = engine.forward(part.sequences).values
    steps.parameters = {n: whole(p) for n, p in hf_parameters(engine.model)}
    return steps


def train_on_ranks(ranks: tuple[int, ...], cases: dict[str, Case], models: dict[str, Path]) -> dict[str, Steps]:
    """All cases, one after the other; nothing on a rank that does not train."""
    job = start_job(stage_timeout=60, check_program=False)
    place = Placement("actor", ranks)
    groups = make_groups([place], job.rank, "cpu", job.timeout).get("actor")
    results = {}
    if groups is not None:
        results = {name: train_case(job, place, groups, case, models[case.model]) for name, case in cases.items()}
    job.close()
    return results


@pytest.fixture(scope="module")
def on_ranks(models: dict[str, Path]) -> Callable[[str], list[dict[str, Steps]]]:
    """All cases in one job of a layout; the results of its ranks in the role's own order."""

    @functools.cache
    def run(layout: str) -> list[dict[str, Steps]]:
        world, ranks = LAYOUTS[layout]
        results = run_ranks(world, train_on_ranks, ranks, CASES, models)
        return [results[rank] for rank in ranks]

    return run


@pytest.fixture(scope="module")
def plain(models: dict[str, Path]) -> Callable[[str], Steps]:
    @functools.cache
    def run(name: str) -> Steps:
        case = CASES[name]
        seed = SEED if case.head is Head.token_value else None
        folder = models[case.model]
        return plain_loop.train(folder, seed, case.batch, case.mini_batches, case.token_loss(), OPTIM, TOTAL_STEPS)

    return run


def distance(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """The largest difference in any parameter, relative to the parameter's largest entry."""
    assert ours.keys() == theirs.keys()
    return max(float((ours[n] - theirs[n]).abs().max() / theirs[n].abs().max().clamp(min=1e-12)) for n in theirs)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_steps_are_those_of_a_plain_loop(
    layout: str, name: str, on_ranks: Callable[[str], list[dict[str, Steps]]], plain: Callable[[str], Steps]
) -> None:
    ranks, wanted = [results[name] for results in on_ranks(layout)], plain(name)
    torch.testing.assert_close(torch.cat([r.before for r in ranks]), wanted.before, rtol=1e-5, atol=1e-5)
    losses = [sum(parts) for parts in zip(*(r.losses for r in ranks), strict=True)]
    assert losses == pytest.approx(wanted.losses, rel=1e-6, abs=1e-6)
    for rank in ranks:
        assert rank.norms == pytest.approx(wanted.norms, rel=1e-5)
        assert rank.rates == pytest.approx(wanted.rates)
        assert [distance(*both) < 1e-5 for both in zip(rank.gradients, wanted.gradients, strict=True)] == [True, True]
        assert distance(rank.parameters, wanted.parameters) < 1e-5
    torch.testing.assert_close(torch.cat([r.after for r in ranks]), wanted.after, rtol=1e-5, atol=1e-5)


def test_the_reference_learns_and_clips(plain: Callable[[str], Steps]) -> None:
    """So that the comparison above means something."""
    for name in CASES:
        steps = plain(name)
        assert min(steps.norms) > OPTIM.clip_grad
        assert (steps.after - steps.before).abs().max() > 0.05


# -- bfloat16 -------------------------------------------------------------------------------------------------------


def train_in_bfloat16(models: dict[str, Path]) -> tuple[dict[str, Tensor], dict[str, Tensor], set[torch.dtype]]:
    """The gradient of a step of rate 1e-5 without clipping, what the step changed, the dtypes of what is kept."""
    job = start_job(stage_timeout=60, check_program=False)
    case, place = CASES["actor"], Placement("actor", (0, 1))
    groups = make_groups([place], job.rank, "cpu", job.timeout)["actor"]
    engine, part = make_engine(job, groups, case, models["llama"], torch.bfloat16), Rank(case, place, job.rank, groups)
    optimizer = engine.optimizer
    assert optimizer is not None
    optimizer.config = replace(OPTIM, lr=1e-5, clip_grad=0.0)
    before = {n: whole(p) for n, p in hf_parameters(engine.model)}
    kept: dict[str, Tensor] = {}
    optimizer.adamw.register_step_pre_hook(
        lambda *_: kept.update({n: whole(p.grad) for n, p in hf_parameters(engine.model) if p.grad is not None})
    )
    batch = part.mini_batches[0]
    engine.train_step(part.sequences, batch.rows, part.loss(batch))
    moved = {n: whole(p) - before[n] for n, p in hf_parameters(engine.model)}
    state = optimizer.adamw.state.values()
    dtypes = (
        {p.dtype for p in optimizer.parameters} | {s["exp_avg"].dtype for s in state} | {g.dtype for g in kept.values()}
    )
    job.close()
    return kept, moved, dtypes


def test_bfloat16_computes_on_float32_masters(models: dict[str, Path], plain: Callable[[str], Steps]) -> None:
    """A rounding to bfloat16 is off by up to 2^-9. Two layers have some 60 of them in a row, forward and backward, and
    independent errors add up as their root does: sqrt(60) * 2^-9 = 1.5 %; three times that is the bound.
    """
    gradient, moved, dtypes = run_ranks(2, train_in_bfloat16, models)[0]
    assert dtypes == {torch.float32}
    steps = plain("actor")
    wanted = {n: g * (steps.norms[0] / OPTIM.clip_grad) for n, g in steps.gradients[0].items()}
    error = math.sqrt(sum(float((gradient[n] - wanted[n]).square().sum()) for n in wanted))
    norm = math.sqrt(sum(float(g.square().sum()) for g in wanted.values()))
    assert 1e-4 < error / norm < 3 * math.sqrt(60) * 2**-9
    # several micro-batches on two ranks were summed in float32
    assert (gradient["lm_head.weight"] != gradient["lm_head.weight"].bfloat16()).float().mean() > 0.5
    # the update is 1e-5 of the norms' weights, which are about 1: bfloat16 could not hold it
    assert 0 < moved["model.norm.weight"].abs().max() < 2**-9


# -- a gradient that is not finite ----------------------------------------------------------------------------------


def meet_a_nan(models: dict[str, Path]) -> tuple[list[float], bool, bool, int]:
    """(norms of two steps, the first of which is bad on rank 1 alone; nothing changed then; something did; steps)"""
    job = start_job(stage_timeout=60, check_program=False)
    case, place = CASES["actor"], Placement("actor", (0, 1))
    groups = make_groups([place], job.rank, "cpu", job.timeout)["actor"]
    engine, part = make_engine(job, groups, case, models["llama"]), Rank(case, place, job.rank, groups)
    assert engine.optimizer is not None
    start = {n: whole(p) for n, p in hf_parameters(engine.model)}
    norms, changed = [], []
    for number, batch in enumerate(part.mini_batches):
        loss = part.loss(batch)
        factor = math.nan if number == 0 and job.rank == 1 else 1.0
        norms.append(engine.train_step(part.sequences, batch.rows, lambda o, at, f=factor, fn=loss: f * fn(o, at))[0])
        changed.append(any(not torch.equal(whole(p), start[n]) for n, p in hf_parameters(engine.model)))
    steps = engine.optimizer.steps_done
    job.close()
    return norms, changed[0], changed[1], steps


def test_a_gradient_that_is_not_finite_is_seen_and_changes_nothing(models: dict[str, Path]) -> None:
    for norms, changed_then, changed_later, steps in run_ranks(2, meet_a_nan, models):
        assert math.isnan(norms[0]) and math.isfinite(norms[1])
        assert (changed_then, changed_later, steps) == (False, True, 2)
