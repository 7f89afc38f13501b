"""Chunked log-probs against log_softmax over the whole vocabulary and autograd, in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from verl.model.logprobs import token_logprobs

TOKENS, HIDDEN, VOCAB = 7, 16, 50


def inputs(tokens: int = TOKENS, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    draws = torch.Generator().manual_seed(3)
    hidden = torch.randn(tokens, HIDDEN, generator=draws).to(dtype).requires_grad_()
    weight = torch.randn(VOCAB, HIDDEN, generator=draws).to(dtype).requires_grad_()
    return hidden, weight, torch.randint(VOCAB, (tokens,), generator=draws)


def reference(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, softcap: float | None
) -> tuple[Tensor, Tensor]:
    logits = hidden @ weight.T
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logprobs = (logits / temperature).log_softmax(-1)
    entropy = -(logprobs.exp() * logprobs).sum(-1)
    return logprobs[torch.arange(len(targets)), targets], entropy


def with_gradients(outputs: tuple[Tensor, Tensor], *leaves: Tensor, entropy: bool = True) -> list[Tensor]:
    """Outputs, and gradients of a sum with different weights a token."""
    at = torch.linspace(-1, 2, len(outputs[0]), dtype=outputs[0].dtype)
    loss = (outputs[0] * at).sum() + ((outputs[1] * at.cos()).sum() if entropy else 0)
    return [*outputs, *torch.autograd.grad(loss, leaves)]


@pytest.mark.parametrize("chunk", [1, 3, TOKENS, 1000])
@pytest.mark.parametrize("softcap", [None, 4.0])
@pytest.mark.parametrize("temperature", [1.0, 0.3, 1.7])
@pytest.mark.parametrize("entropy", [True, False])
def test_values_and_gradients(chunk: int, softcap: float | None, temperature: float, entropy: bool) -> None:
    hidden, weight, targets = inputs()
    exact = [t.detach().double().requires_grad_() for t in (hidden, weight)]
    wanted = with_gradients(reference(*exact, targets, temperature, softcap), *exact, entropy=entropy)
    outputs = token_logprobs(hidden, weight, targets, temperature, chunk, softcap)
    for one, other in zip(with_gradients(outputs, hidden, weight, entropy=entropy), wanted, strict=True):
        assert one.dtype == torch.float32
        torch.testing.assert_close(one.double(), other, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("largest", [0.0, 3000.0, -3000.0])
def test_a_sharp_distribution_keeps_its_entropy(largest: float) -> None:
    """Far below the rounding of its logits, which are exact here."""
    weight = (largest - 11.5 * torch.arange(VOCAB)[:, None]).requires_grad_()
    hidden, targets = torch.ones(2, 1, requires_grad=True), torch.tensor([0, 1])
    exact = [t.detach().double().requires_grad_() for t in (hidden, weight)]
    wanted = with_gradients(reference(*exact, targets, 1.0, None), *exact)
    assert 0 < wanted[1][0] < 2e-4
    outputs = with_gradients(token_logprobs(hidden, weight, targets, 1.0, 1), hidden, weight)
    for one, other in zip(outputs[:2] + outputs[3:], wanted[:2] + wanted[3:], strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-6, atol=3e-7)


def test_without_tokens_there_are_no_outputs_and_the_gradient_is_zero() -> None:
    hidden, weight, targets = inputs(tokens=0)
    logprobs, entropy = token_logprobs(hidden, weight, targets, 1.0, 4)
    assert logprobs.shape == entropy.shape == (0,)
    (logprobs.sum() + entropy.sum()).backward()
    assert weight.grad is not None and weight.grad.abs().max() == 0
    assert hidden.grad is not None and hidden.grad.shape == (0, HIDDEN)


def test_a_frozen_head_passes_the_same_gradient_on_and_none_is_made_for_it() -> None:
    hidden, weight, targets = inputs(tokens=6)
    *_, wanted, _ = with_gradients(token_logprobs(hidden, weight, targets, 0.7, 4), hidden, weight)
    with Largest() as largest:
        *_, gradient = with_gradients(token_logprobs(hidden, weight.detach(), targets, 0.7, 4), hidden)
    assert torch.equal(gradient, wanted)
    assert largest.elements < weight.numel()


def test_large_logits_neither_overflow_nor_give_nan() -> None:
    hidden, weight, targets = inputs()
    scaled = (hidden.detach() * 1e4).requires_grad_()
    outputs = with_gradients(token_logprobs(scaled, weight, targets, 1.0, 2), scaled, weight)
    assert all(t.isfinite().all() for t in outputs)
    assert outputs[1].abs().max() < 1e-3  # one token has all the probability


def test_in_bfloat16_only_the_logits_are_rounded() -> None:
    """bfloat16 keeps 8 bits: a logit is off by 2^-9 of itself at most, and a log-prob by twice the largest error."""
    hidden, weight, targets = inputs(dtype=torch.bfloat16)
    exact = [t.detach().double().requires_grad_() for t in (hidden, weight)]
    wanted = with_gradients(reference(*exact, targets, 1.0, None), *exact)
    got = with_gradients(token_logprobs(hidden, weight, targets, 1.0, 3), hidden, weight)
    assert [t.dtype for t in got] == [torch.float32, torch.float32, torch.bfloat16, torch.bfloat16]
    bound = 2 * 2**-9 * (exact[0] @ exact[1].T).abs().max().item()
    assert (got[0].double() - wanted[0]).abs().max() <= bound
    for one, other in zip(got[2:], wanted[2:], strict=True):
        assert (one.double() - other).norm() <= 0.02 * other.norm()


def test_in_bfloat16_the_weights_gradient_does_not_lose_small_chunks() -> None:
    """400 equal contributions: summed in bfloat16 they would stop growing at 256."""
    hidden = torch.ones(400, 1, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    logprobs, _ = token_logprobs(hidden, weight, torch.zeros(400, dtype=torch.int64), 1.0, 1)
    (2 * logprobs.sum()).backward()
    assert weight.grad is not None
    assert weight.grad.flatten().tolist() == [400.0, -400.0]


class Largest(TorchDispatchMode):
    """The most elements that any operation made; a view makes none."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, Tensor) and not func.is_view:
                self.elements = max(self.elements, tensor.numel())
        return out


def test_tokens_times_vocabulary_never_exists() -> None:
    hidden, weight, targets = inputs(tokens=64)
    with Largest() as largest:
        with_gradients(token_logprobs(hidden, weight, targets, 0.7, 20, 3.0), hidden, weight)
    assert 20 * VOCAB <= largest.elements <= max(20 * VOCAB, VOCAB * HIDDEN, 64 * HIDDEN)
