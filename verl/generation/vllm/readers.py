"""What a rank does for the buckets that vLLM's own weight transfer takes. Each class is a `Reader` of verl.reshard."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

from verl.generation.vllm.device import Broadcast, Device
from verl.generation.vllm.engine import VllmEngine
from verl.generation.vllm.slots import DeviceSlots


class Shown:
    """Buckets on the devices of a replica, whose workers read those of their own device (CUDA IPC).

    On every rank of the replica. The engine is told of a bucket when all devices have it, and it may be overwritten on
    each of them when the engine has taken it.
    """

    def __init__(self, engine: VllmEngine | None, device: Device, barrier: Callable[[], None]) -> None:
        """`engine`: on the replica's leader. `barrier`: of the replica."""
        self._engine, self._device, self._barrier = engine, device, barrier

    def begin_load(self) -> None:
        if self._engine is not None:
            self._engine.begin_load()

    def take_bucket(self, number: int) -> None:
        self._device.finish_writes()
        self._barrier()
        if self._engine is not None:
            self._engine.take_bucket(number)

    def await_bucket(self) -> None:
        if self._engine is not None:
            self._engine.await_bucket()
        self._barrier()


class Sender:
    """Buckets on one rank's device, which sends them to the workers of all engines (NCCL)."""

    def __init__(
        self,
        slots: DeviceSlots,
        device: Device,
        group: bytes,
        size: int,
        waiting: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """`group`, `size`: its id and its members. `waiting`: around a wait for the engines."""
        self._slots, self._device, self._waiting = slots, device, waiting
        self._group, self._size = group, size
        self._broadcast: Broadcast | None = None

    def join(self) -> None:
        """Returns when all workers have joined the group, which they do at the same time."""
        with self._waiting():
            self._broadcast = self._device.join(self._group, self._size)

    def begin_load(self) -> None:
        assert self._broadcast is not None, "it joins first"

    def take_bucket(self, number: int) -> None:
        assert self._broadcast is not None
        self._device.finish_writes()
        self._broadcast.send(self._slots.packed(number))

    def await_bucket(self) -> None:
        assert self._broadcast is not None
        with self._waiting():
            self._broadcast.wait()


class Sent:
    """The other end: the engine of a leader takes what the sender sends, and the rank itself has no part in it."""

    def __init__(self, engine: VllmEngine) -> None:
        self._engine = engine

    def begin_load(self) -> None:
        """All buckets, one after the other; `VllmEngine.commit` awaits them."""
        self._engine.begin_load()
        self._engine.take_all()

    def take_bucket(self, number: int) -> None:
        raise AssertionError("no bucket lies in this rank's memory")

    def await_bucket(self) -> None:
        raise AssertionError("no bucket lies in this rank's memory")
