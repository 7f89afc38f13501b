"""vLLM's own weight transfer: what it is told, and who waits for whom. Nothing of vLLM is started."""

from __future__ import annotations

import base64
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.support.host_transfer import HostDevice, open_exported
from verl.errors import MeshError
from verl.generation.vllm.buffer import Layout, WeightBuffer
from verl.generation.vllm.delivery import Delivery, setup, updates
from verl.generation.vllm.intake import make_intake
from verl.generation.vllm.options import VllmOptions, llm_arguments
from verl.generation.vllm.readers import Sender, Sent, Shown
from verl.generation.vllm.slots import DeviceSlots

LAYOUTS: list[Layout] = [
    [("a", (2, 3), torch.bfloat16), ("b", (5,), torch.bfloat16)],
    [("c", (4, 4), torch.bfloat16)],
    [("d", (1,), torch.bfloat16)],
]
BYTES = [[12, 10], [32], [2]]


def _allocate(num_bytes: int) -> Tensor:
    return torch.zeros(num_bytes, dtype=torch.uint8)


# --- slots

_SHAPES = st.lists(st.integers(1, 4), min_size=0, max_size=3).map(tuple)


@given(
    buckets=st.lists(st.lists(_SHAPES, min_size=1, max_size=4), min_size=1, max_size=5),
    slots=st.integers(1, 3),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
)
def test_a_bucket_is_its_tensors_one_behind_the_other(
    buckets: list[list[tuple[int, ...]]], slots: int, dtype: torch.dtype
) -> None:
    layouts = [[(f"{b}.{i}", shape, dtype) for i, shape in enumerate(bucket)] for b, bucket in enumerate(buckets)]
    memory = DeviceSlots(layouts, slots, _allocate)
    largest = max(sum(torch.Size(shape).numel() for shape in bucket) for bucket in buckets) * dtype.itemsize
    assert memory.num_bytes == slots * largest
    for number, bucket in enumerate(buckets):
        values = [torch.randn(shape).to(dtype) for shape in bucket]
        for (name, tensor), value in zip(memory.tensors(number).items(), values, strict=True):
            assert (tensor.shape, tensor.dtype) == (value.shape, dtype), name
            tensor.copy_(value)
        assert torch.equal(memory.packed(number).view(dtype), torch.cat([value.flatten() for value in values]))
        assert memory.packed(number).data_ptr() == memory.memory[number % slots].data_ptr()


# --- what an engine is told


def _told(delivery: Delivery) -> tuple[dict[str, Any], Any]:
    """On the other side."""
    fields, body = delivery.told()
    return fields, pickle.loads(body)


def test_an_update_names_the_memory_of_its_slot_on_every_device() -> None:
    exports = {"GPU-0": [("slot 0",), ("slot 1",)], "GPU-1": [("other 0",), ("other 1",)]}
    found = updates(*_told(Delivery.on_devices(LAYOUTS, exports)))
    assert found[0]["names"] == ["a", "b"]
    assert found[0]["dtype_names"] == ["bfloat16", "bfloat16"]
    assert found[0]["shapes"] == [[2, 3], [5]]
    assert [update["tensor_sizes"] for update in found] == BYTES
    assert [update["ipc_handles"] for update in found] == [
        {"GPU-0": ("slot 0",), "GPU-1": ("other 0",)},
        {"GPU-0": ("slot 1",), "GPU-1": ("other 1",)},
        {"GPU-0": ("slot 0",), "GPU-1": ("other 0",)},
    ]


def test_what_is_sent_is_one_message_a_bucket() -> None:
    """vLLM begins a new message where one gets larger than its limit: no bucket does."""
    told, exports = _told(Delivery.sent(LAYOUTS, sender=4, group=b"x" * 128, size=9, first=5))
    (first, *_) = updates(told, exports)
    assert sorted(first) == ["dtype_names", "names", "shapes"]
    info = setup(told)
    assert base64.b64decode(info["nccl_unique_id_b64"], validate=True) == b"x" * 128
    assert (info["world_size"], info["rank_offset"], info["packed"]) == (9, 5, True)
    assert info["packed_buffer_size_bytes"] == max(sum(sizes) for sizes in BYTES)


def test_memory_is_opened_with_what_was_exported() -> None:
    """By another process, past the pickle of the message."""
    device = HostDevice(3)
    slots = DeviceSlots(LAYOUTS, 2, device.allocate)
    exports = {device.uuid: [device.export(memory) for memory in slots.memory]}
    found = updates(*_told(Delivery.on_devices(LAYOUTS, exports)))
    slots.tensors(1)["c"].fill_(7)
    opened = open_exported(*found[1]["ipc_handles"]["GPU-3"])
    assert torch.equal(opened[:32].view(torch.bfloat16), torch.full((16,), 7.0, dtype=torch.bfloat16))


def test_node_memory_is_told_as_before() -> None:
    buffer = WeightBuffer(LAYOUTS, slots=2)
    delivery = Delivery.in_node_memory(buffer)
    told, exports = _told(delivery)
    assert (told["by"], told["path"], told["slots"], exports) == ("node_memory", buffer.path, 2, {})
    assert delivery.backend is None


@pytest.mark.parametrize("backend", ["ipc", "nccl"])
def test_vllm_is_set_up_for_it(backend: str) -> None:
    def options(**engine_kwargs: Any) -> VllmOptions:
        return VllmOptions(
            model_path="model", dtype="float32", max_model_len=64, max_num_seqs=8, engine_kwargs=engine_kwargs
        )

    assert llm_arguments(options(), backend)["weight_transfer_config"] == {"backend": backend}
    assert "weight_transfer_config" not in llm_arguments(options())
    with pytest.raises(MeshError, match=r"rollout\.engine_kwargs sets weight_transfer_config"):
        llm_arguments(options(weight_transfer_config={"backend": "nccl"}), backend)


class Llm:
    """Notes what is asked of vllm.LLM."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> None:
        self.calls.append((method, *args))

    def init_weight_transfer_engine(self, request: dict[str, Any]) -> None:
        self.calls.append(("init", request["init_info"]))

    def start_weight_update(self) -> None:
        self.calls.append("start")

    def update_weights(self, request: dict[str, Any]) -> None:
        self.calls.append(("update", request["update_info"]["names"]))

    def finish_weight_update(self) -> None:
        self.calls.append("finish")


def test_an_update_is_started_gets_its_parts_and_is_finished() -> None:
    """The parameters are counted from the start, and looked at in the end."""
    llm = Llm()
    intake = make_intake(llm, *Delivery.on_devices(LAYOUTS, {"GPU-0": [(1,), (2,)]}).told())
    for _ in range(2):
        intake.begin()
        for number in range(len(LAYOUTS)):
            intake.take(number)
        intake.finish()
    parts = [("update", ["a", "b"]), ("update", ["c"]), ("update", ["d"])]
    load = [("verl_expect_all",), "start", *parts, "finish", ("verl_check_all",)]
    assert llm.calls == [("verl_watch_loads",), ("init", {"packed": True}), *load, *load]


def test_a_group_is_joined_when_everybody_is_there() -> None:
    llm = Llm()
    intake = make_intake(llm, *Delivery.sent(LAYOUTS, 4, b"x" * 128, 9, 5).told())
    assert llm.calls == [("verl_watch_loads",)]
    intake.join()
    assert llm.calls[1][0] == "init"


# --- who waits for whom


class Engine:
    """Notes what it is told; it is a `VllmEngine` as far as readers go."""

    def __init__(self, log: list[str]) -> None:
        self._log = log

    def begin_load(self) -> None:
        self._log.append("begin")

    def take_bucket(self, number: int) -> None:
        self._log.append(f"take {number}")

    def take_all(self) -> None:
        self._log.append("take all")

    def await_bucket(self) -> None:
        self._log.append("taken")


class Device(HostDevice):
    def __init__(self, log: list[str]) -> None:
        super().__init__()
        self._log = log

    def finish_writes(self) -> None:
        self._log.append("written")

    def join(self, group: bytes, size: int) -> Any:
        self._log.append(f"join {size}")
        return self

    def send(self, memory: Tensor) -> None:
        self._log.append(f"send {memory.nbytes}")

    def wait(self) -> None:
        self._log.append("sent")


def test_the_engine_is_told_when_all_devices_have_a_bucket_and_they_hear_when_it_has_taken_it() -> None:
    log: list[str] = []
    engine: Any = Engine(log)
    leader = Shown(engine, Device(log), lambda: log.append("barrier"))
    leader.begin_load()
    leader.take_bucket(4)
    leader.await_bucket()
    assert log == ["begin", "written", "barrier", "take 4", "taken", "barrier"]
    log.clear()
    other = Shown(None, Device(log), lambda: log.append("barrier"))
    other.begin_load()
    other.take_bucket(4)
    other.await_bucket()
    assert log == ["written", "barrier", "barrier"]


def test_the_sender_sends_what_has_been_written_and_waits_for_the_engines() -> None:
    log: list[str] = []

    @contextmanager
    def waiting() -> Iterator[None]:
        log.append("waits")
        yield
        log.append("goes on")

    device = Device(log)
    sender = Sender(DeviceSlots(LAYOUTS, 2, device.allocate), device, b"group", 5, waiting)
    with pytest.raises(AssertionError, match="joins first"):
        sender.begin_load()
    sender.join()
    sender.begin_load()
    sender.take_bucket(1)
    sender.await_bucket()
    assert log == ["waits", "join 5", "goes on", "written", "send 32", "waits", "sent", "goes on"]


def test_the_engine_at_the_other_end_takes_all_that_comes() -> None:
    log: list[str] = []
    engine: Any = Engine(log)
    Sent(engine).begin_load()
    assert log == ["begin", "take all"]
