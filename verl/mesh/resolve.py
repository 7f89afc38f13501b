"""A mesh held against the processes of a job: which world rank serves which role. Pure."""

from __future__ import annotations

import re
import shlex
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from verl.errors import MeshError
from verl.mesh.degrees import quotient, uneven_copies
from verl.mesh.devices import ALL
from verl.mesh.roles import nearest
from verl.mesh.spec import ROLES, Device, MeshSpec, Parallelism, RoleSpec, RolloutSpec

_RENDEZVOUS = "--rdzv_backend=c10d --rdzv_endpoint={host}:29400 --rdzv_id=verl"
_MOST_SHOWN = 16
_MOST_SPELLED = 4


@dataclass(frozen=True)
class Process:
    """One process of the job, as every rank knows it."""

    rank: int
    hosts: tuple[str, ...]
    """Names its node really bears: host name short and full, VERL_NODE_NAME. Upper and lower case are the same."""
    node_rank: int
    """torchrun's group rank. The node answers to node0, node1, ... too where no node bears that name."""
    local_rank: int
    """Its device's index among the visible ones."""
    num_devices: int
    """Devices that it sees; without accelerators, the processes of its node."""

    @classmethod
    def from_environment(cls, environ: Mapping[str, str], hosts: Iterable[str], num_devices: int | None) -> Process:
        """This process by torchrun's variables (one process where they are absent).

        Args:
            environ: os.environ.
            hosts: host names as the machine gives them; short names and VERL_NODE_NAME are added here.
            num_devices: visible accelerators; None on a machine without.
        """
        local_world_size = int(environ.get("LOCAL_WORLD_SIZE", "1"))
        full = [name for name in (environ.get("VERL_NODE_NAME", ""), *hosts) if name]
        names = dict.fromkeys(name for host in full for name in (host, host.partition(".")[0]))
        return cls(
            rank=int(environ.get("RANK", "0")),
            hosts=tuple(names),
            node_rank=int(environ.get("GROUP_RANK", "0")),
            local_rank=int(environ.get("LOCAL_RANK", "0")),
            num_devices=local_world_size if num_devices is None else num_devices,
        )


def resolve(spec: MeshSpec, processes: Sequence[Process], arguments: Sequence[str] = ()) -> dict[str, tuple[int, ...]]:
    """The world ranks of each role, in the listed order of its devices.

    Args:
        spec: the mesh.
        processes: all processes of the job, in any order.
        arguments: the command line after train_ppo.py, shown where the remedy is another launch.
    Returns:
        Ranks by role; `all` is every rank. `reference` follows the actor where the mesh does not name it; other absent
        roles stay absent.
    Raises:
        MeshError: with everything that the mesh needs and the job lacks.
    """
    if len(processes) == 1:
        refuse_one_process(spec, arguments)
    return locate(spec, processes)


def locate(spec: MeshSpec, processes: Sequence[Process]) -> dict[str, tuple[int, ...]]:
    """`resolve` for a job that need not be this one: nothing is said of how to start it."""
    assert len({process.rank for process in processes}) == len(processes) > 0
    job = _Job(processes, wanted=num_processes(spec))
    plain = _plain_indices(spec, job) if len(job.nodes) > 1 else []
    if plain:
        raise MeshError(*plain)
    found = {device: job.find(device) for entry in spec.roles.values() for device in entry.devices}
    lacking = {device: reason for device, reason in found.items() if isinstance(reason, str)}
    located = {device: process for device, process in found.items() if isinstance(process, Process)}
    everyone = tuple(sorted(process.rank for process in processes))
    problems = [_shortfall(spec, lacking, job)] if lacking else []
    problems += [*_misuse(spec, located, job), *_uneven_all(spec, len(everyone))]
    if problems:
        raise MeshError(*problems)
    ranks = {
        role: everyone if entry.everywhere else tuple(located[device].rank for device in entry.devices)
        for role, entry in spec.roles.items()
    }
    ranks.setdefault("reference", ranks["actor"])
    return {role: ranks[role] for role in ROLES if role in ranks}


def idle(spec: MeshSpec, processes: Sequence[Process]) -> tuple[Process, ...]:
    """The processes that no role uses."""
    used = {rank for ranks in resolve(spec, processes).values() for rank in ranks}
    return tuple(process for process in processes if process.rank not in used)


def collapse(spec: MeshSpec) -> MeshSpec:
    """The same roles, all on device 0 of one process and not split: for a debugger."""
    return replace(spec, roles={role: _on_device_0(entry) for role, entry in spec.roles.items()})


def refuse_one_process(spec: MeshSpec, arguments: Sequence[str] = ()) -> None:
    """Raises MeshError, with the line to start the job by, where one process cannot hold the mesh."""
    devices = {device for entry in spec.roles.values() for device in entry.devices}
    if len(devices) > 1 or any(device.index for device in devices):
        raise MeshError(
            f"{spec.source}: the mesh has {len(devices)} devices ({_list(devices)}), and this is one process. "
            f"{launch_line(spec, arguments)}\nor put all its roles on device 0 with debug.collapse_mesh=true"
        )


def launch_line(spec: MeshSpec, arguments: Sequence[str] = ()) -> str:
    """How torchrun starts the job that a mesh needs, as an instruction with the exact line."""
    nodes = node_names(spec)
    script = f"--nproc_per_node={num_processes(spec)} train_ppo.py {shlex.join(arguments) or '...'}"
    if len(nodes) <= 1:
        return f"Start it with\n  torchrun --standalone {script}"
    rendezvous = _RENDEZVOUS.format(host=nodes[0])
    return f"Start it on each of the {len(nodes)} nodes with\n  torchrun --nnodes={len(nodes)} {rendezvous} {script}"


def node_names(spec: MeshSpec) -> list[str]:
    """The nodes that a mesh names, in the order in which it does; none for a mesh of plain indices."""
    devices = [device for entry in spec.roles.values() for device in entry.devices]
    return list(dict.fromkeys(device.node for device in devices if device.node is not None))


def num_processes(spec: MeshSpec) -> int:
    """Processes that a mesh needs on each node; 1 for a mesh that only says `all`."""
    return 1 + max((device.index for entry in spec.roles.values() for device in entry.devices), default=0)


class _Job:
    """The nodes of a job and their names."""

    def __init__(self, processes: Sequence[Process], wanted: int) -> None:
        self._wanted = wanted  # processes that the mesh needs on a node
        self.nodes: dict[int, dict[int, Process]] = defaultdict(dict)  # node rank -> local rank -> process
        self._bearers: dict[str, set[int]] = defaultdict(set)  # name in lower case -> node ranks
        for process in sorted(processes, key=lambda process: process.rank):
            self.nodes[process.node_rank][process.local_rank] = process
            for name in process.hosts:
                self._bearers[name.lower()].add(process.node_rank)
        for node_rank in self.nodes:
            self._bearers.setdefault(f"node{node_rank}", {node_rank})

    def name(self, node_rank: int) -> str:
        """A name by which a mesh can address this node alone."""
        process = next(iter(self.nodes[node_rank].values()))
        for name in (*process.hosts, f"node{node_rank}"):
            if self._bearers[name.lower()] == {node_rank}:
                return name
        return f"a node without a name of its own ({', '.join(process.hosts)})"

    def find(self, device: Device) -> Process | str:
        """The process of a device, or why there is none and what to do."""
        bearers = {next(iter(self.nodes))} if device.node is None else self._bearers.get(device.node.lower(), set())
        if not bearers:
            assert device.node is not None
            # of node1 and node2 neither is a slip of the pen for the other
            stem = _stem(device.node)
            known = nearest(device.node.lower(), [name for name in self._bearers if _stem(name) != stem])
            remedy = f"write a name that the job has, or start a node with VERL_NODE_NAME={device.node}"
            return f"no node bears the name {device.node}{known or ':'} {remedy}"
        if len(bearers) > 1:
            return f"{len(bearers)} nodes bear the name {device.node}: start each with a VERL_NODE_NAME of its own"
        (node_rank,) = bearers
        local = self.nodes[node_rank]
        if device.index in local:
            return local[device.index]
        visible = max(process.num_devices for process in local.values())
        there = f"{_plural(visible, 'device')} visible and {_plural(len(local), 'process')} there: "
        if device.index >= visible:
            return there + "check CUDA_VISIBLE_DEVICES and --nproc_per_node, or change the mesh"
        return there + f"start torchrun with --nproc_per_node={min(visible, self._wanted)}"


def _shortfall(spec: MeshSpec, lacking: Mapping[Device, str], job: _Job) -> str:
    """One line of what is needed and what there is, and a line for each reason."""
    has = ", ".join(f"{job.name(node)}: {_span(local)}" for node, local in sorted(job.nodes.items()))
    lines = [f"{spec.source}: mesh needs devices {_list(lacking)}; job has {has}"]
    for reason in dict.fromkeys(lacking.values()):
        devices = {device for device in lacking if lacking[device] == reason}
        users = [_at(spec, role) for role, entry in spec.roles.items() if devices.intersection(entry.devices)]
        lines.append(f"  {_list(devices)} ({', '.join(users)}): {reason}")
    return "\n".join(lines)


def _plain_indices(spec: MeshSpec, job: _Job) -> list[str]:
    first = job.name(min(job.nodes))
    problems: list[str] = []
    for role, entry in spec.roles.items():
        if any(device.node is None for device in entry.devices):
            spelled = ", ".join(f'"{first}:{device.index}"' for device in entry.devices[:_MOST_SPELLED])
            spelled += ", ..." if len(entry.devices) > _MOST_SPELLED else ""
            problems.append(
                f"{spec.place(f'{role}.devices')}: {role}.devices: an index alone is ambiguous in a job of "
                f"{len(job.nodes)} nodes; name the node too, for example [{spelled}]"
            )
    return problems


def _misuse(spec: MeshSpec, located: Mapping[Device, Process], job: _Job) -> list[str]:
    """Devices that a role names twice by two names, and processes in use that do not see their device."""
    problems: list[str] = []
    for role, entry in spec.roles.items():
        first: dict[int, Device] = {}
        for device in entry.devices:
            other = first.setdefault(located[device].rank, device) if device in located else device
            if other != device:
                place = spec.place(f"{role}.devices")
                problems.append(f"{place}: {role}.devices: {other} and {device} are one device; name it once")
    for process in dict.fromkeys(located.values()):
        if process.local_rank >= process.num_devices:
            problems.append(
                f"{spec.source}: rank {process.rank} on {job.name(process.node_rank)} sees "
                f"{_plural(process.num_devices, 'device')}, and the mesh gives it number {process.local_rank}; "
                "start all processes of a node with one CUDA_VISIBLE_DEVICES that lists all its devices"
            )
    return problems


def _uneven_all(spec: MeshSpec, count: int) -> list[str]:
    """What could not be checked of `all` before its devices were counted."""
    problems: list[str] = []
    for role, entry in spec.roles.items():
        size = entry.ranks_per_row
        here = f"{spec.place(f'{role}.devices')}: {role}.devices: {ALL} is {_plural(count, 'device')} here, and"
        if not entry.everywhere:
            continue
        if count % size:
            problems.append(
                f"{here} {quotient(entry, count)} is not whole; list a multiple of {size} devices, or change the sizes"
            )
        elif role != "rollout":
            problems += [f"{here} parallelism.{key}: {what}" for key, what in uneven_copies(entry, count)]
    return problems


def _on_device_0(entry: RoleSpec) -> RoleSpec:
    fsdp = entry.parallelism.fsdp and not isinstance(entry, RolloutSpec)
    return replace(entry, devices=(Device(None, 0),), parallelism=Parallelism(fsdp=fsdp), everywhere=False)


def _at(spec: MeshSpec, role: str) -> str:
    """A role with the line of its devices, where that is known."""
    place = spec.place(f"{role}.devices")
    return role if place == spec.source else f"{role} at {place.replace(f'{spec.source}:', 'line ')}"


def _stem(node: str) -> str:
    """A node's name without its numbers."""
    return re.sub("[0-9]", "", node.lower())


def _list(devices: Iterable[Device]) -> str:
    ordered = sorted(devices, key=lambda device: (device.node or "", device.index))
    shown = ", ".join(str(device) for device in ordered[:_MOST_SHOWN])
    return shown if len(ordered) <= _MOST_SHOWN else f"{shown} and {len(ordered) - _MOST_SHOWN} more"


def _span(local: Mapping[int, Process]) -> str:
    return str(min(local)) if len(local) == 1 else f"{min(local)}-{max(local)}"


def _plural(count: int, noun: str) -> str:
    plural = noun + ("es" if noun.endswith("s") else "s")
    return f"{count} {noun if count == 1 else plural}"
