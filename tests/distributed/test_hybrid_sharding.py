"""Copies of a model on real ranks, each spread over some of them, against a plain loop of one process."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.support.engine_cases import Case, assert_same_steps, make_models, train_case
from tests.support.plain_loop import Steps
from tests.support.ranks import run_ranks
from verl.flow.job import start_job
from verl.flow.placement import Placement, make_groups
from verl.model.heads import Head

pytestmark = [pytest.mark.dist, pytest.mark.timeout(900)]

CASES = {
    "actor": Case(),
    "tied": Case("tied llama", max_tokens=20),
    "critic, gathered twice": Case("qwen3", head=Head.token_value, reshard=True, checkpointing=True),
    "a rank without rows": Case("tied", blocks=True, head=Head.token_value, max_tokens=15),
}
PLACES = {
    "two copies of two, in any order": Placement("actor", (3, 1, 0, 2), fsdp_size=2),
    "four copies": Placement("actor", (0, 1, 2, 3), fsdp_size=1),
    "two copies on TP 2": Placement("actor", (0, 2, 1, 3), tp=2, fsdp_size=1),
    "two stages of two copies": Placement("actor", (3, 2, 1, 0), pp=2, fsdp_size=1),
    "two copies on CP 2": Placement("actor", (0, 2, 3, 1), cp=2, fsdp_size=2),
}
EIGHT = Placement("actor", (4, 5, 0, 1, 7, 6, 2, 3), tp=2, fsdp_size=2)
"""Two copies, on 2 x TP 2 ranks each."""
DONE = {
    "two copies of two, in any order": list(CASES),
    "four copies": ["actor", "a rank without rows"],
    "two copies on TP 2": ["critic, gathered twice"],
    "two stages of two copies": ["tied"],
    "two copies on CP 2": ["tied"],
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_models(tmp_path_factory.mktemp("models"), ["llama", "qwen3", "tied", "tied llama"])


def train_on_places(
    places: Mapping[str, Placement], cases: Mapping[str, Sequence[str]], models: Mapping[str, Path]
) -> dict[tuple[str, str], Steps]:
    """All in one job."""
    job = start_job(stage_timeout=300, check_program=False)
    named = [replace(place, role=name) for name, place in places.items()]
    groups = make_groups(named, job.rank, "cpu", job.timeout)
    results = {
        (name, case): train_case(job, place, groups[name], CASES[case], models[CASES[case].model])
        for name, place in places.items()
        for case in cases[name]
    }
    job.close()
    return results


@pytest.fixture(scope="module")
def on_four(models: dict[str, Path]) -> list[dict[tuple[str, str], Steps]]:
    return run_ranks(4, train_on_places, PLACES, DONE, models)


@pytest.fixture(scope="module")
def plain(models: dict[str, Path]) -> Callable[[str], Steps]:
    return functools.cache(lambda case: CASES[case].plainly(models[CASES[case].model]))


@pytest.mark.parametrize(("name", "case"), [(name, case) for name, cases in DONE.items() for case in cases])
def test_two_steps_are_those_of_a_plain_loop(
    name: str, case: str, on_four: list[dict[tuple[str, str], Steps]], plain: Callable[[str], Steps]
) -> None:
    """Gradients, the norm that clips them, losses, outputs and parameters."""
    ranks = {rank: results[name, case] for rank, results in enumerate(on_four)}
    assert_same_steps(PLACES[name], ranks, plain(case))
    assert_copies_are_the_same_bits(ranks)


def assert_copies_are_the_same_bits(ranks: Mapping[int, Steps]) -> None:
    known: dict[str, torch.Tensor] = {}
    for steps in ranks.values():
        for name, parameter in steps.parameters.items():
            assert torch.equal(known.setdefault(name, parameter), parameter), name


@pytest.mark.slow
def test_copies_shards_and_tensor_parallel_ranks(models: dict[str, Path], plain: Callable[[str], Steps]) -> None:
    cases = ["actor", "critic, gathered twice"]
    found = run_ranks(8, train_on_places, {"eight": EIGHT}, {"eight": cases}, models)
    for case in cases:
        ranks = {rank: results["eight", case] for rank, results in enumerate(found)}
        assert_same_steps(EIGHT, ranks, plain(case))
        assert_copies_are_the_same_bits(ranks)
