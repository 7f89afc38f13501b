"""The rank's side of the engine, against a process that speaks the same messages and has no vLLM in it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from verl.generation.types import Request, Sampling
from verl.generation.vllm import child as child_module
from verl.generation.vllm import engine as engine_module
from verl.generation.vllm.buffer import WeightBuffer
from verl.generation.vllm.child import Child
from verl.generation.vllm.delivery import Delivery
from verl.generation.vllm.engine import EngineError, VllmEngine
from verl.generation.vllm.options import VllmOptions
from verl.generation.vllm.tree import session_members

Start = Callable[..., VllmEngine]

SAMPLING = Sampling(1.0, 1.0, 0, 8, ())
REQUESTS = [Request(row, (5,) * (1 + row), seed=100 + row) for row in range(4)]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    monkeypatch.setattr(engine_module, "Child", lambda _, *rest: Child("tests.support.fake_vllm_entry", *rest))
    engines: list[VllmEngine] = []

    def start(
        fault: str = "none", devices: tuple[int, ...] = (), weights: Delivery | None = None, **limits: Any
    ) -> VllmEngine:
        options = VllmOptions(
            model_path="-", dtype="float32", max_model_len=16, max_num_seqs=4,
            engine_kwargs={"fault": fault, "kv_cache_memory_bytes": 1}, devices=devices, shares_devices=True,
        )  # fmt: skip
        engine = VllmEngine(
            options,
            weights or Delivery.in_node_memory(WeightBuffer([[("weight", (2, 3), torch.float32)]], slots=2)),
            name="rollout replica 0 (ranks 2, 3)",
            log_path=tmp_path / "logs" / "engine.log",
            start_timeout=limits.get("start_timeout", 300.0),
            stage_timeout=limits.get("stage_timeout", 300.0),
            on_progress=limits.get("on_progress", lambda: None),
        )
        engines.append(engine)
        return engine

    yield start
    for engine in engines:
        engine.close()
        assert session_members(engine.pid) == []


def _load(engine: VllmEngine, version: int) -> None:
    engine.begin_load()
    engine.take_bucket(0)
    engine.await_bucket()
    engine.commit(version)


def _loaded(engine: VllmEngine) -> VllmEngine:
    engine.wait_ready()
    _load(engine, 7)
    return engine


def test_samples_carry_what_the_engine_said(start: Start) -> None:
    signs: list[float] = []
    engine = _loaded(start(on_progress=partial(signs.append, 0.0)))
    before = len(signs)
    samples = list(engine.generate(REQUESTS[::-1], SAMPLING))
    assert [sample.row for sample in samples] == [0, 1, 2, 3]  # submitted in row order, whatever the order given
    assert [sample.token_ids for sample in samples] == [[0], [1, 1], [2, 2, 2], [3, 3, 3, 3]]
    assert samples[3].logprobs == [-103.0] * 4
    assert len(signs) - before == 8  # four signs of life and four samples


def test_it_loads_before_it_generates(start: Start) -> None:
    engine = start()
    engine.wait_ready()
    with pytest.raises(EngineError, match=r"rollout replica 0 \(ranks 2, 3\): it holds no weights"):
        engine.generate(REQUESTS, SAMPLING)
    _load(engine, 4)
    assert engine.version == 4
    assert len(list(engine.generate(REQUESTS, SAMPLING))) == 4


def test_no_requests_are_no_work(start: Start) -> None:
    assert list(start().generate([], SAMPLING)) == []


def test_an_engine_sleeps_where_devices_are_shared_and_keeps_its_weights(start: Start) -> None:
    engine = _loaded(start(devices=(0,)))
    engine.sleep()
    with pytest.raises(AssertionError, match="sleeps"):
        engine.generate(REQUESTS, SAMPLING)
    engine.wake("weights", "kv_cache")
    assert [sample.version for sample in engine.generate(REQUESTS, SAMPLING)] == [7] * 4
    engine.sleep()
    engine.sleep()
    engine.wake("weights")
    _load(engine, 8)
    engine.wake("weights", "kv_cache")
    assert [sample.version for sample in engine.generate(REQUESTS, SAMPLING)] == [8] * 4


SENT = Delivery.sent([[(name, (2,), torch.float32)] for name in "abc"], sender=5, group=b"x" * 128, size=2, first=1)


def test_a_commit_awaits_all_that_is_sent(start: Start) -> None:
    engine = start(weights=SENT)
    engine.wait_ready()
    engine.join()
    for version in (1, 2):
        engine.begin_load()
        engine.take_all()
        assert engine.version is None
        engine.commit(version)
        assert [sample.version for sample in engine.generate(REQUESTS, SAMPLING)] == [version] * 4


def test_an_engine_that_dies_while_it_is_sent_weights_has_none(start: Start) -> None:
    engine = start("die in load", weights=SENT)
    engine.wait_ready()
    engine.begin_load()
    engine.take_all()
    with pytest.raises(EngineError, match=r"ended while loading weights, which rank 5 sends.* SIGKILL"):
        engine.commit(1)
    assert engine.version is None


def test_sleep_is_nothing_on_the_cpu(start: Start) -> None:
    engine = _loaded(start())
    engine.sleep()
    assert len(list(engine.generate(REQUESTS, SAMPLING))) == 4


def test_late_samples_of_an_abandoned_call_are_dropped(start: Start) -> None:
    engine = _loaded(start())
    stopped = engine.generate(REQUESTS, SAMPLING)
    next(stopped)
    del stopped
    engine.generate(REQUESTS, SAMPLING)  # never begun
    other = [Request(9, (1,), seed=0)]
    assert [sample.row for sample in engine.generate(other, SAMPLING)] == [9]
    engine.generate(REQUESTS, SAMPLING)
    _load(engine, 1)
    assert engine.version == 1


def test_samples_of_a_superseded_call_cannot_be_read_on(start: Start) -> None:
    engine = _loaded(start())
    old = engine.generate(REQUESTS, SAMPLING)
    next(old)
    new = engine.generate(REQUESTS, SAMPLING)
    with pytest.raises(AssertionError):
        next(old)
    assert len(list(new)) == 4


def test_an_exit_at_start_is_told_with_the_log(start: Start) -> None:
    engine = start("exit at start")
    with pytest.raises(EngineError) as error:
        engine.wait_ready()
    message = str(error.value)
    assert message.startswith("rollout replica 0 (ranks 2, 3): the engine ended while starting. Process")
    assert "exited with code 7" in message
    assert "logs/engine.log:\n    None exit at start" in message  # its output, RANK not being set


def test_a_start_that_takes_too_long_is_ended(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child_module, "_DUMP_SECONDS", 3.0)  # a busy machine's
    engine = start("silent at start", start_timeout=6.0)
    signs: list[float] = []
    engine._on_progress = partial(signs.append, 0.0)
    with pytest.raises(EngineError, match=r"not ready within 6 s; rollout.start_timeout is the limit"):
        engine.wait_ready()
    assert signs  # while it waits, the rank lives
    with pytest.raises(
        EngineError, match=r"was running and has been killed(.|\n)*fake_vllm_entry\.py"
    ):  # its stack, at the end of its log
        engine.wait_ready()
    assert session_members(engine.pid) == []


@pytest.mark.parametrize(
    "fault, told",
    [("die in load", "killed by signal 9, SIGKILL"), ("raise in load", "KeyError: nobody knows this weight")],
)
def test_weights_of_a_load_that_failed_are_not_used(start: Start, fault: str, told: str) -> None:
    engine = start(fault)
    engine.wait_ready()
    with pytest.raises(EngineError, match=told):
        _load(engine, 3)
    assert engine.version is None
    for call in (lambda: engine.generate(REQUESTS, SAMPLING), lambda: _load(engine, 4)):
        with pytest.raises(EngineError, match=r"while loading weights"):
            call()


def test_a_hang_is_ended_after_the_limit(start: Start) -> None:
    engine = _loaded(start("stop in generate"))
    samples = engine.generate(REQUESTS, SAMPLING)
    next(samples)
    engine._stage_timeout = 2.0
    began = time.monotonic()
    with pytest.raises(EngineError, match=r"said nothing for 2 s while generating \(1 of 4 samples are done\)"):
        list(samples)
    assert 2.0 <= time.monotonic() - began < 100.0


def test_a_death_between_two_calls_is_found_by_the_next(start: Start) -> None:
    engine = _loaded(start())
    os.kill(engine.pid, signal.SIGTERM)
    with pytest.raises(EngineError, match="signal 15, SIGTERM"):
        list(engine.generate(REQUESTS, SAMPLING))


def test_close_leaves_nothing_running(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "_QUIT_SECONDS", 0.5)
    engine = _loaded(start("stay"))
    engine.close()
    engine.close()
    assert session_members(engine.pid) == []
    with pytest.raises(EngineError, match="closed"):
        _load(engine, 1)
