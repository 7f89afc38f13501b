"""All of CUDA and NCCL that weights need on a rank, in one place. None of it has ever been run on a GPU."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor
from torch.cuda import nccl


class Broadcast(Protocol):
    """One sender's end of a group whose other members are the workers of engines."""

    def send(self, memory: Tensor) -> None:
        """Begins to send bytes to all of the others, which take sends in their order, and returns."""
        ...

    def wait(self) -> None:
        """Returns when the memory of every send may be written again."""
        ...


class Device(Protocol):
    """What weight transfer needs of a rank's GPU."""

    uuid: str
    """By which an engine's worker knows that it is on the same one."""

    def allocate(self, num_bytes: int) -> Tensor:
        """Bytes on the device."""
        ...

    def export(self, memory: Tensor) -> tuple[Any, ...]:
        """What another process of the node opens the memory with, as torch's `rebuild_cuda_tensor` takes it."""
        ...

    def finish_writes(self) -> None:
        """What this process has written is there for others when this returns."""
        ...

    def group_id(self) -> bytes:
        """What identifies a group that nobody has joined yet."""
        ...

    def join(self, group: bytes, size: int) -> Broadcast:
        """As its sender. Returns when all members have joined."""
        ...


class Cuda:
    """A GPU, by torch alone: vLLM's modules are no part of a rank."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.uuid = str(torch.cuda.get_device_properties(device).uuid)

    def allocate(self, num_bytes: int) -> Tensor:
        return torch.zeros(num_bytes, dtype=torch.uint8, device=self._device)

    def export(self, memory: Tensor) -> tuple[Any, ...]:
        """Once for each piece of memory, which stays until the process ends.

        torch counts one reader for an export, and vLLM's IPC engine opens and releases it in every load. The count
        falls below zero, whereupon torch would never reuse memory that has been given up.
        """
        from torch.multiprocessing.reductions import reduce_tensor

        _, arguments = reduce_tensor(memory)
        return arguments

    def finish_writes(self) -> None:
        torch.cuda.synchronize(self._device)

    def group_id(self) -> bytes:
        return nccl.unique_id()

    def join(self, group: bytes, size: int) -> Broadcast:
        return NcclBroadcast(group, size, self._device)


class NcclBroadcast:
    """Rank 0 of a communicator that vLLM's workers join by the same id (`PyNcclCommunicator.from_unique_id_bytes`)."""

    def __init__(self, group: bytes, size: int, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        with torch.cuda.device(device), torch.cuda.stream(self._stream):
            self._communicator = nccl.init_rank(size, group, 0)
            # the other members begin with a sum of one number each, and all have to take part
            nccl.all_reduce([torch.zeros(1, device=device)], comms=[self._communicator])
            self._stream.synchronize()

    def send(self, memory: Tensor) -> None:
        with torch.cuda.stream(self._stream):
            nccl.broadcast([memory], comms=[self._communicator])

    def wait(self) -> None:
        self._stream.synchronize()
