"""vLLM's own weight transfer in the real vLLM, with host memory in place of GPUs' and gloo in place of NCCL."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.host_transfer import HostDevice
from tests.support.vllm_rig import (
    GREEDY,
    Rig,
    assert_follows_new_weights,
    layouts,
    start_engine,
    tiny_llama,
)
from verl.generation.vllm import engine as engine_module
from verl.generation.vllm.buffer import WeightBuffer
from verl.generation.vllm.child import Child
from verl.generation.vllm.delivery import Delivery
from verl.generation.vllm.engine import EngineError
from verl.generation.vllm.probe import probe
from verl.generation.vllm.readers import Sender, Sent, Shown
from verl.generation.vllm.slots import DeviceSlots
from verl.generation.vllm.tree import session_members
from verl.reshard.execute import Reader

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(not probe("cpu").usable, reason=probe("cpu").message),
    pytest.mark.timeout(900),
]

SLOTS = 2


@dataclass
class TransferRig(Rig):
    """The ranks that have the memory, one after the other in this process."""

    slots: Sequence[DeviceSlots] = ()
    readers: Sequence[Reader] = ()
    """Of the ranks in `slots`."""
    others: Sequence[Reader] = ()
    buckets: int = 0

    def load(self) -> None:
        """As WeightSync does it on each rank: the bucket before is awaited when the next one has been written."""
        self.version += 1
        for reader in (*self.others, *self.readers):
            reader.begin_load()
        for number in range(self.buckets):
            self.write(number)
            if number:
                self.finish_with(number - 1)
            for reader in reversed(self.readers):  # the leader is the last to have it
                reader.take_bucket(number)
        self.finish_with(self.buckets - 1)
        self.engine.commit(self.version)

    def write(self, bucket: int) -> None:
        parameters = dict(self.model.named_parameters())
        for slots in self.slots:
            for name, destination in slots.tensors(bucket).items():
                destination.copy_(parameters[name].detach())

    def finish_with(self, bucket: int) -> None:
        """Its memory then holds what nobody may read any more."""
        for reader in self.readers:
            reader.await_bucket()
        for slots in self.slots:
            slots.packed(bucket).fill_(255)  # NaN


Start = Callable[..., TransferRig]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """A ready engine. `by`: "ipc" or "nccl"."""
    monkeypatch.setattr(engine_module, "Child", lambda _, *rest: Child("tests.support.host_transfer", *rest))
    rigs: list[TransferRig] = []

    def start(by: str, tied: bool = False, tp: int = 1, leave_out: str | None = None, **engine_kwargs: Any) -> Rig:
        model = tiny_llama(tmp_path, tied)
        buckets = layouts(model, leave_out)
        devices = [HostDevice(number) for number in range(tp if by == "ipc" else 1)]
        slots = [DeviceSlots(buckets, SLOTS, device.allocate) for device in devices]
        group = devices[0].group_id()
        if by == "ipc":
            exports = {d.uuid: [d.export(m) for m in s.memory] for d, s in zip(devices, slots, strict=True)}
            delivery = Delivery.on_devices(buckets, exports)
        else:
            delivery = Delivery.sent(buckets, sender=5, group=group, size=1 + tp, first=1)
        engine = start_engine(tmp_path, tmp_path / "engine.log", delivery, tp, **engine_kwargs)
        rig = TransferRig(model, engine, WeightBuffer(buckets, 1), slots=slots, buckets=len(buckets))
        rigs.append(rig)
        engine.wait_ready()
        if by == "ipc":
            rig.readers = [
                Shown(engine if number == 0 else None, device, lambda: None) for number, device in enumerate(devices)
            ]
        else:
            sender = Sender(slots[0], devices[0], group, 1 + tp, nullcontext)
            rig.readers, rig.others = [sender], [Sent(engine)]
            with ThreadPoolExecutor() as beside:
                joined = beside.submit(sender.join)
                engine.join()
                joined.result()
        return rig

    yield start
    for rig in rigs:
        rig.engine.close()
        assert session_members(rig.engine.pid) == []


def test_two_workers_read_the_devices_memory(start: Start) -> None:
    """CUDA IPC's way. Each worker has a device, with every bucket. At last one bucket does not come."""
    rig = start("ipc", tied=True, tp=2)
    assert rig.buckets > 3
    rig.load()
    assert_follows_new_weights(rig)

    for reader in rig.readers:
        reader.begin_load()
    for number in range(rig.buckets - 1):
        rig.write(number)
        for reader in reversed(rig.readers):
            reader.take_bucket(number)
        rig.finish_with(number)
    with pytest.raises(EngineError, match=r"committing weights of version 9.* nothing for .*norm\.weight"):
        rig.engine.commit(9)
    assert rig.engine.version is None


def test_a_worker_is_sent_the_weights(start: Start) -> None:
    """NCCL's way. At last the engine dies while it waits for what has not been sent."""
    rig = start("nccl")
    rig.load()
    assert_follows_new_weights(rig)

    for reader in (*rig.others, *rig.readers):
        reader.begin_load()
    rig.write(0)
    rig.readers[0].take_bucket(0)
    rig.engine.await_bucket()
    os.kill(rig.engine.pid, signal.SIGKILL)
    message = r"ended while loading weights, which rank 5 sends(.|\n)*signal 9, SIGKILL"
    with pytest.raises(EngineError, match=message):
        rig.engine.commit(9)
    assert rig.engine.version is None
    with pytest.raises(EngineError, match="signal 9"):
        rig.generate([[1, 2, 3]], GREEDY)


@pytest.mark.slow
@pytest.mark.parametrize("by, tied, tp", [("ipc", False, 1), ("ipc", False, 2), ("nccl", True, 2)])
def test_other_models_and_splits(start: Start, by: str, tied: bool, tp: int) -> None:
    rig = start(by, tied, tp)
    rig.load()
    assert_follows_new_weights(rig)


@pytest.mark.slow
@pytest.mark.parametrize("by", ["ipc", "nccl"])
def test_weights_with_a_gap_are_never_generated_with(start: Start, by: str) -> None:
    rig = start(by, leave_out="model.layers.1.mlp.down_proj.weight")
    with pytest.raises(EngineError, match=r"committing weights of version 1.*layers\.1\.mlp\.down_proj\.weight"):
        rig.load()
    assert rig.engine.version is None
