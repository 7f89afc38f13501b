"""Process groups keep a role's listed order, on members and on ranks that only make them."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.support.ranks import run_ranks
from verl.flow.job import start_job
from verl.flow.placement import Placement, make_groups

pytestmark = pytest.mark.dist

PLACES = [
    Placement("actor", (3, 1, 0, 2), tp=2),
    Placement("critic", (2, 0), pp=2),
    Placement("reference", (2, 0, 3, 1), fsdp_size=2),
    Placement("rollout", (1, 3), tp=2, leaders_only=True),
]


def places_in_groups() -> dict[str, tuple[tuple[int, ...], dict[str, list[int]]]]:
    """By role: this rank's coordinate in its mesh, and the ranks of each of its groups in the group's order."""
    job = start_job(stage_timeout=300, check_program=False)
    groups = make_groups(PLACES, job.rank, "cpu", job.timeout)
    said = {}
    for role, mine in groups.items():
        coordinate = mine.mesh.get_coordinate()
        assert coordinate is not None
        assert mine.mesh.mesh_dim_names is not None
        of = {axis: mine.mesh.get_group(axis) for axis in mine.mesh.mesh_dim_names}
        of |= {"rows": mine.rows, "all": mine.everyone}
        said[role] = tuple(coordinate), {name: members(group, job.rank) for name, group in of.items()}
    job.close()
    return said


def members(group: dist.ProcessGroup, rank: int) -> list[int]:
    """What an all-gather on the group gives: its order is the one that shards are laid out in."""
    ranks = [torch.zeros(1, dtype=torch.int64) for _ in range(group.size())]
    dist.all_gather(ranks, torch.tensor([rank]), group=group)
    return [int(r) for r in ranks]


def test_groups_and_coordinates() -> None:
    said = run_ranks(4, places_in_groups)
    assert [sorted(roles) for roles in said] == [
        ["actor", "critic", "reference"],
        ["actor", "reference", "rollout"],
        ["actor", "critic", "reference"],
        ["actor", "reference", "rollout"],
    ]
    every = [3, 1, 0, 2]
    assert said[3]["actor"] == ((0, 0, 0), {"pp": [3], "shards": [3, 0], "tp": [3, 1], "rows": [3, 0], "all": every})
    assert said[1]["actor"] == ((0, 0, 1), {"pp": [1], "shards": [1, 2], "tp": [3, 1], "rows": [1, 2], "all": every})
    assert said[0]["actor"] == ((0, 1, 0), {"pp": [0], "shards": [3, 0], "tp": [0, 2], "rows": [3, 0], "all": every})
    assert said[2]["actor"] == ((0, 1, 1), {"pp": [2], "shards": [1, 2], "tp": [0, 2], "rows": [1, 2], "all": every})
    assert said[2]["critic"] == ((0, 0, 0), {"pp": [2, 0], "shards": [2], "tp": [2], "rows": [2], "all": [2, 0]})
    assert said[0]["critic"] == ((1, 0, 0), {"pp": [2, 0], "shards": [0], "tp": [0], "rows": [0], "all": [2, 0]})
    assert said[3]["rollout"] == ((0, 0, 1), {"pp": [3], "shards": [3], "tp": [1, 3], "rows": [3], "all": [1, 3]})
    pair = {"pp": [3], "copies": [2, 3], "shards": [3, 1], "tp": [3], "rows": [2, 0, 3, 1], "all": [2, 0, 3, 1]}
    assert said[3]["reference"] == ((0, 1, 0, 0), pair)
    assert said[1]["reference"] == ((0, 1, 1, 0), pair | {"pp": [1], "copies": [0, 1], "tp": [1]})
    assert said[0]["reference"] == ((0, 0, 1, 0), pair | {"pp": [0], "copies": [0, 1], "shards": [2, 0], "tp": [0]})
