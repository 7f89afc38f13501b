"""What `device_mesh.yaml` says: for every role its devices, how it is split there, and how it runs."""

from __future__ import annotations

from collections.abc import Mapping
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
    virtual_stages: int = 1
    """Parts of the stack that each of them takes turns with, for a shorter wait at the ends of a step."""
    fsdp_size: int | None = None
    """Data- and context-parallel ranks, neighbours in the list, that one copy of the model is spread over; the others
    hold further copies (HSDP). None: all, so one copy."""
    context_parallel_size: int = 1
    """Ranks that share out the time of each row, through the whole model."""


@dataclass(frozen=True)
class HybridEngine:
    enable: bool = True
    """Reshard the actor's weights into the rollout's layout without a second whole copy."""
    activation_checkpointing: bool = False
    """Recompute activations in the backward pass."""
    offload_activations: bool = False
    """Keep activations in CPU memory between forward and backward."""
    offload_parameters: bool = False
    """Keep parameters in CPU memory, and what belongs to them: gradients and optimizer state. A layer is on the device
    while it is computed."""
    offload_optimizer: bool = False
    """Keep the optimizer's state in CPU memory but for its step."""


@dataclass(frozen=True)
class RoleSpec:
    """One role's entry. The listed order of devices is kept: it decides which ranks are TP peers and PP stages."""

    devices: tuple[Device, ...]
    """() where `everywhere` is set."""
    parallelism: Parallelism = field(default_factory=Parallelism)
    dtype: str | None = None
    """Compute dtype: bfloat16, float16, float32. None: bfloat16."""
    hybrid_engine: HybridEngine = field(default_factory=HybridEngine)
    everywhere: bool = False
    """`devices: all`: every device of the job, in the order of its ranks. Which they are, `resolve` knows."""

    @property
    def tensor_parallel_size(self) -> int:
        return self.parallelism.tensor_parallel_size

    @property
    def pipeline_parallel_size(self) -> int:
        return self.parallelism.pipeline_parallel_size

    @property
    def context_parallel_size(self) -> int:
        return self.parallelism.context_parallel_size

    @property
    def ranks_per_row(self) -> int:
        """Ranks that work on the same rows."""
        return self.tensor_parallel_size * self.pipeline_parallel_size * self.context_parallel_size

    @property
    def data_parallel_size(self) -> int:
        """Ranks that hold different rows (the rollout: its replicas). Never written: it is the rest.

        1, which divides everything, while `all` devices are still to be counted.
        """
        return 1 if self.everywhere else len(self.devices) // self.ranks_per_row


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
    places: Mapping[str, str] = field(default_factory=dict, compare=False)
    """Where each dotted name is written, "file:line"."""

    def place(self, name: str) -> str:
        """Where `name`, or else what it stands under, is written; the file where nothing is known."""
        while name and name not in self.places:
            name = name.rpartition(".")[0]
        return self.places.get(name, self.source)
