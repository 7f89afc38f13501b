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

AXES = ("pp", "copies", "shards", "tp")
"""Of a mesh that parameters are spread over: a data-parallel rank has shard number `shards` of a copy of the model."""


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
    cp: int = 0


@dataclass(frozen=True)
class Placement:
    """A role's ranks, in listed order: tensor-parallel peers are neighbours, then context-parallel ones, then
    data-parallel ones, then stages.

    Rank i of the list stands at (i // (dp * cp * tp), i // (cp * tp) % dp, i // tp % cp, i % tp) of (pp, dp, cp, tp).
    Parameters are spread over data- and context-parallel ranks alike: the first `fsdp_size` of them have one copy of
    the model among them, the next ones another.
    """

    role: str
    ranks: tuple[int, ...]
    tp: int = 1
    pp: int = 1
    leaders_only: bool = False
    """Rows live on the first rank of each replica alone (a rollout engine is spoken to by its leader)."""
    fsdp_size: int | None = None
    """Ranks that one copy of the model is spread over. None: all that parameters are spread over."""
    cp: int = 1
    """Ranks that share out the time of the same rows."""

    def __post_init__(self) -> None:
        assert len(self.ranks) % (self.tp * self.cp * self.pp) == 0, self
        assert self.fsdp_size is None or self.spread % self.fsdp_size == 0, self

    @property
    def dp(self) -> int:
        """Ranks that hold different rows."""
        return self.spread // self.cp

    @property
    def spread(self) -> int:
        """Ranks that parameters are spread over, in one copy or several."""
        return len(self.ranks) // (self.tp * self.pp)

    @property
    def copies(self) -> int:
        """Of the model, on all ranks that parameters are spread over together."""
        return 1 if self.fsdp_size is None else self.spread // self.fsdp_size

    def coordinate(self, rank: int) -> Coordinate:
        rest, tp = divmod(self.ranks.index(rank), self.tp)
        rest, cp = divmod(rest, self.cp)
        return Coordinate(rest // self.dp, rest % self.dp, tp, cp)

    def replica(self, rank: int) -> tuple[int, ...]:
        """The ranks of the rollout's engine that `rank` is a part of: its tensor-parallel group."""
        start = self.ranks.index(rank) // self.tp * self.tp
        return self.ranks[start : start + self.tp]

    @property
    def inputs(self) -> Home:
        """Who takes input rows: every rank of a data-parallel index, on all stages, which need the rows' lengths."""
        return self._home(range(self.pp))

    @property
    def outputs(self) -> Home:
        """Who holds output rows: the last stage."""
        return self._home(range(self.pp - 1, self.pp))

    def _home(self, stages: range) -> Home:
        alike = self.cp * self.tp

        def rank(pp: int, dp: int, place: int) -> int:
            return self.ranks[(pp * self.dp + dp) * alike + place]

        places = range(1 if self.leaders_only else alike)
        return Home(self.role, tuple(tuple(rank(p, d, i) for p in stages for i in places) for d in range(self.dp)))

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
    """`AXES` in the role's own order of ranks; `copies` is left out where there is one."""
    everyone: dist.ProcessGroup
    """All ranks of the role, gloo: objects, barriers, checkpoints."""
    rows: dist.ProcessGroup
    """The ranks at this rank's (pp, cp, tp) place, one of each data-parallel index, gloo: sums over the batch."""
    ends: dist.ProcessGroup | None
    """The first and the last of several stages at this rank's (dp, cp, tp) place, if it is on one of them: for a weight
    that both have."""
    context: dist.ProcessGroup | None = None
    """The ranks at this rank's (pp, dp, tp) place that share out the time of its rows, if there are several."""


def make_groups(placements: Sequence[Placement], rank: int, device_type: str, timeout: timedelta) -> dict[str, Groups]:
    """The groups of every role that `rank` serves.

    All ranks make all groups in the same order, members or not: a group's name counts those before it.
    """
    made: dict[str, Groups] = {}
    for place in placements:
        ranks = torch.tensor(place.ranks).view(place.pp, place.copies, -1, place.tp)
        names = AXES
        if place.copies == 1:
            ranks, names = ranks.squeeze(1), tuple(name for name in AXES if name != "copies")
        axes = [_axis_group(f"{place.role}.{name}", ranks, i, rank, timeout, None) for i, name in enumerate(names)]
        everyone = _new_group(place.ranks, f"{place.role}.all", timeout, "gloo")
        by_row = ranks.view(place.pp, place.dp, place.cp, place.tp)
        rows = _axis_group(f"{place.role}.dp", by_row, 1, rank, timeout, "gloo")
        ends = _axis_group(f"{place.role}.pp", by_row[[0, -1]], 0, rank, timeout, None) if place.pp > 1 else None
        context = _axis_group(f"{place.role}.cp", by_row, 2, rank, timeout, None) if place.cp > 1 else None
        if rank in place.ranks:
            # made of groups in the listed order: DeviceMesh(tensor) would sort their ranks, and a shard would then land
            # at another rank's coordinate
            mine = [group for group in axes if group is not None]
            mesh = DeviceMesh.from_group(mine, device_type, mesh=ranks, mesh_dim_names=names)
            assert rows is not None
            made[place.role] = Groups(mesh, everyone, rows, ends, context)
    return made


def _axis_group(
    name: str, ranks: Tensor, axis: int, rank: int, timeout: timedelta, backend: str | None
) -> dist.ProcessGroup | None:
    """Makes the groups along one axis of `ranks`; the one that `rank` is in."""
    mine = None
    for members in ranks.movedim(axis, -1).reshape(-1, ranks.shape[axis]).tolist():
        group = _new_group(members, name, timeout, backend)
        mine = group if rank in members else mine
    return mine


def _new_group(ranks: Sequence[int], name: str, timeout: timedelta, backend: str | None) -> dist.ProcessGroup:
    group = dist.new_group(list(ranks), timeout=timeout, backend=backend, sort_ranks=False, group_desc=name)
    return cast(dist.ProcessGroup, group)  # on a rank that is no member a placeholder


def make_world_group(name: str, timeout: timedelta) -> dist.ProcessGroup:
    """A gloo group of all ranks with a message order of its own."""
    return _new_group(range(dist.get_world_size()), name, timeout, "gloo")


def make_role_group(place: Placement, name: str, timeout: timedelta) -> dist.ProcessGroup:
    """A gloo group of a role's ranks with a message order of its own. All ranks of the job make it."""
    return _new_group(place.ranks, f"{place.role}.{name}", timeout, "gloo")
