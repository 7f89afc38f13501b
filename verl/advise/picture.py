"""A mesh as a table: devices as columns grouped by node, roles as rows, in each cell where the device stands."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from verl.advise.job import Job
from verl.flow.placement import Placement
from verl.mesh.spec import ROLES, RolloutSpec

LEGEND = "p: pipeline stage, d, c, t: data-, context- and tensor-parallel index, r: replica of the rollout"
NodeColumns = tuple[str, tuple["Column", ...]]
"""A node's name and its devices."""
_NONE = "."
_GAP = "   "


@dataclass(frozen=True)
class Column:
    head: str
    """The device's index on its node."""
    cells: tuple[str, ...]
    """One for each role; "" where the role is not on the device."""


@dataclass(frozen=True)
class Picture:
    roles: tuple[str, ...]
    nodes: tuple[NodeColumns, ...]
    notes: tuple[str, ...]
    """What each role's degrees come to, a line each."""


def draw(job: Job) -> Picture:
    roles = tuple(role for role in ROLES if role in job.placements)
    nodes = tuple(
        (
            node,
            tuple(
                Column(str(job.processes[rank].local_rank), tuple(_cell(job, role, rank) for role in roles))
                for rank in ranks
            ),
        )
        for node, ranks in job.nodes.items()
    )
    return Picture(roles, nodes, tuple(_note(job, role) for role in roles))


def as_text(picture: Picture, width: int) -> Iterator[str]:
    """Lines of at most `width` characters, unless one node alone needs more. Nodes that have no room beside the others
    come below them, and have a line only for the roles that are there.
    """
    margin = max(len(role) for role in picture.roles)
    cell = longest_label(picture)

    def node_width(node: NodeColumns) -> int:
        return max(len(node[0]), len(node[1]) * (cell + 1) - 1)

    def padded(nodes: Sequence[NodeColumns], cells: Callable[[Column], str]) -> list[str]:
        return [_joined(map(cells, node[1]), cell).ljust(node_width(node)) for node in nodes]

    for nodes in side_by_side(picture.nodes, width - margin, lambda node: len(_GAP) + node_width(node)):
        yield _line("", margin, [node[0].ljust(node_width(node)) for node in nodes])
        yield _line("", margin, padded(nodes, lambda column: column.head))
        for number in roles_on(picture, nodes):
            yield _line(picture.roles[number], margin, padded(nodes, lambda column, n=number: column.cells[n]))
        yield ""
    yield LEGEND
    yield from (f"{role.ljust(margin)}  {note}" for role, note in zip(picture.roles, picture.notes, strict=True))


def longest_label(picture: Picture) -> int:
    """Characters of the widest head or cell."""
    return max(len(text) for _, columns in picture.nodes for column in columns for text in (column.head, *column.cells))


def side_by_side(
    nodes: Sequence[NodeColumns], width: int, node_width: Callable[[NodeColumns], int]
) -> Iterator[list[NodeColumns]]:
    """As many nodes next to each other as there is room for."""
    row: list[NodeColumns] = []
    for node in nodes:
        if row and sum(map(node_width, [*row, node])) > width:
            yield row
            row = []
        row.append(node)
    yield row


def roles_on(picture: Picture, nodes: Sequence[NodeColumns]) -> list[int]:
    """The numbers of the roles that are on some device of these nodes."""
    return [
        number
        for number in range(len(picture.roles))
        if any(column.cells[number] for _, columns in nodes for column in columns)
    ]


def _cell(job: Job, role: str, rank: int) -> str:
    """Where a rank stands in a role, by the axes that have more than one place."""
    placement = job.placements[role]
    if rank not in placement.ranks:
        return ""
    at = placement.coordinate(rank)
    data = "r" if role == "rollout" else "d"
    axes = (
        ("p", at.pp, placement.pp),
        (data, at.dp, placement.dp),
        ("c", at.cp, placement.cp),
        ("t", at.tp, placement.tp),
    )
    return "".join(f"{axis}{index}" for axis, index, degree in axes if degree > 1) or "whole"


def _note(job: Job, role: str) -> str:
    placement, spec = job.placements[role], job.spec(role)
    if isinstance(spec, RolloutSpec):
        replicas = "1 replica" if placement.dp == 1 else f"{placement.dp} replicas"
        each = "1 device" if placement.tp == 1 else f"{placement.tp} devices"
        return f"{replicas} of {each}, {spec.backend}, {spec.max_num_seqs} sequences at once"
    if role == "reward" and role not in job.mesh.roles:
        return "a reward function, beside the rollout's leaders"
    context = f"cp {placement.cp} x " if placement.cp > 1 else ""
    degrees = f"pp {placement.pp} x dp {placement.dp} x {context}tp {placement.tp}"
    follows = "; not in the mesh, so where the actor is" if role not in job.mesh.roles else ""
    return f"{degrees}, {_sharding(spec.parallelism.fsdp, placement)}{follows}"


def _sharding(fsdp: bool, placement: Placement) -> str:
    parts, shards = placement.tp * placement.pp, placement.spread // placement.copies
    part = "the whole model" if parts == 1 else f"its whole 1/{parts} of the model"
    if not fsdp:
        return f"no FSDP: each device holds {part}"
    copies = f"{placement.copies} copies of " if placement.copies > 1 else ""
    return copies + (f"FSDP {shards}" if shards > 1 else f"FSDP 1: nothing to shard over, each device holds {part}")


def _joined(cells: Iterable[str], width: int) -> str:
    return " ".join((text or _NONE).ljust(width) for text in cells)


def _line(label: str, margin: int, nodes: Sequence[str]) -> str:
    return (label.ljust(margin) + "".join(_GAP + node for node in nodes)).rstrip()
