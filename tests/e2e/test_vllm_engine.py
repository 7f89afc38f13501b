"""The real vLLM on the CPU: what it generates is held against Hugging Face's code, and its failures are real kills."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.vllm_rig import (
    GREEDY,
    PROMPTS,
    VOCABULARY,
    Rig,
    assert_equals_hugging_face,
    assert_follows_new_weights,
    nucleus_logprobs,
    perturb,
    start_rig,
    tiny_llama,
)
from verl.generation.types import Request, Sampling
from verl.generation.vllm.engine import EngineError, VllmEngine
from verl.generation.vllm.probe import probe
from verl.generation.vllm.tree import session_members, shared_segments

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(not probe("cpu").usable, reason=probe("cpu").message),
    pytest.mark.timeout(900),
]

STEP_TOKENS = 512
"""That an engine works on at a time: as many as max_model_len, the fewest that it takes."""
LONG_PROMPT = [1] + [(37 * i) % 400 + 100 for i in range(300)]


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    folder = tmp_path_factory.mktemp("tied")
    model = tiny_llama(folder, tied=True)
    rig = start_rig(model, folder, folder / "engine.log", max_num_batched_tokens=STEP_TOKENS)
    rig.engine.wait_ready()
    rig.load()
    yield rig
    rig.engine.close()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Rig]]:
    """Starts an engine that the test is going to break."""
    engines: list[VllmEngine] = []

    def start(tied: bool = False, **kwargs: Any) -> Rig:
        model = tiny_llama(tmp_path, tied)
        rig = start_rig(model, tmp_path, tmp_path / "engine.log", **kwargs)
        engines.append(rig.engine)
        return rig

    yield start
    for engine in engines:
        engine.close()


def test_greedy_is_hugging_faces_before_and_after_new_weights(tied: Rig) -> None:
    assert_follows_new_weights(tied)


def test_a_cached_prefix_does_not_outlive_its_weights(tied: Rig) -> None:
    assert_equals_hugging_face(tied, [LONG_PROMPT])
    perturb(tied.model, seed=2)
    tied.load()
    assert_equals_hugging_face(tied, [LONG_PROMPT])


@pytest.mark.parametrize("temperature, top_p", [(1.0, 1.0), (0.7, 1.0), (1.0, 0.8), (0.7, 0.8)])
def test_logprobs_are_of_the_distribution_that_is_drawn_from(tied: Rig, temperature: float, top_p: float) -> None:
    sampling = Sampling(temperature, top_p, 0, 32, (), ignore_eos=True)
    for prompt, sample in zip(PROMPTS, tied.generate(PROMPTS, sampling, seed=10), strict=True):
        logprobs = nucleus_logprobs(tied.logits(prompt, sample.token_ids), temperature, top_p)
        expected = logprobs.gather(-1, torch.tensor(sample.token_ids)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(sample.logprobs), expected, atol=1e-4, rtol=0)


def test_top_k_limits_the_draw(tied: Rig) -> None:
    sampling = Sampling(1.0, 1.0, 2, 32, (), ignore_eos=True)
    for prompt, sample in zip(PROMPTS, tied.generate(PROMPTS, sampling), strict=True):
        top = tied.logits(prompt, sample.token_ids).topk(2)
        drawn = torch.tensor(sample.token_ids)[:, None] == top.indices
        assert drawn.any(-1).all()
        expected = top.values.log_softmax(-1)[drawn]
        torch.testing.assert_close(torch.tensor(sample.logprobs), expected, atol=1e-4, rtol=0)


def test_a_seed_draws_the_same_alone_and_among_others(tied: Rig) -> None:
    sampling = Sampling(1.0, 0.9, 0, 24, (), ignore_eos=True)
    requests = [Request(row, tuple(PROMPTS[row % 4]), seed=100 + row) for row in range(8)]
    together = {sample.row: sample.token_ids for sample in tied.engine.generate(requests, sampling)}
    for request in requests:
        (alone,) = tied.engine.generate([request], sampling)
        assert alone.token_ids == together[request.row]
    assert len({tuple(ids) for ids in together.values()}) == 8


def test_more_prompts_than_a_step_takes(tied: Rig) -> None:
    """A step has room for one and a half of them; a seed draws the same as alone."""
    sampling = Sampling(1.0, 1.0, 0, 8, (), ignore_eos=True)
    prompts = [[2 + row, *LONG_PROMPT] for row in range(5)]
    assert len(prompts[0]) < STEP_TOKENS < 2 * len(prompts[0])
    together = tied.generate(prompts, sampling, seed=40)
    for row, prompt in enumerate(prompts):
        (alone,) = tied.generate([prompt], sampling, seed=40 + row)
        assert together[row].token_ids == alone.token_ids


def test_frequencies_are_the_models(tied: Rig) -> None:
    """4000 draws of one token: the seeds are independent, and the distribution is the model's."""
    sampling = Sampling(1.0, 1.0, 8, 1, (), ignore_eos=True)
    samples = tied.generate([PROMPTS[0]] * 4000, sampling, seed=5)
    counts = torch.bincount(torch.tensor([sample.token_ids[0] for sample in samples]), minlength=VOCABULARY)
    top = tied.logits(PROMPTS[0], [0])[0].topk(8)
    expected = top.values.softmax(-1) * 4000
    observed = counts[top.indices]
    assert observed.sum() == 4000
    chi_squared = ((observed - expected) ** 2 / expected).sum()
    assert chi_squared < 29.9  # 7 degrees of freedom: 1e-4


def test_a_response_ends_with_its_stop_token(tied: Rig) -> None:
    (whole,) = tied.generate([PROMPTS[0]], GREEDY)
    stop = whole.token_ids[5]
    end = whole.token_ids.index(stop) + 1
    stopping = Sampling(0.0, 1.0, 0, 16, (stop, VOCABULARY - 1))
    (cut,) = tied.generate([PROMPTS[0]], stopping)
    assert (cut.token_ids, cut.ended) == (whole.token_ids[:end], True)
    assert len(cut.logprobs) == end
    assert not whole.ended
    ignoring = Sampling(0.0, 1.0, 0, 16, (stop,), ignore_eos=True)
    (ignored,) = tied.generate([PROMPTS[0]], ignoring)
    assert (ignored.token_ids, ignored.ended) == (whole.token_ids, False)


def test_samples_come_as_they_finish(tied: Rig) -> None:
    sampling = Sampling(1.0, 1.0, 0, 128, tuple(range(0, VOCABULARY, 24)))
    requests = [Request(row, tuple(PROMPTS[row % 4]), seed=row) for row in range(16)]
    samples = list(tied.engine.generate(requests, sampling))
    lengths = [len(sample.token_ids) for sample in samples]
    assert sorted(sample.row for sample in samples) == list(range(16))
    assert [sample.row for sample in samples] != list(range(16))
    assert lengths == sorted(lengths)  # all start together, a token a step


def test_a_consumer_that_stops_early_has_the_rest_aborted(tied: Rig) -> None:
    long = Sampling(1.0, 1.0, 0, 400, tuple(range(0, VOCABULARY, 24)))
    requests = [Request(row, tuple(PROMPTS[0]), seed=row) for row in range(16)]
    samples = tied.engine.generate(requests, long)
    next(samples)
    samples.close()  # type: ignore[attr-defined]
    tied.engine.generate(requests, long)  # and this one is never read
    assert_equals_hugging_face(tied, PROMPTS)


def test_signals_that_torchrun_or_a_terminal_send_are_ignored(tied: Rig) -> None:
    os.killpg(tied.engine.pid, signal.SIGTERM)
    os.killpg(tied.engine.pid, signal.SIGINT)
    assert_equals_hugging_face(tied, PROMPTS)


def test_a_prompt_that_does_not_fit_is_refused(tied: Rig) -> None:
    with pytest.raises(ValueError, match=r"a prompt of 500 tokens and a response of up to 16 do not fit .* 512"):
        tied.engine.generate([Request(0, (1,) * 500, seed=0)], GREEDY)


AT_ONCE = 90.0
"""Seconds, on a busy machine; an engine's own limit is longer."""
LONG = Sampling(1.0, 1.0, 0, 400, (), ignore_eos=True)


def test_a_killed_engine_is_an_error_at_once(start: Callable[..., Rig]) -> None:
    rig = start()
    engine = rig.engine
    engine.wait_ready()
    requests = [Request(row, (1, 2, 3), seed=row) for row in range(4)]
    with pytest.raises(EngineError, match=r"rollout replica 3.* no weights"):
        engine.generate(requests, GREEDY)
    rig.load()
    os.kill(engine.pid, signal.SIGSTOP)  # so that the samples cannot be done before it is killed
    samples = engine.generate(requests, LONG)
    os.kill(engine.pid, signal.SIGKILL)
    started = time.monotonic()
    with pytest.raises(EngineError) as error:
        list(samples)
    assert time.monotonic() - started < AT_ONCE
    message = str(error.value)
    assert "rollout replica 3: the engine ended while generating (0 of 4 samples are done)" in message
    assert "was killed by signal 9, SIGKILL" in message
    assert "engine.log" in message
    assert "Successfully reset prefix cache" in message  # the log's end: what it did last
    with pytest.raises(EngineError, match="signal 9"):
        rig.load()
    assert session_members(engine.pid) == []


@pytest.mark.slow  # the same with an engine that has no vLLM in it: unit/generation/test_vllm_engine.py
def test_a_hung_engine_is_an_error_after_the_limit(start: Callable[..., Rig]) -> None:
    rig = start()
    engine = rig.engine
    engine.wait_ready()
    rig.load()
    engine._stage_timeout = 4.0
    os.kill(engine.pid, signal.SIGSTOP)
    samples = engine.generate([Request(0, (1, 2, 3), seed=0)], LONG)
    started = time.monotonic()
    with pytest.raises(EngineError, match=r"said nothing for 4 s while generating .* was running and has been killed"):
        list(samples)
    assert 4 <= time.monotonic() - started < AT_ONCE
    assert session_members(engine.pid) == []


def test_an_engine_that_cannot_start_says_why(start: Callable[..., Rig]) -> None:
    engine = start(no_such_argument=1).engine
    with pytest.raises(EngineError) as error:
        engine.wait_ready()
    assert "raised while starting" in str(error.value)
    assert "exited with code 1" in str(error.value)
    assert "no_such_argument" in str(error.value)


def test_weights_with_a_gap_are_never_generated_with(start: Callable[..., Rig]) -> None:
    rig = start(leave_out="model.layers.1.mlp.down_proj.weight")
    engine = rig.engine
    engine.wait_ready()
    with pytest.raises(EngineError, match=r"committing weights of version 1.*layers\.1\.mlp\.down_proj\.weight"):
        rig.load()
    assert engine.version is None
    with pytest.raises(EngineError):
        engine.generate([Request(0, (1, 2, 3), seed=0)], GREEDY)


def test_nothing_is_generated_with_a_mixture(tied: Rig) -> None:
    """A load that has begun is seen to its end first."""
    perturb(tied.model, seed=4)
    tied.engine.begin_load()
    assert len(tied.memory.buckets) > 3
    for number in range(len(tied.memory.buckets)):
        with pytest.raises(EngineError, match="no weights that may be used"):
            tied.engine.generate([Request(0, (1, 2, 3), seed=0)], GREEDY)
        tied.write(number)
        tied.engine.take_bucket(number)
        tied.engine.await_bucket()
    tied.version += 1
    tied.engine.commit(tied.version)
    assert_equals_hugging_face(tied, PROMPTS)


@pytest.mark.slow  # as above
def test_an_engine_killed_within_a_load_is_an_error_and_serves_nothing(start: Callable[..., Rig]) -> None:
    rig = start()
    rig.engine.wait_ready()
    rig.load()
    rig.engine.begin_load()
    rig.write(0)
    rig.engine.take_bucket(0)
    rig.engine.await_bucket()
    os.kill(rig.engine.pid, signal.SIGKILL)
    with pytest.raises(EngineError, match=r"ended while loading weights(.|\n)*signal 9, SIGKILL"):
        rig.engine.take_bucket(1)
        rig.engine.await_bucket()
    assert rig.engine.version is None
    with pytest.raises(EngineError, match="signal 9"):
        rig.engine.generate([Request(0, (1, 2, 3), seed=0)], GREEDY)
    assert session_members(rig.engine.pid) == []


@pytest.mark.parametrize("tied", [pytest.param(True, marks=pytest.mark.slow), False], ids=["tied", "untied"])
def test_vllms_own_reload_takes_buckets_too(tmp_path: Path, tied: bool) -> None:
    """What GPUs and quantised models are loaded with."""
    command = [sys.executable, "-m", "tests.support.vllm_reload", str(tmp_path), *(["tied"] if tied else [])]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    loads = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(loads) == 3
    for load in loads:
        assert load["right"] and load["gap"] < 1e-4 and load["buckets"] > 3, load


@pytest.mark.slow
def test_two_workers_with_a_tied_head(start: Callable[..., Rig]) -> None:
    rig = start(tied=True, tp=2)
    rig.engine.wait_ready()
    rig.load()
    assert_follows_new_weights(rig)


def test_two_workers(start: Callable[..., Rig]) -> None:
    """Tensor parallelism, untied: right with the first weights and with new ones; then one worker is killed."""
    rig = start(tp=2)
    rig.engine.wait_ready()
    rig.load()
    assert_follows_new_weights(rig)

    session = rig.engine.pid
    mapped = shared_segments(session)
    assert mapped, "the workers meet in shared memory"
    assert not {path for path in mapped if path.exists()}, "whose names are gone, so that no kill can leave them behind"

    worker, *_ = (pid for pid in session_members(session) if pid != session and "cpushm" in memory_map(pid))
    os.kill(worker, signal.SIGSTOP)  # so that the samples cannot be done before it is killed
    samples = rig.engine.generate([Request(0, (1, 2, 3), seed=0)], LONG)
    os.kill(worker, signal.SIGKILL)
    started = time.monotonic()
    with pytest.raises(EngineError, match=rf"engine worker VllmWorker-\d, process {worker}, died"):
        list(samples)
    assert time.monotonic() - started < AT_ONCE
    assert session_members(session) == []


def memory_map(pid: int) -> str:
    return Path(f"/proc/{pid}/maps").read_text()


@pytest.mark.parametrize("moment", ["starting", "ready"])
def test_a_killed_rank_takes_its_engine_along(tmp_path: Path, moment: str) -> None:
    command = [sys.executable, "-m", "tests.support.vllm_rig", str(tmp_path), str(tmp_path / "engine.log"), "2"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as rank:
        try:
            assert rank.stdout is not None
            session = int(rank.stdout.readline())
            if moment == "ready":
                assert rank.stdout.readline() == "ready\n"
            else:
                _wait_until(lambda: len(session_members(session)) >= 3, seconds=600)  # the engine and some workers
        finally:
            rank.kill()
    _wait_until(lambda: session_members(session) == [], seconds=AT_ONCE)


def _wait_until(condition: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"it did not come about within {seconds:g} s"
        time.sleep(0.05)
