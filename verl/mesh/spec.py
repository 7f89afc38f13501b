"""What `device_mesh.yaml` says: for every role its devices, how it is split there, and how it runs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

ROLES = ("actor", "critic", "reference", "reward", "rollout")


@dataclass(frozen=True)
class Device:
    """A device as written: `3`, or `node1:3`. `node` is None for the integer form."""

    node: str | None
    index: int

    def __str__(self) -> str:
        return str(self.index) if self.node is None else f"{self.node}:{self.index}"


@dataclass(frozen=True)
class Parallelism:
    fsdp: bool = True
    """Shard parameters, gradients and optimizer state over the data-parallel ranks (FSDP2)."""
    tensor_parallel_size: int = 1
    """Ranks that split each layer."""
    pipeline_parallel_size: int = 1
    """Ranks that split the stack of layers."""


@dataclass(frozen=True)
class HybridEngine:
    enable: bool = True
    """Reshard the actor's weights into the rollout's layout without a second whole copy."""
    activation_checkpointing: bool = False
    """Recompute activations in the backward pass."""
    offload_activations: bool = False
    """Keep activations in CPU memory between forward and backward."""


@dataclass(frozen=True)
class RoleSpec:
    """One role's entry. The listed order of devices is kept: it decides which ranks are TP peers and PP stages."""

    devices: tuple[Device, ...]
    parallelism: Parallelism = field(default_factory=Parallelism)
    dtype: str | None = None
    """Compute dtype: bfloat16, float16, float32. None: bfloat16."""
    hybrid_engine: HybridEngine = field(default_factory=HybridEngine)

    @property
    def tensor_parallel_size(self) -> int:
        return self.parallelism.tensor_parallel_size

    @property
    def pipeline_parallel_size(self) -> int:
        return self.parallelism.pipeline_parallel_size

    @property
    def data_parallel_size(self) -> int:
        """Ranks that hold the same slice of the model (the rollout: its replicas). Never written: it is the rest."""
        return len(self.devices) // (self.tensor_parallel_size * self.pipeline_parallel_size)


@dataclass(frozen=True)
class RolloutSpec(RoleSpec):
    backend: str = "auto"
    """vllm, torch, or auto: vllm where it is installed."""
    max_num_seqs: int = 64
    """Sequences generated at once by one replica."""
    enable_prefix_caching: bool = True
    """Share the KV cache of common prefixes (vLLM)."""
    engine_kwargs: dict[str, Any] = field(default_factory=dict)
    """Further arguments of the engine (vllm.LLM), as they are."""


@dataclass(frozen=True)
class MeshSpec:
    """The roles of a job. A role that the file does not name is absent here; `reference` then follows the actor."""

    roles: dict[str, RoleSpec]
    source: str
    """The file, for messages."""
