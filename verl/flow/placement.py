"""Where a role's ranks are and what each holds, and the one place where process groups are made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

AXES = ("pp", "dp", "tp")


@dataclass(frozen=True)
class Home:
    """Ranks that hold a batch's rows: split over `groups`, alike on the ranks of one group."""

    role: str
    groups: tuple[tuple[int, ...], ...]

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(rank for group in self.groups for rank in group)

    def rows(self, rank: int, size: int) -> range:
        """The adjacent rows of a batch of `size` that `rank` holds."""
        index = next(i for i, group in enumerate(self.groups) if rank in group)
        return self.share(index, size)

    def share(self, group: int, size: int) -> range:
        if size % len(self.groups):
            raise ValueError(f"{self.role}: {size} rows do not split over {len(self.groups)} data-parallel groups")
        share = size // len(self.groups)
        return range(group * share, (group + 1) * share)


@dataclass(frozen=True)
class Coordinate:
    pp: int
    dp: int
    tp: int


@dataclass(frozen=True)
class Placement:
    """A role's ranks, in listed order: tensor-parallel peers are neighbours, then data-parallel ones, then stages.

    Rank i of the list stands at (pp, dp, tp) = (i // (dp * tp), i // tp % dp, i % tp).
    """

    role: str
    ranks: tuple[int, ...]
    tp: int = 1
    pp: int = 1
    leaders_only: bool = False
    """Rows live on the first rank of each replica alone (a rollout engine is spoken to by its leader)."""

    def __post_init__(self) -> None:
        assert len(self.ranks) % (self.tp * self.pp) == 0, self

    @property
    def dp(self) -> int:
        return len(self.ranks) // (self.tp * self.pp)

    def coordinate(self, rank: int) -> Coordinate:
        i = self.ranks.index(rank)
        return Coordinate(i // (self.dp * self.tp), i // self.tp % self.dp, i % self.tp)

    @property
    def inputs(self) -> Home:
        """Who takes input rows: every rank of a data-parallel index, on all stages, which need the rows' lengths."""
        return self._home(range(self.pp))

    @property
    def outputs(self) -> Home:
        """Who holds output rows: the last stage."""
        return self._home(range(self.pp - 1, self.pp))

    def _home(self, stages: range) -> Home:
        def rank(pp: int, dp: int, tp: int) -> int:
            return self.ranks[(pp * self.dp + dp) * self.tp + tp]

        tps = range(1 if self.leaders_only else self.tp)
        return Home(self.role, tuple(tuple(rank(p, d, t) for p in stages for t in tps) for d in range(self.dp)))

    @property
    def leaders(self) -> tuple[int, ...]:
        """One rank of each data-parallel index, which speaks for its output rows."""
        return tuple(group[0] for group in self.outputs.groups)

    @property
    def leader(self) -> int:
        return self.leaders[0]


@dataclass(frozen=True)
class Groups:
    """A role's process groups, on a rank that serves it."""

    mesh: DeviceMesh
    """(pp, dp, tp) in the role's own order of ranks."""
    everyone: dist.ProcessGroup
    """All ranks of the role, gloo: objects, barriers, checkpoints."""
    rows: dist.ProcessGroup
    """The ranks at this rank's (pp, tp) place, one of each data-parallel index, gloo: sums over the batch."""
    ends: dist.ProcessGroup | None
    """The first and the last of several stages at this rank's (dp, tp) place, if it is on one of them: for a weight
    that both have."""


def make_groups(placements: Sequence[Placement], rank: int, device_type: str, timeout: timedelta) -> dict[str, Groups]:
    """The groups of every role that `rank` serves.

    All ranks make all groups in the same order, members or not: a group's name counts those before it.
    """
    made: dict[str, Groups] = {}
    for place in placements:
        ranks = torch.tensor(place.ranks).view(place.pp, place.dp, place.tp)
        axes = [_axis_group(place.role, name, ranks, rank, timeout, None) for name in AXES]
        everyone = _new_group(place.ranks, f"{place.role}.all", timeout, "gloo")
        rows = _axis_group(place.role, "dp", ranks, rank, timeout, "gloo")
        ends = _axis_group(place.role, "pp", ranks[[0, -1]], rank, timeout, None) if place.pp > 1 else None
        if rank in place.ranks:
            # made of groups in the listed order: DeviceMesh(tensor) would sort their ranks, and a shard would then land
            # at another rank's coordinate
            mine = [group for group in axes if group is not None]
            mesh = DeviceMesh.from_group(mine, device_type, mesh=ranks, mesh_dim_names=AXES)
            assert rows is not None
            made[place.role] = Groups(mesh, everyone, rows, ends)
    return made


def _axis_group(
    role: str, axis: str, ranks: Tensor, rank: int, timeout: timedelta, backend: str | None
) -> dist.ProcessGroup | None:
    """Makes the groups along one axis of `ranks` (pp, dp, tp); the one that `rank` is in."""
    mine = None
    number = AXES.index(axis)
    for members in ranks.movedim(number, -1).reshape(-1, ranks.shape[number]).tolist():
        group = _new_group(members, f"{role}.{axis}", timeout, backend)
        mine = group if rank in members else mine
    return mine


def _new_group(ranks: Sequence[int], name: str, timeout: timedelta, backend: str | None) -> dist.ProcessGroup:
    group = dist.new_group(list(ranks), timeout=timeout, backend=backend, sort_ranks=False, group_desc=name)
    return cast(dist.ProcessGroup, group)  # on a rank that is no member a placeholder


def make_world_group(name: str, timeout: timedelta) -> dist.ProcessGroup:
    """A gloo group of all ranks with a message order of its own."""
    return _new_group(range(dist.get_world_size()), name, timeout, "gloo")
