"""How buckets of weights come to an engine, as its process is told of it at its start."""

from __future__ import annotations

import base64
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from verl.generation.vllm.buffer import Layout, WeightBuffer, layout_from_json, layout_to_json, num_bytes


class WeightTransfer(StrEnum):
    """Values of rollout.weight_transfer."""

    node_memory = "node_memory"
    ipc = "ipc"
    nccl = "nccl"


Exports = Mapping[str, Sequence[tuple[Any, ...]]]
"""UUID of a GPU -> what the memory of each slot there is opened with."""


@dataclass(frozen=True)
class Delivery:
    by: WeightTransfer
    buckets: tuple[Layout, ...]
    details: Mapping[str, Any] = field(default_factory=dict)
    """Of this way, as JSON takes it."""
    exports: Exports = field(default_factory=dict)
    doing: str = "loading weights"
    """What an engine does that takes them, for messages."""

    @property
    def backend(self) -> str | None:
        """vLLM's own weight transfer, where it is used."""
        return None if self.by is WeightTransfer.node_memory else self.by.value

    @classmethod
    def in_node_memory(cls, buffer: WeightBuffer) -> Delivery:
        """An engine reads the buckets in memory that its node shares."""
        return cls(WeightTransfer.node_memory, buffer.buckets, {"path": buffer.path, "slots": buffer.slots})

    @classmethod
    def on_devices(cls, buckets: Sequence[Layout], exports: Exports) -> Delivery:
        """Each worker reads the buckets in memory of another process on its own GPU. All slots are listed for each."""
        return cls(WeightTransfer.ipc, tuple(buckets), exports=exports)

    @classmethod
    def sent(cls, buckets: Sequence[Layout], sender: int, group: bytes, size: int, first: int) -> Delivery:
        """A rank sends the buckets to all workers. `group`: its id; `size`: its members, the sender included; `first`:
        the number in it of the engine's first worker."""
        details = {"group": base64.b64encode(group).decode(), "size": size, "first": first}
        doing = f"loading weights, which rank {sender} sends"
        return cls(WeightTransfer.nccl, tuple(buckets), details, doing=doing)

    def told(self) -> tuple[dict[str, Any], bytes]:
        """For a message: its fields and its body."""
        layouts = [layout_to_json(bucket) for bucket in self.buckets]
        return {"by": self.by.value, "buckets": layouts, **self.details}, pickle.dumps(dict(self.exports))


def updates(told: Mapping[str, Any], exports: Exports) -> list[dict[str, Any]]:
    """What vLLM's `update_weights` takes for each bucket, in the engine's process."""
    return [_update(number, layout_from_json(rows), exports) for number, rows in enumerate(told["buckets"])]


def _update(number: int, layout: Layout, exports: Exports) -> dict[str, Any]:
    update: dict[str, Any] = {
        "names": [name for name, _, _ in layout],
        "dtype_names": [str(dtype).removeprefix("torch.") for _, _, dtype in layout],
        "shapes": [list(shape) for _, shape, _ in layout],
    }
    if exports:
        update["tensor_sizes"] = _sizes(layout)
        update["ipc_handles"] = {uuid: slots[number % len(slots)] for uuid, slots in exports.items()}
    return update


def setup(told: Mapping[str, Any]) -> dict[str, Any]:
    """What vLLM's `init_weight_transfer_engine` takes. A bucket is one message (NCCL) or one piece of memory (IPC)."""
    if told["by"] == WeightTransfer.ipc:
        return {"packed": True}
    largest = max(sum(_sizes(layout_from_json(rows))) for rows in told["buckets"])
    return {
        "nccl_unique_id_b64": told["group"],
        "world_size": told["size"],
        "rank_offset": told["first"],
        "packed": True,
        "packed_buffer_size_bytes": largest,
    }


def _sizes(layout: Layout) -> list[int]:
    """Bytes of each tensor."""
    return [num_bytes(shape, dtype) for _, shape, dtype in layout]
