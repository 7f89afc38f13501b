"""The job that a mesh is held against while none is running: which nodes there would be, and what is where."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from verl.config import PPOConfig
from verl.errors import MeshError, UserError
from verl.flow.place import place_roles
from verl.flow.placement import Placement
from verl.mesh.resolve import Process, locate, node_names, num_processes
from verl.mesh.spec import MeshSpec, RoleSpec

_NODE = re.compile(r"(?:([A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?):)?([0-9]{1,4})")
_FORM = "write NAME:DEVICES for each node, for example --nodes node1:8,node2:8, or --nodes 8 for one node"
_MOST_PROCESSES = 10_000
_ONE_NODE = "this node"


@dataclass(frozen=True)
class NodeSize:
    name: str
    """"" where it has none."""
    devices: int


@dataclass(frozen=True)
class Job:
    """A mesh with its ranks."""

    mesh: MeshSpec
    processes: tuple[Process, ...]
    """In the order of their ranks."""
    placements: Mapping[str, Placement]

    @cached_property
    def names(self) -> dict[int, str]:
        """A node's name by its node rank, "" where it has none. Nodes that share one are node0, node1 and so on."""
        names = {process.node_rank: process.hosts[0] if process.hosts else "" for process in self.processes}
        shared = [name for name in names.values() if list(names.values()).count(name) > 1]
        return {rank: f"node{rank}" if name in shared else name for rank, name in names.items()}

    @cached_property
    def node_of(self) -> dict[int, str]:
        """rank -> the name of its node."""
        return {process.rank: self.names[process.node_rank] or _ONE_NODE for process in self.processes}

    @cached_property
    def nodes(self) -> dict[str, list[int]]:
        """Ranks by node."""
        nodes: dict[str, list[int]] = {}
        for rank, node in self.node_of.items():
            nodes.setdefault(node, []).append(rank)
        return nodes

    def device(self, rank: int) -> str:
        """As the mesh would write it."""
        return self.devices([rank])

    def devices(self, ranks: Sequence[int]) -> str:
        """Devices as a mesh would write them, neighbours as a range."""
        spans: list[tuple[str, int, int]] = []
        for rank in ranks:
            process = self.processes[rank]
            node = self.names[process.node_rank]
            if spans and spans[-1][0] == node and spans[-1][2] == process.local_rank - 1:
                spans[-1] = (node, spans[-1][1], process.local_rank)
            else:
                spans.append((node, process.local_rank, process.local_rank))
        return ", ".join(f"{node}:{low}".lstrip(":") + (f"-{high}" if high > low else "") for node, low, high in spans)

    def spec(self, role: str) -> RoleSpec:
        """A role that the mesh does not name is split as the actor is, and the reward of a function not at all."""
        if role not in self.mesh.roles and role == "reward":
            return RoleSpec(())
        return self.mesh.roles.get(role, self.mesh.roles["actor"])

    def roles_on(self, rank: int) -> list[str]:
        return [role for role, placement in self.placements.items() if rank in placement.ranks]

    @cached_property
    def idle(self) -> list[int]:
        return [process.rank for process in self.processes if not self.roles_on(process.rank)]


def read_nodes(text: str) -> list[NodeSize]:
    """`--nodes`. Raises UserError with everything that is wrong with it."""
    sizes: list[NodeSize] = []
    problems: list[str] = []
    for part in text.split(","):
        match = _NODE.fullmatch(part.strip())
        if match is None:
            problems.append(f'--nodes: "{part.strip()}" is no node; {_FORM}')
        elif int(match[2]) == 0:
            problems.append(f"--nodes: {part.strip()} has no device; leave it out, or say how many it has")
        else:
            sizes.append(NodeSize(match[1] or "", int(match[2])))
    names = [size.name for size in sizes]
    for name in dict.fromkeys(names):
        if names.count(name) > 1:
            problems.append(
                f"--nodes: {name or 'a node without a name'} stands there {names.count(name)} times; {_FORM}"
            )
    if len(sizes) > 1 and "" in names and names.count("") == 1:
        problems.append(f"--nodes: of several nodes each needs a name; {_FORM}")
    if sum(size.devices for size in sizes) > _MOST_PROCESSES:
        problems.append(f"--nodes: more than {_MOST_PROCESSES} devices in all; name fewer")
    if problems:
        raise UserError(*problems)
    return sizes


def nodes_of(mesh: MeshSpec) -> list[NodeSize]:
    """The nodes that a mesh itself names, each with as many devices as torchrun would start processes on it.

    Raises MeshError where it only says `all`.
    """
    if not any(entry.devices for entry in mesh.roles.values()):
        raise MeshError(
            f"{mesh.source}: devices: all is as many as the job has; say how many with --nodes node1:8 or 8"
        )
    count = num_processes(mesh)
    nodes = [NodeSize(name, count) for name in node_names(mesh)] or [NodeSize("", count)]
    if count * len(nodes) > _MOST_PROCESSES:
        role = next(role for role, entry in mesh.roles.items() if any(d.index == count - 1 for d in entry.devices))
        raise MeshError(
            f"{mesh.place(f'{role}.devices')}: {role}.devices: index {count - 1} makes {count} devices on each of "
            f"{len(nodes)} node{'s' * (len(nodes) > 1)}, and at most {_MOST_PROCESSES} in all are looked at; lower the "
            "index, or name fewer nodes"
        )
    return nodes


def imagine(mesh: MeshSpec, nodes: Sequence[NodeSize], config: PPOConfig) -> Job:
    """The job of these nodes. Raises MeshError with all that the mesh needs and the nodes lack."""
    processes: list[Process] = []
    for node_rank, node in enumerate(nodes):
        names = (node.name,) if node.name else ()
        processes += [
            Process(len(processes) + local, names, node_rank, local, node.devices) for local in range(node.devices)
        ]
    ranks = locate(mesh, processes)
    absent = [
        role for role, needed in (("critic", config.needs_critic), ("reference", config.needs_reference)) if not needed
    ]
    return Job(mesh, tuple(processes), place_roles(mesh, ranks, absent))
