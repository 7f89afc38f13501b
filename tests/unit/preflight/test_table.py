"""The one text that a user sees of all that is wrong with a cluster."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.paper_clusters import VERSIONS, changed, cluster
from verl.preflight.compare import Problem, compare
from verl.preflight.table import MOST_ROWS, span, summary, table


def test_a_table_says_where_what_and_how_to_mend_it() -> None:
    facts = changed(cluster([2, 2]), [2, 3], versions=VERSIONS | {"torch": "2.12.1"}, visible="0")
    assert table(compare(facts)).splitlines() == [
        "node   ranks  what                  is      should be       remedy",
        "node2  2-3    CUDA_VISIBLE_DEVICES  0       0,1 (node1)     on node2: export CUDA_VISIBLE_DEVICES=0,1",
        "node2  2-3    torch                 2.12.1  2.13.0 (node1)  on node2: pip install 'torch==2.13.0'",
    ]


def test_a_long_value_is_cut_and_a_long_table_too() -> None:
    problems = [
        Problem("node2", (1,), f"setting {i}", "x" * 100, "y\nz", "mend it " * 20) for i in range(MOST_ROWS + 3)
    ]
    lines = table(problems).splitlines()
    assert lines[-1] == "and 3 more" and len(lines) == MOST_ROWS + 2
    assert lines[1] == "node2  1      setting 0   " + "x" * 52 + " ...  y z        " + ("mend it " * 20).rstrip()


@pytest.mark.parametrize(
    ("ranks", "text"), [([0], "0"), ([0, 1, 2, 3], "0-3"), ([5, 0, 1, 7, 6], "0-1,5-7"), ([4, 2], "2,4")]
)
def test_spans_of_ranks(ranks: list[int], text: str) -> None:
    assert span(ranks) == text


@given(st.sets(st.integers(0, 40), min_size=1))
def test_a_span_can_be_read_back(ranks: set[int]) -> None:
    read: set[int] = set()
    for part in span(ranks).split(","):
        first, _, last = part.partition("-")
        read |= set(range(int(first), int(last or first) + 1))
    assert read == ranks


def test_the_summary_has_a_line_for_each_node() -> None:
    lines = summary(cluster([4, 4])).splitlines()
    assert lines[1] == (
        "node2: rank 4-7, 4 x NVIDIA A800 80GB (80 GiB), python 3.11.9, torch 2.13.0, transformers 5.17.0, "
        "vllm 0.32.0, nccl 2.27.5, eth0 10.0.0.2"
    )
    assert len(lines) == 2 and lines[0].startswith("node1: rank 0-3, ")
