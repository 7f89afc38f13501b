"""The order in which the actor's ranks generate. Groups are the paper's (arXiv:2409.19256, figure 8)."""

from __future__ import annotations

from itertools import pairwise, product

import pytest

from verl.flow.place import place_roles
from verl.flow.placement import Placement
from verl.flow.regroup import generation_order
from verl.mesh.parse import parse_value


def pairs(ranks: tuple[int, ...], size: int) -> list[tuple[int, ...]]:
    return [ranks[i : i + size] for i in range(0, len(ranks), size)]


def test_the_papers_groups() -> None:
    """Training 1-4-2 on GPUs 1 to 8, generation with TP 2."""
    order = generation_order(Placement("actor", tuple(range(1, 9)), tp=4), 2)
    assert pairs(order, 2) == [(1, 3), (2, 4), (5, 7), (6, 8)]


def test_stages_generate_too() -> None:
    """Two stages of TP 2, listed backwards: the stages' ranks become replicas of their own."""
    order = generation_order(Placement("actor", (7, 6, 5, 4), tp=2, pp=2), 2)
    assert pairs(order, 2) == [(7, 6), (5, 4)]


@pytest.mark.parametrize("pp, tp, dp, smaller", [c for c in product((1, 2), (2, 4), (1, 2), (1, 2, 4)) if c[1] >= c[3]])
def test_every_rank_generates_once_and_with_peers_of_its_training_replica(
    pp: int, tp: int, dp: int, smaller: int
) -> None:
    actor = Placement("actor", tuple(range(pp * tp * dp)), tp, pp)
    order = generation_order(actor, smaller)
    assert sorted(order) == list(actor.ranks)
    for replica in pairs(order, smaller):
        assert len({actor.coordinate(rank).dp for rank in replica}) == 1
        places = [actor.coordinate(rank).tp for rank in replica]
        assert places == sorted(places) and {b - a for a, b in pairwise(places)} <= {tp // smaller}


def test_context_parallel_ranks_have_replicas_of_their_own() -> None:
    order = generation_order(Placement("actor", tuple(range(8)), tp=4, cp=2), 2)
    assert pairs(order, 2) == [(0, 2), (1, 3), (4, 6), (5, 7)]


def test_sizes_that_do_not_divide_keep_the_listed_order() -> None:
    assert generation_order(Placement("actor", (3, 1, 2, 0), tp=1), 2) == (3, 1, 2, 0)


@pytest.mark.parametrize(
    "backend, devices, expected",
    [
        ("torch", [0, 1, 2, 3], (0, 2, 1, 3)),
        ("torch", [1, 0, 2, 3], (1, 0, 2, 3)),
        ("vllm", [0, 1, 2, 3], (0, 1, 2, 3)),
        ("auto", [0, 1, 2, 3], (0, 1, 2, 3)),
    ],
)
def test_only_the_torch_backend_on_the_actors_list_is_regrouped(
    backend: str, devices: list[int], expected: tuple[int, ...]
) -> None:
    mesh = parse_value(
        {
            "actor": {"devices": [0, 1, 2, 3], "parallelism": {"tensor_parallel_size": 4}},
            "rollout": {"devices": devices, "tensor_parallel_size": 2, "backend": backend},
        },
        "test",
    )
    placed = place_roles(mesh, {"actor": (0, 1, 2, 3), "rollout": tuple(devices)}, [])
    assert placed["rollout"].ranks == expected
    assert placed["reward"].ranks == expected[::2], "the reward is where the rows are"
