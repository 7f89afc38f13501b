"""Anonymous memory that processes of one node share."""

from __future__ import annotations

import mmap
import os

import torch


class NodeMemory:
    """Made by one process (`memfd_create`) and opened by others of its node, by a path under its own /proc.

    It is not a named file in /dev/shm, since a container's is 64 MiB by default and writing past its end is a SIGBUS.
    The pages count against the container's memory limit, as they are first written.
    """

    def __init__(self, num_bytes: int) -> None:
        """Makes the memory, zeroed. At least one byte."""
        descriptor = os.memfd_create("verl-weights")
        os.ftruncate(descriptor, num_bytes)
        self._attach(descriptor, f"/proc/{os.getpid()}/fd/{descriptor}", num_bytes)

    @classmethod
    def open(cls, path: str, num_bytes: int) -> NodeMemory:
        """The same memory from another process of the node. Raises ValueError where it has another size."""
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        found = os.fstat(descriptor).st_size
        if found != num_bytes:
            os.close(descriptor)
            raise ValueError(f"The weight buffer {path} has {found} bytes, its layout asks for {num_bytes}.")
        memory = cls.__new__(cls)
        memory._attach(descriptor, path, num_bytes)
        return memory

    def _attach(self, descriptor: int, path: str, num_bytes: int) -> None:
        self.path = path
        """Where other processes of the node open the memory, until the one that made it ends or closes it."""
        self.num_bytes = num_bytes
        self._descriptor: int | None = descriptor
        self.bytes = torch.frombuffer(mmap.mmap(descriptor, num_bytes), dtype=torch.uint8)

    def close(self) -> None:
        """Give up the descriptor: nobody can open `path` any more. The memory itself goes with the last view of it."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
