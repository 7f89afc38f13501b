"""The training engine on real ranks against a plain loop of one process: no mesh, no packing changes what is learnt."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.support.engine_cases import (
    LONG,
    OPTIM,
    Case,
    Rank,
    assert_same_steps,
    make_engine,
    make_models,
    train_on_ranks,
    whole,
)  # fmt: skip
from tests.support.plain_loop import Steps
from tests.support.ranks import run_ranks
from verl.flow.job import start_job
from verl.flow.placement import Placement, make_groups
from verl.model.heads import Head
from verl.model.load import hf_parameters

pytestmark = pytest.mark.dist

LAYOUTS = {"one": (1, (0,)), "two": (2, (0, 1)), "three": (3, (0, 1, 2)), "two of three, descending": (3, (2, 0))}

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
    return make_models(tmp_path_factory.mktemp("models"), ["llama", "qwen3", "tied"])


@pytest.fixture(scope="module")
def on_ranks(models: dict[str, Path]) -> Callable[[str], dict[int, dict[str, Steps]]]:
    """All cases in one job of a layout; the results of its ranks."""

    @functools.cache
    def run(layout: str) -> dict[int, dict[str, Steps]]:
        world, ranks = LAYOUTS[layout]
        results = run_ranks(world, train_on_ranks, Placement("actor", ranks), CASES, models)
        return {rank: results[rank] for rank in ranks}

    return run


@pytest.fixture(scope="module")
def plain(models: dict[str, Path]) -> Callable[[str], Steps]:
    return functools.cache(lambda name: CASES[name].plainly(models[CASES[name].model]))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_steps_are_those_of_a_plain_loop(
    layout: str, name: str, on_ranks: Callable[[str], dict[int, dict[str, Steps]]], plain: Callable[[str], Steps]
) -> None:
    ranks = {rank: results[name] for rank, results in on_ranks(layout).items()}
    assert_same_steps(Placement("actor", LAYOUTS[layout][1]), ranks, plain(name))


def test_the_reference_learns_and_clips(plain: Callable[[str], Steps]) -> None:
    """So that the comparison above means something."""
    for name in CASES:
        steps = plain(name)
        assert min(steps.norms) > OPTIM.clip_grad
        assert (steps.after - steps.before).abs().max() > 0.05


# -- bfloat16 -------------------------------------------------------------------------------------------------------


def train_in_bfloat16(models: dict[str, Path]) -> tuple[dict[str, Tensor], dict[str, Tensor], set[torch.dtype]]:
    """The gradient of a step of rate 1e-5 without clipping, what the step changed, the dtypes of what is kept."""
    job = start_job(stage_timeout=300, check_program=False)
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
    job = start_job(stage_timeout=300, check_program=False)
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
