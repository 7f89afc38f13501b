"""Pipeline stages on real ranks against a plain loop of one process: no split changes what is learnt."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification

from scripts.make_tiny_model import make_tiny_reward_model
from tests.support.engine_cases import (
    LONG,
    Case,
    Rank,
    assert_same_steps,
    make_engine,
    make_models,
    train_on_ranks,
    whole,
)
from tests.support.plain_loop import Steps
from tests.support.ranks import run_ranks
from verl.engine.train_engine import EngineSpec, TrainEngine
from verl.flow.job import start_job
from verl.flow.placement import Placement, make_groups
from verl.model.heads import Head, TokenOutputs
from verl.model.load import hf_parameters
from verl.model.packing import MicroBatch, Sequences
from verl.parallel.idle import Idle
from verl.parallel.passes import Around
from verl.parallel.pipeline import Pipelined

pytestmark = pytest.mark.dist

NUM_LAYERS = 5
"""No stage count divides it."""
CASES = {
    "actor": Case(),
    "tied actor": Case("tied llama", max_tokens=25),
    "qwen2": Case("qwen2", max_tokens=25),
    "tied qwen2": Case("tied", checkpointing=True),
    "critic": Case("qwen2", head=Head.token_value),
    "one long row": Case(shapes=tuple(LONG), max_tokens=12, checkpointing=True),
    "a rank of dead rows": Case(dead=(0, 1, 2, 3, 4, 5), max_tokens=1000),
    "a rank without rows": Case("tied", blocks=True, head=Head.token_value, max_tokens=15),
    "parameters gathered for each": Case("tied llama", reshard=True, checkpointing=True),
}
INTERLEAVED = {
    name: replace(CASES[name], virtual_stages=2) for name in ("actor", "tied actor", "one long row", "critic")
}
LAYOUTS = {
    "2 stages": (2, Placement("actor", (0, 1), pp=2), CASES),
    "4 stages": (4, Placement("actor", (0, 1, 2, 3), pp=4), CASES),
    "2 stages of 2, in any order": (4, Placement("actor", (3, 1, 0, 2), pp=2), CASES),
    "2 interleaved stages": (3, Placement("actor", (2, 1), pp=2), INTERLEAVED),
    "2 interleaved stages of 2": (4, Placement("actor", (0, 1, 2, 3), pp=2), INTERLEAVED),
    "2 interleaved stages of 2, which share rows out": (4, Placement("actor", (3, 1, 0, 2), pp=2, cp=2), INTERLEAVED),
}
"""Name -> (ranks of the job, the role's place, cases)."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_models(tmp_path_factory.mktemp("models"), ["llama", "tied llama", "qwen2", "tied"], NUM_LAYERS)


@pytest.fixture(scope="module")
def on_ranks(models: dict[str, Path]) -> Callable[[str], dict[int, dict[str, Steps]]]:
    """All cases in one job of a layout; the results of its ranks."""

    @functools.cache
    def run(layout: str) -> dict[int, dict[str, Steps]]:
        world, place, cases = LAYOUTS[layout]
        results = run_ranks(world, train_on_ranks, place, cases, models)
        return {rank: results[rank] for rank in place.ranks}

    return run


@pytest.fixture(scope="module")
def plain(models: dict[str, Path]) -> Callable[[str], Steps]:
    return functools.cache(lambda name: CASES[name].plainly(models[CASES[name].model]))


@pytest.mark.parametrize(("layout", "name"), [(layout, name) for layout in LAYOUTS for name in LAYOUTS[layout][2]])
def test_two_steps_are_those_of_a_plain_loop(
    layout: str, name: str, on_ranks: Callable[[str], dict[int, dict[str, Steps]]], plain: Callable[[str], Steps]
) -> None:
    place = LAYOUTS[layout][1]
    ranks = {rank: results[name] for rank, results in on_ranks(layout).items()}
    assert_same_steps(place, ranks, plain(name))
    assert [rank for rank in place.ranks if len(ranks[rank].before)] == list(place.outputs.ranks)


def test_the_copies_of_a_tied_embedding_stay_alike_bit_for_bit(
    on_ranks: Callable[[str], dict[int, dict[str, Steps]]],
) -> None:
    place = LAYOUTS["2 stages of 2, in any order"][1]
    first, last = (on_ranks("2 stages of 2, in any order")[rank]["tied actor"] for rank in (3, 0))
    shared = first.parameters.keys() & last.parameters.keys()
    assert shared == {"model.embed_tokens.weight"} and place.coordinate(0).pp == 1
    assert all(torch.equal(first.parameters[name], last.parameters[name]) for name in shared)


# -- a gradient that is not finite -----------------------------------------------------------------------------------


def meet_a_nan(models: dict[str, Path]) -> tuple[float, bool, bool]:
    """(norm of a step whose last stage has a bad loss; something changed then; something changed one step later)"""
    job = start_job(stage_timeout=300, check_program=False)
    place = Placement("actor", (0, 1), pp=2)
    groups = make_groups([place], job.rank, "cpu", job.timeout)["actor"]
    case = CASES["tied actor"]
    engine, part = make_engine(job, groups, case, models[case.model]), Rank(case, place, job.rank, groups)
    start = {n: whole(p) for n, p in hf_parameters(engine.model)}
    norms, changed = [], []
    for batch, factor in zip(part.mini_batches, (math.nan, 1.0), strict=True):
        loss = part.loss(batch)
        norms.append(engine.train_step(part.sequences, batch.rows, lambda o, at, f=factor, fn=loss: f * fn(o, at))[0])
        changed.append(any(not torch.equal(whole(p), start[n]) for n, p in hf_parameters(engine.model)))
    job.close()
    return norms[0], changed[0], changed[1]


def test_a_gradient_that_is_not_finite_changes_no_stage(models: dict[str, Path]) -> None:
    for norm, then, later in run_ranks(2, meet_a_nan, models):
        assert math.isnan(norm)
        assert (then, later) == (False, True)


# -- frozen ----------------------------------------------------------------------------------------------------------


def scores_on_stages(folder: Path, ids: list[Tensor]) -> Tensor | None:
    job = start_job(stage_timeout=300, check_program=False)
    groups = make_groups([Placement("reward", (0, 1), pp=2)], job.rank, "cpu", job.timeout)["reward"]
    spec = EngineSpec(folder, Head.score, False, torch.float32, seed=1, max_tokens_per_micro_batch=20)
    engine = TrainEngine(spec, groups, job.device, job.board)
    outputs = engine.forward(Sequences.last_tokens([i[:2] for i in ids], [i[2:] for i in ids]))
    job.close()
    return None if outputs is None else outputs.values


def test_a_reward_model_on_two_stages_has_the_scores_of_transformers(tmp_path: Path) -> None:
    folder = make_tiny_reward_model(tmp_path / "reward", "qwen3")
    draws = torch.Generator().manual_seed(1)
    ids = [torch.randint(3, 300, (length,), generator=draws) for length in (5, 19, 2, 11, 7)]
    first, last = run_ranks(2, scores_on_stages, folder, ids)
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        wanted = torch.cat([model(row[None]).logits[0] for row in ids])
    assert first is None and last is not None
    torch.testing.assert_close(last, wanted, rtol=1e-5, atol=1e-5)


# -- the bubble ------------------------------------------------------------------------------------------------------

NAP = 0.05
"""Seconds of each action."""
LONG_NAP = 1.0
"""Long beside what a busy machine takes away."""


class Nap(torch.autograd.Function):
    seconds = 0.0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        time.sleep(Nap.seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        time.sleep(Nap.seconds)
        return grads[0]


class SleepingPart(nn.Module):
    """Stands for a `HeadedModel`."""

    def __init__(self, last: bool) -> None:
        super().__init__()
        self.ends_with_head, self.time_shares = last, 1
        self.hf = SimpleNamespace(config=SimpleNamespace(get_text_config=lambda: SimpleNamespace(hidden_size=3)))
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, batch: MicroBatch, temperature: float, states: Tensor | None) -> Tensor | TokenOutputs:
        x = self.weight.expand(*batch.input_ids.shape, 3) if states is None else states * self.weight
        made = Nap.apply(x)
        return TokenOutputs(made.flatten()) if self.ends_with_head else made


def sleep_through(num_batches: int, virtual: int, nap: float) -> Idle:
    job = start_job(stage_timeout=300, check_program=False)
    place = Placement("actor", (0, 1), pp=2)
    groups = make_groups([place], job.rank, "cpu", job.timeout)["actor"]
    parts: list[Any] = [SleepingPart(last=job.rank == 1 and chunk == virtual - 1) for chunk in range(virtual)]
    around = Around(job.device, job.board, lambda: torch.enable_grad(), lambda part, last: None)
    pipeline = Pipelined(parts, groups.mesh.get_group("pp"), torch.float32, around, stage_peers=())
    nothing = torch.empty(0, dtype=torch.int64)
    batches = []
    for number in range(num_batches):
        ids = torch.zeros(1, 1 + number, dtype=torch.int64)
        batches.append(MicroBatch(ids, ids, nothing, nothing, nothing))
    for seconds in (0.0, nap):  # the first pass wakes libraries up
        Nap.seconds = seconds
        job.everywhere(None)
        idle = pipeline.train(batches, 1.0, lambda outputs, batch: outputs.values.sum())
    assert parts[0].weight.grad is not None
    job.close()
    return idle


@pytest.mark.parametrize(("num_batches", "virtual", "nap"), [(1, 1, LONG_NAP), (6, 1, NAP), (4, 2, NAP)])
def test_the_bubble_is_measured_on_every_stage(num_batches: int, virtual: int, nap: float) -> None:
    """All actions take equally long: it is (p - 1) / (v m + p - 1), for two stages a forward and a backward.

    A busy machine makes it longer, or shorter where a stage comes late to its wait: what is made sure of is that a
    stage does not count its own naps, and that it counts the other's, where these are long.
    """
    for idle in run_ranks(2, sleep_through, num_batches, virtual, nap):
        assert 0 < idle.idle < idle.total - 2 * num_batches * virtual * nap
        assert nap < LONG_NAP or idle.idle > 0.5 * LONG_NAP  # twice as much as a nap, where nobody is late
