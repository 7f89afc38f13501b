"""Families, split over real ranks, against plain Hugging Face in one process. `make parity` runs all combinations."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.parity import FAMILIES, Case, Errors, Layout, compare, make_family, reference
from verl.model.heads import Head

pytestmark = pytest.mark.dist

LOSS, GRADIENT, OUTPUTS = 1e-6, 1e-5, 1e-5
"""What float32 allows: sums over ranks and packed rows are in another order than the reference's."""

SPLIT = [family for family in FAMILIES if family not in ("phi3", "qwen3_moe")]
SHARED_OUT = ("llama", "qwen3", "gemma2", "gemma3", "phi3", "qwen3_moe")
LAYOUTS: dict[str, tuple[Layout, list[Case]]] = {
    "FSDP 2": (
        (1, 2, 1),
        [Case(family, Head.lm) for family in ("phi3", "gemma2", "mistral", "qwen3_moe", "smollm3")],
    ),
    "TP 2": (
        (1, 1, 2),
        [Case(family, Head.lm, frugal=number % 2 == 1) for number, family in enumerate(SPLIT)]
        + [Case("llama", Head.token_value), Case("gemma3", Head.token_value, frugal=True)],
    ),
    "TP 4": (
        (1, 1, 4),
        [
            Case("llama, tied (SmolLM2)", Head.lm, frugal=True),
            Case("qwen3, one KV head", Head.lm),
            Case("qwen2, one KV head", Head.token_value),
        ],
    ),
    "FSDP 2 x TP 2": (
        (1, 2, 2),
        [
            Case("llama, with biases", Head.lm),
            Case("gemma2", Head.lm, frugal=True),
            Case("qwen3, one KV head", Head.token_value, frugal=True),
        ],
    ),
    "CP 2": (
        (1, 1, 1, 2),
        [Case(family, Head.lm, frugal=number % 2 == 1) for number, family in enumerate(SHARED_OUT)]
        + [Case("llama", Head.token_value, frugal=True), Case("gemma2", Head.token_value)],
    ),
    "CP 4": (
        (1, 1, 1, 4),
        [Case("llama, one KV head", Head.lm, frugal=True)],
    ),
    "CP 2 x FSDP 2": (
        (1, 2, 1, 2),
        [
            Case("llama, tied (SmolLM2)", Head.lm, frugal=True),
            Case("qwen3, one KV head", Head.token_value),
        ],
    ),
    "CP 2 x TP 2": (
        (1, 1, 2, 2),
        [
            Case("llama, one KV head", Head.lm, frugal=True),
            Case("gemma3", Head.token_value),
        ],
    ),
    "PP 2 x CP 2": (
        (2, 1, 1, 2),
        [Case("llama, tied (SmolLM2)", Head.lm, frugal=True)],
    ),
    "PP 2 x FSDP 2 x TP 2": (
        (2, 2, 2),
        [
            Case("llama, tied (SmolLM2)", Head.lm),
            Case("gemma3", Head.lm, frugal=True),
            Case("qwen3, one KV head", Head.token_value, frugal=True),
        ],
    ),
}
PAIRS = [
    pytest.param(name, case, id=f"{name}-{case.family}-{case.head}")
    for name, (_, cases) in LAYOUTS.items()
    for case in cases
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("families")
    return {name: make_family(folder, name) for name in FAMILIES}


@pytest.fixture(scope="module")
def errors(folders: dict[str, Path]) -> Callable[[str], dict[Case, Errors]]:
    """By layout, all of its cases in one job."""

    @functools.cache
    def wanted(family: str, head: Head) -> object:
        return reference(Case(family, head), folders[family])

    @functools.cache
    def run(name: str) -> dict[Case, Errors]:
        layout, cases = LAYOUTS[name]
        return compare(layout, cases, folders, {case: wanted(case.family, case.head) for case in cases})  # type: ignore[misc]

    return run


@pytest.mark.parametrize(("layout", "case"), PAIRS)
def test_loss_gradients_and_outputs_are_those_of_one_process(
    layout: str, case: Case, errors: Callable[[str], dict[Case, Errors]]
) -> None:
    found = errors(layout)[case]
    assert found.loss <= LOSS
    assert found.gradient <= GRADIENT, found.worst
    assert found.norm <= GRADIENT
    assert found.outputs <= OUTPUTS
    assert found.disagreement == 0.0, "ranks that hold the same rows must go the same way at every threshold"
