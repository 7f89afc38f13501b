"""What the engine computes is what Hugging Face computes for each sequence alone, without a cache of ours."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.generation.logits_process import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from tests.unit.generation.inprocess.conftest import Tiny
from verl.generation.types import Request, Sampling

ARCHITECTURES = ["llama", "qwen2", "qwen3", "gemma3"]
EOS = 2
LENGTHS = [1, 40, 2, 17, 1, 5, 16, 23]
"""Of prompts: one token, around gemma's window of 16, and beyond it."""


def prompts(seed: int, lengths: list[int] = LENGTHS) -> list[tuple[int, ...]]:
    draw = random.Random(seed)
    return [tuple(draw.randrange(3, 320) for _ in range(length)) for length in lengths]


@torch.no_grad()
def hf_logits(hf: PreTrainedModel, prompt: tuple[int, ...], response: list[int]) -> Tensor:
    """[response, vocabulary] of one full forward pass, those that each response token is drawn from."""
    ids = torch.tensor([[*prompt, *response]])
    return hf(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1]


def chosen(logits: Tensor, response: list[int]) -> Tensor:
    return logits.log_softmax(-1).gather(-1, torch.tensor(response)[:, None])[:, 0]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_greedy_equals_generate_token_for_token(tiny: Callable[[str], Tiny], architecture: str) -> None:
    model = tiny(architecture)
    requests = [Request(row, prompt, seed=row) for row, prompt in enumerate(prompts(seed=1))]
    sampling = Sampling(0.0, 1.0, 0, max_tokens=40, stop_token_ids=(EOS,))
    samples = list(model.engine(max_num_seqs=3).generate(requests, sampling))
    assert sorted(sample.row for sample in samples) == list(range(len(requests)))
    for sample in samples:
        prompt = requests[sample.row].prompt_ids
        ids = torch.tensor([prompt])
        expected = model.hf.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=40, eos_token_id=EOS
        )
        assert sample.token_ids == expected[0, len(prompt) :].tolist()
        logits = hf_logits(model.hf, prompt, sample.token_ids)
        torch.testing.assert_close(torch.tensor(sample.logprobs), chosen(logits, sample.token_ids), rtol=0, atol=1e-5)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize(("temperature", "top_k", "top_p"), [(1.0, 0, 1.0), (0.7, 20, 1.0), (1.3, 50, 0.9)])
def test_logprobs_are_of_the_distribution_drawn_from(
    tiny: Callable[[str], Tiny], architecture: str, temperature: float, top_k: int, top_p: float
) -> None:
    model = tiny(architecture)
    requests = [Request(row, prompt, seed=row) for row, prompt in enumerate(prompts(seed=2))]
    sampling = Sampling(temperature, top_p, top_k, max_tokens=30, stop_token_ids=(EOS,), ignore_eos=True)
    warpers = [TemperatureLogitsWarper(temperature)]
    warpers += [TopKLogitsWarper(top_k)] if top_k else []
    warpers += [TopPLogitsWarper(top_p)] if top_p < 1 else []
    for sample in model.engine(max_num_seqs=5).generate(requests, sampling):
        logits = hf_logits(model.hf, requests[sample.row].prompt_ids, sample.token_ids)
        for warper in warpers:
            logits = warper(torch.empty(0), logits)
        torch.testing.assert_close(torch.tensor(sample.logprobs), chosen(logits, sample.token_ids), rtol=0, atol=1e-5)


def test_the_window_matters_here(tiny: Callable[[str], Tiny]) -> None:
    """Else the tests above would pass with a window that is ignored."""
    model = tiny("gemma3")
    prompt = prompts(seed=1, lengths=[40])[0]
    near = (*prompt[:20], *(token_id % 300 + 5 for token_id in prompt[20:24]), *prompt[24:])
    one, other = hf_logits(model.hf, prompt, [5]), hf_logits(model.hf, near, [5])
    assert (one - other).abs().max() > 1e-3
    config = model.hf.config
    try:
        config.sliding_window = 64
        assert (one - hf_logits(model.hf, prompt, [5])).abs().max() > 1e-3
    finally:
        config.sliding_window = 16


def test_bfloat16_stays_near_float32(tiny: Callable[[str], Tiny]) -> None:
    model = tiny("llama")
    requests = [Request(row, prompt, seed=row) for row, prompt in enumerate(prompts(seed=3))]
    sampling = Sampling(1.0, 1.0, 0, max_tokens=20, stop_token_ids=())
    engine = model.engine(dtype=torch.bfloat16)
    assert {weight.dtype for weight in engine.weights().values()} == {torch.bfloat16}
    differences: list[float] = []
    for sample in engine.generate(requests, sampling):
        logits = hf_logits(model.hf, requests[sample.row].prompt_ids, sample.token_ids)
        differences += (torch.tensor(sample.logprobs) - chosen(logits, sample.token_ids)).tolist()
    assert max(map(abs, differences)) < 0.1
    assert abs(sum(differences) / len(differences)) < 0.01
