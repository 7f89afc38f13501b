"""Facts of clusters that exist on paper only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from verl.mesh.resolve import Process
from verl.preflight.facts import Accelerator, Facts
from verl.preflight.memory import Memory
from verl.preflight.network import Network

GIB = 1 << 30
A800 = Accelerator("NVIDIA A800 80GB", 80 * GIB)
ROOMY = Memory(machine=512 * GIB, free=500 * GIB, limit=None, left=None, shm_size=64 * GIB, shm_free=64 * GIB)
VERSIONS = {"python": "3.11.9", "torch": "2.13.0", "transformers": "5.17.0", "vllm": "0.32.0", "nccl": "2.27.5"}
FILES = {"source of verl": "7 bytes, aa", "model.path": "a folder", "model.path (config)": "9 bytes, bb"}
SETTINGS = {"trainer.seed": "1", "actor.optim.lr": "1e-06", "device_mesh.critic.devices": '["node1:2"]'}


def cluster(per_node: Sequence[int], **common: Any) -> list[Facts]:
    """Nodes node1, node2, ... with so many processes each, all alike but for their names and addresses."""
    facts = []
    for node, count in enumerate(per_node):
        for local_rank in range(count):
            first = local_rank == 0
            known: dict[str, Any] = {
                "process": Process(len(facts), (f"node{node + 1}",), node, local_rank, count),
                "local_world_size": count,
                "cores": 32,
                "accelerators": (A800,) * count,
                "visible": ",".join(map(str, range(max(per_node)))),
                "versions": dict(VERSIONS),
                "network": Network("eth0", f"10.0.0.{node + 1}", None, "eth0"),
                "memory": ROOMY,
                "settings": dict(SETTINGS),
                "files": dict(FILES) if first else {},
                "run_dir": "/shared/run",
            }
            facts.append(Facts(**known | common))
    return facts


def changed(facts: Sequence[Facts], ranks: Sequence[int], **changes: Any) -> list[Facts]:
    """The same with other facts on some ranks."""
    return [replace(f, **changes) if f.rank in ranks else f for f in facts]


def ranks_of(facts: Sequence[Facts], node: int) -> list[int]:
    return [f.rank for f in facts if f.node == node]
