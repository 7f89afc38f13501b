"""What would go wrong on this node, found without the others: they are taken to be like it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from verl.config import PPOConfig
from verl.generation.vllm.probe import probe
from verl.mesh.parse import parse_value
from verl.mesh.resolve import Process, node_names, num_processes
from verl.mesh.spec import MeshSpec, RolloutSpec
from verl.preflight.compare import ABSENT, REACHABLE, Problem, interface_setting
from verl.preflight.facts import Facts
from verl.preflight.needs import shortages

_NVIDIA = Path("/dev/nvidiactl")


def diagnose(facts: Facts, config: PPOConfig | None, mesh: MeshSpec | None) -> list[Problem]:
    """`facts`: of one process of this node. Without a run, what a run that uses all its devices would meet."""
    node = facts.process.hosts[0]
    found = list(_drivers(facts, node))
    if config is None or mesh is None:
        config, mesh = PPOConfig(), _every_device(len(facts.accelerators) or 1)
    names = node_names(mesh)
    mine = _own_name(facts, names)
    if mine is None and set(names) != {f"node{number}" for number in range(len(names))}:  # those go by torchrun's order
        bears = " and ".join(facts.process.hosts)
        wanted = f"one of {', '.join(names)}"
        name = Problem(node, (), "name", bears, wanted, "export VERL_NODE_NAME=..., or change the mesh")
        return [*found, name, *_network(facts, node, len(names)), *_missing(facts, node)]
    found += [*_network(facts, node, len(names)), *_vllm(facts, node, mesh, mine), *_missing(facts, node)]
    wanted = num_processes(mesh)
    if facts.accelerators and wanted > len(facts.accelerators):
        seen = f"{len(facts.accelerators)} visible"
        remedy = "make more visible (CUDA_VISIBLE_DEVICES), or name fewer in the mesh"
        return [*found, Problem(node, (), "devices", seen, f"{wanted}, for {mesh.source}", remedy)]
    cluster = _imagined(facts, names or [node], wanted)
    here = [mine] if mine else names or [node]
    short = [replace(p, node=node, ranks=()) for p in shortages(cluster, config, mesh) if p.node in here]
    return found + list(dict.fromkeys(short))


def _every_device(count: int) -> MeshSpec:
    roles = {role: {"devices": list(range(count))} for role in ("actor", "critic")}
    rollout = {"devices": list(range(count)), "tensor_parallel_size": count}
    return parse_value({**roles, "rollout": rollout}, "a run on all devices")


def _own_name(facts: Facts, names: Sequence[str]) -> str | None:
    bears = {host.lower() for host in facts.process.hosts}
    return next((name for name in names if name.lower() in bears), None)


def _imagined(facts: Facts, nodes: Sequence[str], each: int) -> list[Facts]:
    """A job of nodes that are all like this one."""
    return [
        replace(
            facts,
            process=Process(node * each + local, (name,), node, local, each),
            local_world_size=each,
            models=facts.models if local == 0 else {},
        )
        for node, name in enumerate(nodes)
        for local in range(each)
    ]


def _drivers(facts: Facts, node: str) -> Iterator[Problem]:
    if not facts.accelerators and _NVIDIA.exists():
        yield Problem(
            node, (), "accelerators", f"none, as torch {facts.versions['torch']} sees it", "those of nvidia-smi",
            "check CUDA_VISIBLE_DEVICES, and install a torch that is built for CUDA (pip install torch)",
        )  # fmt: skip


def _network(facts: Facts, node: str, num_nodes: int) -> Iterator[Problem]:
    fault = facts.network.fault
    if fault is not None and num_nodes > 1:
        yield Problem(node, (), "network", fault, REACHABLE, f"export {interface_setting(facts)}")


def _vllm(facts: Facts, node: str, mesh: MeshSpec, mine: str | None) -> Iterator[Problem]:
    rollout = mesh.roles["rollout"]
    assert isinstance(rollout, RolloutSpec)
    generates = (
        rollout.everywhere
        or mine is None
        or any((device.node or "").lower() == mine.lower() for device in rollout.devices)
    )
    found = probe("cuda" if facts.accelerators else "cpu")
    if rollout.backend == "vllm" and generates and not found.usable:
        yield Problem(node, (), "vllm", facts.versions["vllm"] or "not installed", "one that verl knows", found.message)


def _missing(facts: Facts, node: str) -> Iterator[Problem]:
    for what, fingerprint in facts.files.items():
        if fingerprint is None:
            yield Problem(node, (), what, ABSENT, "there", "copy it to this node, or change the setting")
