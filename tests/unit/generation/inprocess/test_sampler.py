"""Draws: their distribution, what they depend on, and the truncation against Hugging Face's own."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers.generation.logits_process import TopKLogitsWarper, TopPLogitsWarper

from verl.generation.inprocess.sampler import draw, truncate, uniform
from verl.generation.types import Sampling


def sampling(temperature: float = 1.0, top_p: float = 1.0, top_k: int = 0) -> Sampling:
    return Sampling(temperature, top_p, top_k, max_tokens=1, stop_token_ids=())


def chi_square_p(counts: Tensor, expected: Tensor) -> float:
    """Pearson's test: the chance of a deviation as large as this, or larger."""
    statistic = ((counts - expected) ** 2 / expected).sum()
    freedom = torch.tensor((len(counts) - 1) / 2, dtype=torch.float64)
    return torch.special.gammaincc(freedom, statistic.double() / 2).item()


def test_chi_square_p_is_that_of_the_tables() -> None:
    """The 95 % quantile for 3 degrees of freedom is 7.815."""
    expected = torch.full((4,), 100.0)
    shift = (7.815 * 100 / 2) ** 0.5
    assert chi_square_p(expected + torch.tensor([shift, -shift, 0, 0]), expected) == pytest.approx(0.05, abs=1e-4)


@pytest.mark.parametrize("of", ["seeds", "positions", "low bits of a seed", "seeds far apart"])
def test_uniform_is_uniform(of: str) -> None:
    keys = {
        "seeds": [(seed, 0) for seed in range(20_000)],
        "positions": [(7, position) for position in range(20_000)],
        "low bits of a seed": [(seed, seed % 5) for seed in range(10**12, 10**12 + 20_000)],
        "seeds far apart": [(seed << 40, 3) for seed in range(20_000)],
    }[of]
    draws = torch.tensor([uniform(*key) for key in keys], dtype=torch.float64)
    assert ((draws >= 0) & (draws < 1)).all()
    counts = torch.histc(draws, bins=50, min=0, max=1)
    assert chi_square_p(counts, torch.full((50,), len(keys) / 50)) > 1e-3


def test_successive_draws_are_independent() -> None:
    pairs = torch.tensor([[uniform(seed, 0), uniform(seed, 1)] for seed in range(20_000)])
    cells = (pairs * 8).long()
    counts = torch.bincount(cells[:, 0] * 8 + cells[:, 1], minlength=64).double()
    assert chi_square_p(counts, torch.full((64,), 20_000 / 64)) > 1e-3


def test_uniform_is_a_function_of_seed_and_position_alone() -> None:
    """The fixed values are those of `printf 0:0 | b2sum -l 64`, read from its last byte: a run repeats by them."""
    assert uniform(0, 0) == 0x62D069677E9C6 / 2**52
    assert uniform(41, 7) == 0x987425D2C5FFB / 2**52
    assert len({uniform(seed, position) for seed in range(-50, 50) for position in range(50)}) == 5000
    assert uniform(1, 23) != uniform(12, 3)
    assert uniform(2**64 + 1, 0) != uniform(1, 0)


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [(1.0, 0, 1.0), (0.6, 0, 1.0), (1.7, 0, 1.0), (1.0, 5, 1.0), (1.0, 0, 0.7), (0.8, 9, 0.9)],
)
def test_draws_follow_the_distribution(temperature: float, top_k: int, top_p: float) -> None:
    num_draws, vocabulary = 40_000, 20
    row = torch.randn(vocabulary, generator=torch.Generator().manual_seed(1)) * 1.5
    warped = row[None] / temperature
    if top_k:
        warped = TopKLogitsWarper(top_k)(torch.empty(0), warped)
    if top_p < 1:
        warped = TopPLogitsWarper(top_p)(torch.empty(0), warped)
    probs = warped[0].double().softmax(-1)

    uniforms = [uniform(seed, 3) for seed in range(num_draws)]
    ids, logprobs = draw(row.expand(num_draws, -1), sampling(temperature, top_p, top_k), uniforms)
    counts = torch.bincount(ids, minlength=vocabulary).double()
    kept = probs > 0
    assert counts[~kept].sum() == 0
    assert chi_square_p(counts[kept], probs[kept] * num_draws) > 1e-3
    torch.testing.assert_close(logprobs.double(), probs.log()[ids], rtol=0, atol=1e-5)


def test_the_extreme_draws_are_tokens_that_can_be_drawn() -> None:
    logits = torch.tensor([[float("-inf"), 0.0, float("-inf"), 1.0, float("-inf")]])
    largest = 1 - 2.0**-52
    for value, token_id in ((0.0, 1), (largest, 3)):
        ids, logprobs = draw(logits, sampling(), [value])
        assert ids.tolist() == [token_id]
        assert logprobs.isfinite().all()


@given(st.integers(0, 2**32), st.integers(1, 40), st.floats(0.1, 3.0))
def test_the_largest_draw_never_falls_off_the_end(seed: int, vocabulary: int, temperature: float) -> None:
    logits = torch.randn(4, vocabulary, generator=torch.Generator().manual_seed(seed)) * 30
    ids, logprobs = draw(logits, sampling(temperature), [1 - 2.0**-52] * 4)
    assert logprobs.isfinite().all()
    assert ((ids >= 0) & (ids < vocabulary)).all()


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(64, 1000, generator=generator)
    uniforms = [uniform(seed, 0) for seed in range(64)]
    for settings in (sampling(), sampling(0.7, 0.9, 50), sampling(1.0, 0.5), sampling(0)):
        ids, logprobs = draw(logits, settings, uniforms)
        order = random.Random(1).sample(range(64), 64)
        shuffled, shuffled_logprobs = draw(logits[order], settings, [uniforms[row] for row in order])
        assert torch.equal(shuffled, ids[order])
        assert torch.equal(shuffled_logprobs, logprobs[order])
        alone = [draw(logits[row : row + 1], settings, [uniforms[row]])[0].item() for row in range(64)]
        assert alone == ids.tolist()


def test_greedy_takes_the_likeliest_and_the_models_own_logprob() -> None:
    logits = torch.randn(8, 30, generator=torch.Generator().manual_seed(0))
    ids, logprobs = draw(logits, sampling(0.0, top_p=0.3, top_k=2), [0.5] * 8)
    assert torch.equal(ids, logits.argmax(-1))
    torch.testing.assert_close(logprobs, logits.log_softmax(-1).max(-1).values)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_give_no_logprob(temperature: float) -> None:
    logits = torch.zeros(2, 5)
    logits[0, 2] = float("nan")
    _, logprobs = draw(logits, sampling(temperature), [0.1, 0.1])
    assert logprobs.isnan().tolist() == [True, False]


@given(
    st.integers(0, 2**32),
    st.integers(1, 3000),
    st.one_of(st.just(0), st.integers(1, 3100)),
    st.one_of(st.just(1.0), st.floats(0.01, 0.999)),
    st.floats(0.05, 5.0),
)
def test_truncation_keeps_what_hugging_face_keeps(
    seed: int, vocabulary: int, top_k: int, top_p: float, scale: float
) -> None:
    """Flat and peaked rows, nuclei of one token and of nearly all."""
    # In double precision, where no two roundings of a sum lie on either side of top_p.
    logits = torch.randn(3, vocabulary, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * scale
    expected = logits
    if top_k:
        expected = TopKLogitsWarper(top_k)(torch.empty(0), expected)
    if top_p < 1:
        expected = TopPLogitsWarper(top_p)(torch.empty(0), expected)
    kept = truncate(logits, top_k, top_p)
    assert torch.equal(kept, expected)
    assert kept.isfinite().any(-1).all()


def test_equal_logits_are_kept_together() -> None:
    """bfloat16 logits are often equal; which of them comes first must not matter."""
    logits = torch.tensor([[3.0, 1.0, 2.0, 2.0, 2.0, 0.0]])
    for order in ([0, 1, 2, 3, 4, 5], [5, 4, 3, 2, 1, 0], [2, 0, 3, 5, 4, 1]):
        for kept in (truncate(logits[:, order], 2, 1.0), truncate(logits[:, order], 0, 0.6)):
            assert sorted(kept[kept.isfinite()].tolist()) == [2.0, 2.0, 2.0, 3.0]
