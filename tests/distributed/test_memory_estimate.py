"""What a mesh is reckoned to need against what ranks really hold while they work, term by term."""

from __future__ import annotations

import pytest

from scripts.bench import memory
from scripts.bench.memory import CASES, QUICK, TERMS, Case, make_model, measure_case
from scripts.bench.ranks import on_ranks

pytestmark = [pytest.mark.dist, pytest.mark.timeout(900)]

NAMED = {case.name: case for case in CASES}


@pytest.mark.parametrize("name", ["TP 2", "CP 2", "FSDP 2, LoRA", "PP 2 x FSDP 2, checkpointing"])
def test_every_term_that_matters_is_near_what_is_measured(
    name: str, tmp_path: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "OUT", tmp_path)
    case: Case = NAMED[name]
    roles = on_ranks(case.world, measure_case, case, make_model(case, QUICK), QUICK, timeout=300.0)
    for role, ranks in roles.items():
        for rank, figures in enumerate(ranks):
            assert not figures.missed(), (role, rank, figures)
        if role != "reference":
            assert all(set(figures.measured) == set(TERMS) for figures in ranks)
            assert all(min(figures.measured.values()) > 0 for figures in ranks)
