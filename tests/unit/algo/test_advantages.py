from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from verl.algo.advantages import gae, grpo, rloo, whiten, whiten_moments

F64 = torch.float64
NAN, INF = math.nan, math.inf


def gae_of_tokens(rewards: list[float], values: list[float], gamma: float, lam: float) -> list[float]:
    """The definition: the sum of (gamma * lam)**i times the i-th next temporal-difference error."""
    nexts = [*values, 0.0][1:]
    errors = [r + gamma * v_next - v for r, v, v_next in zip(rewards, values, nexts, strict=True)]
    return [sum((gamma * lam) ** i * error for i, error in enumerate(errors[t:])) for t in range(len(errors))]


def random_rows(rows: int, time: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(rows, time, dtype=F64, generator=generator) for _ in range(2))


# GAE


def test_case_1_value_at_a_masked_place_has_no_influence():
    advantages, returns = gae(
        rewards=torch.tensor([[0.0, 1.0, 0.0]], dtype=F64),
        values=torch.tensor([[0.0, 0.0, 100.0]], dtype=F64),
        mask=torch.tensor([[1, 1, 0]]),
        gamma=1.0,
        lam=0.95,
    )
    torch.testing.assert_close(advantages, torch.tensor([[0.95, 1.0, 0.0]], dtype=F64), rtol=0, atol=1e-15)
    torch.testing.assert_close(returns, torch.tensor([[0.95, 1.0, 0.0]], dtype=F64), rtol=0, atol=1e-15)


def test_case_2_reward_on_a_masked_tail_token_is_kept():
    values, mask = torch.tensor([[0.5, 0.25, 7.0, 7.0]]), torch.tensor([[1, 1, 0, 0]])
    for place in (1, 2, 3):
        rewards = torch.zeros(1, 4).index_fill(1, torch.tensor([place]), 3.0)
        advantages, _ = gae(rewards, values, mask, gamma=1.0, lam=1.0)
        assert advantages.tolist() == [[2.5, 2.75, 0.0, 0.0]]


def test_case_4_row_as_long_as_the_batch_needs_no_end_token_and_padding_is_masked():
    """Lengths alone say what counts: the full row's end is its last token, the short row's padding is no part of it."""
    lengths = torch.tensor([3, 1])
    mask = torch.arange(3) < lengths[:, None]
    rewards = torch.tensor([[0.0, 0.0, 1.0], [1.0, 5.0, 0.0]])
    advantages, returns = gae(rewards, torch.zeros(2, 3), mask, gamma=0.5, lam=1.0)
    assert advantages.tolist() == [[0.25, 0.5, 1.0], [6.0, 0.0, 0.0]]  # 5 stood behind row 1's end and is kept
    assert torch.equal(advantages, returns)


def test_reward_at_masked_places_counts_at_the_last_trainable_token_before_it():
    mask = torch.tensor([[0, 0, 1, 0, 1, 0]])
    rewards = torch.tensor([[1.0, 2.0, 4.0, 8.0, 16.0, 32.0]])
    _, returns = gae(rewards, torch.zeros(1, 6), mask, gamma=0.0, lam=1.0)  # gamma 0: returns are the rewards
    assert returns.tolist() == [[0.0, 0.0, 1.0 + 2 + 4 + 8, 0.0, 16.0 + 32, 0.0]]


@pytest.mark.parametrize("bad_value", [NAN, INF, -INF, 1e30])
@pytest.mark.parametrize("bad_reward", [0.0, NAN])
def test_case_13_what_stands_at_masked_places_has_no_effect_on_gae(bad_value: float, bad_reward: float):
    rewards, values = random_rows(3, 7, seed=1)
    mask = torch.tensor([[1, 1, 0, 1, 1, 0, 0], [0, 1, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0, 0]]).bool()
    clean = gae(torch.where(mask, rewards, 0.0), values, mask, 0.9, 0.8)
    dirty = gae(torch.where(mask, rewards, bad_reward), torch.where(mask, values, bad_value), mask, 0.9, 0.8)
    assert all(torch.equal(a, b) for a, b in zip(clean, dirty, strict=True))
    assert clean[0][2].tolist() == [0.0] * 7


def test_case_14_rows_added_to_make_a_batch_divide_change_no_other_row():
    rewards, values = random_rows(2, 5, seed=2)
    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
    alone = gae(rewards, values, mask, 0.9, 0.8)
    dead = torch.full((2, 5), NAN, dtype=F64)
    filled = gae(torch.cat([rewards, dead]), torch.cat([values, dead]), torch.cat([mask, 0 * mask]), 0.9, 0.8)
    for a, b in zip(alone, filled, strict=True):
        assert torch.equal(a, b[:2])
        assert not b[2:].any()


@given(
    rows=st.lists(st.lists(st.booleans(), min_size=1, max_size=9), min_size=1, max_size=4),
    gamma=st.sampled_from([0.0, 0.9, 1.0]),
    lam=st.sampled_from([0.0, 0.95, 1.0]),
    seed=st.integers(0, 1000),
)
@settings(max_examples=100, deadline=None)
def test_gae_is_the_definition_on_the_trainable_tokens_alone(rows, gamma, lam, seed):
    time = max(map(len, rows))
    mask = torch.tensor([row + [False] * (time - len(row)) for row in rows])
    rewards, values = random_rows(len(rows), time, seed)
    rewards = rewards * mask
    advantages, returns = gae(rewards, values, mask, gamma, lam)
    assert not advantages[~mask].any() and not returns[~mask].any()
    for row in range(len(rows)):
        of_row = mask[row]
        expected = gae_of_tokens(rewards[row][of_row].tolist(), values[row][of_row].tolist(), gamma, lam)
        assert advantages[row][of_row].tolist() == pytest.approx(expected, rel=1e-12, abs=1e-12)
        torch.testing.assert_close(returns[row][of_row], advantages[row][of_row] + values[row][of_row])


def test_gae_with_lambda_1_gives_discounted_returns_and_with_lambda_0_one_step_errors():
    rewards, values, mask = torch.tensor([[1.0, 2.0, 4.0]]), torch.tensor([[0.5, 0.25, 8.0]]), torch.ones(1, 3)
    assert gae(rewards, values, mask, 0.5, 1.0)[1].tolist() == [[3.0, 4.0, 4.0]]
    assert gae(rewards, values, mask, 0.5, 0.0)[0].tolist() == [[1 + 0.125 - 0.5, 2 + 4 - 0.25, 4.0 - 8]]


@pytest.mark.parametrize(
    ("given", "worked_in"),
    [(torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.float64, torch.float64)],
)
def test_gae_works_in_float32_unless_given_float64(given: torch.dtype, worked_in: torch.dtype):
    advantages, returns = gae(torch.ones(1, 2), torch.ones(1, 2, dtype=given), torch.ones(1, 2), 1.0, 1.0)
    assert advantages.dtype == returns.dtype == worked_in


# Whitening


def whitened_whole(x: Tensor) -> Tensor:
    return (x - x.mean()) / torch.sqrt(x.var() + 1e-8)


QUARTERS = st.integers(-200, 200).map(lambda i: i / 4)  # no two of them so close that 1e-16 * mean**2 shows


@given(ranks=st.lists(st.lists(st.tuples(QUARTERS, st.booleans()), max_size=6), min_size=1, max_size=4))
@settings(max_examples=100, deadline=None)
def test_whitening_by_the_summed_moments_of_ranks_is_whitening_of_the_whole(ranks):
    xs = [torch.tensor([x for x, _ in rank], dtype=F64) for rank in ranks]
    weights = [torch.tensor([float(live) for _, live in rank]) for rank in ranks]
    moments = sum(whiten_moments(x, w) for x, w in zip(xs, weights, strict=True))
    whole, live = torch.cat(xs), torch.cat(weights).bool()
    whitened = torch.cat([whiten(x, moments) for x in xs])
    expected = whitened_whole(whole[live]) if live.sum() > 1 else whole[live]
    torch.testing.assert_close(whitened[live], expected, rtol=1e-9, atol=1e-9)


def test_case_7_one_valid_token_is_left_as_it_is():
    x = torch.tensor([NAN, 3.0, INF])
    weights = torch.tensor([0.0, 1.0, 0.0])
    assert whiten(x, whiten_moments(x, weights))[1].item() == 3.0


def test_case_7_no_valid_token_gives_no_nan():
    moments = whiten_moments(torch.tensor([NAN, 2.0]), torch.zeros(2))
    assert moments.tolist() == [0.0, 0.0, 0.0]
    assert whiten(torch.tensor([2.0]), moments).tolist() == [2.0]
    assert whiten_moments(torch.empty(0), torch.empty(0)).tolist() == [0.0, 0.0, 0.0]


def test_case_14_rows_of_weight_0_are_not_in_the_moments():
    x = torch.tensor([1.0, 2.0, 4.0])
    padded = torch.cat([x, torch.tensor([1000.0, NAN])])
    assert torch.equal(whiten_moments(padded, torch.tensor([1.0, 1, 1, 0, 0])), whiten_moments(x, torch.ones(3)))


def test_equal_advantages_are_whitened_to_0():
    x = torch.full((7,), 0.1, dtype=torch.float32)
    assert whiten(x, whiten_moments(x, torch.ones(7))).abs().max().item() < 1e-10


def test_whitening_keeps_the_dtype_and_computes_the_moments_in_float64():
    x = torch.randn(1000, generator=torch.Generator().manual_seed(3)) + 4096
    moments = whiten_moments(x, torch.ones(1000))
    whitened = whiten(x, moments)
    assert moments.dtype == F64 and whitened.dtype == torch.float32
    torch.testing.assert_close(whitened.double(), whitened_whole(x.double()), rtol=1e-6, atol=1e-6)


# Group baselines


def test_case_10_nan_sample_is_left_out_of_the_baseline_gets_0_and_is_counted():
    scores = torch.tensor([1.0, NAN, 3.0], dtype=F64)
    advantages, num_left_out = grpo(scores, 3, torch.ones(3), norm_by_std=True)
    expected = 1 / (math.sqrt(2) + 1e-6)
    assert advantages.tolist() == pytest.approx([-expected, 0.0, expected], rel=1e-15)
    assert num_left_out == 1
    assert grpo(scores, 3, torch.ones(3), norm_by_std=False).advantages.tolist() == [-1.0, 0.0, 1.0]
    assert rloo(scores, 3, torch.ones(3)).advantages.tolist() == [-2.0, 0.0, 2.0]


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_case_10_other_groups_do_not_notice_a_score_that_is_not_finite(bad: float):
    clean = grpo(torch.tensor([1.0, 2.0, 5.0, 7.0]), 2, torch.ones(4), True)
    dirty = grpo(torch.tensor([1.0, bad, 5.0, 7.0]), 2, torch.ones(4), True)
    assert torch.equal(clean.advantages[2:], dirty.advantages[2:])
    assert dirty.advantages[:2].tolist() == [0.0, 0.0]
    assert (clean.num_left_out, dirty.num_left_out) == (0, 1)


def test_case_14_dead_rows_are_in_no_baseline_and_a_nan_in_one_is_not_counted():
    weights = torch.tensor([1.0, 1, 0, 0, 0, 0])
    result = grpo(torch.tensor([1.0, 3.0, 100.0, NAN, NAN, 5.0]), 3, weights, norm_by_std=False)
    assert result.advantages.tolist() == [-1.0, 1.0, 0.0, 0.0, 0.0, 0.0]
    assert result.num_left_out == 0


def test_all_equal_float32_scores_get_exactly_0():
    """In float32 0.1 differs from its mean by 7e-9, which the division by a deviation of 1e-6 would turn into 0.007."""
    for n in (2, 3, 5, 7):
        for value in (0.1, 1 / 3, -12.7):
            assert not grpo(torch.full((n,), value), n, torch.ones(n), True).advantages.any()


def test_group_of_one_by_choice_has_no_baseline():
    scores = torch.tensor([2.0, -1.0], dtype=F64)
    assert grpo(scores, 1, torch.ones(2), False).advantages.tolist() == [2.0, -1.0]
    assert grpo(scores, 1, torch.ones(2), True).advantages.tolist() == pytest.approx([2.0, -1.0], rel=2e-6)
    assert rloo(scores, 1, torch.ones(2)).advantages.tolist() == [2.0, -1.0]


def test_row_that_is_left_alone_in_a_larger_group_gets_0():
    for result in (
        grpo(torch.tensor([NAN, 5.0]), 2, torch.ones(2), True),
        grpo(torch.tensor([NAN, 5.0]), 2, torch.ones(2), False),
        rloo(torch.tensor([NAN, 5.0]), 2, torch.ones(2)),
    ):
        assert result.advantages.tolist() == [0.0, 0.0]
        assert result.num_left_out == 1


@given(groups=st.lists(st.lists(st.floats(-10, 10), min_size=4, max_size=4), min_size=1, max_size=4))
@settings(max_examples=60, deadline=None)
def test_group_advantages_are_the_loop_over_groups(groups):
    scores = torch.tensor(groups, dtype=F64)
    ones = torch.ones(scores.numel())
    mean, std = scores.mean(1, keepdim=True), scores.std(1, keepdim=True)
    close = {"rtol": 1e-9, "atol": 1e-8}  # 1e-16 * 10 / 1e-6 where a group's scores are equal
    torch.testing.assert_close(
        grpo(scores.flatten(), 4, ones, True).advantages.view(-1, 4), (scores - mean) / (std + 1e-6), **close
    )
    torch.testing.assert_close(grpo(scores.flatten(), 4, ones, False).advantages.view(-1, 4), scores - mean, **close)
    others = torch.stack([scores[:, [j for j in range(4) if j != i]].mean(1) for i in range(4)], dim=1)
    torch.testing.assert_close(rloo(scores.flatten(), 4, ones).advantages.view(-1, 4), scores - others, **close)
