import json
import math
from fractions import Fraction
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from verl.monitor.metrics import Metrics
from verl.monitor.names import throughput

whole_numbers = st.integers(-(2**20), 2**20).map(float)
rows = st.lists(st.tuples(whole_numbers, st.integers(0, 3).map(float)), min_size=1, max_size=12)


def record(chunk: list[tuple[float, float]]) -> Metrics:
    values = torch.tensor([value for value, _ in chunk], dtype=torch.float64)
    weights = torch.tensor([weight for _, weight in chunk], dtype=torch.float64)
    metrics = Metrics()
    metrics.mean("actor/pg_loss", values, weights)
    metrics.spread("critic/score", values, weights)
    if chunk:
        metrics.total("perf/total_num_tokens", values)
        metrics.max("timing_s/gen", values)
    return metrics


@given(rows, st.lists(st.integers(0, 12), max_size=4))
def test_any_split_equals_the_whole(chunk, cuts):
    """On whole numbers float64 is exact, so equal means equal; expected values are exact fractions."""
    edges = [0, *sorted(cut for cut in cuts if cut <= len(chunk)), len(chunk)]
    merged = Metrics.merge([record(chunk[a:b]) for a, b in pairwise(edges)]).result()
    live = [(value, weight) for value, weight in chunk if weight]
    expected = {
        "perf/total_num_tokens": math.fsum(value for value, _ in chunk),
        "timing_s/gen": max(value for value, _ in chunk),
    }
    if live:
        weight = sum(Fraction(w) for _, w in live)
        mean = float(sum(Fraction(v) * Fraction(w) for v, w in live)) / float(weight)
        expected |= {"actor/pg_loss": mean, "critic/score/mean": mean}
        expected |= {"critic/score/max": max(v for v, _ in live), "critic/score/min": min(v for v, _ in live)}
    assert merged == expected


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=40), st.integers(0, 40))
def test_real_numbers_agree_to_float64_rounding(values, cut):
    parts = [Metrics(), Metrics()]
    for part, chunk in zip(parts, (values[:cut], values[cut:]), strict=True):
        part.mean("x", torch.tensor(chunk, dtype=torch.float64))
    scale = math.fsum(map(abs, values)) / len(values)
    assert abs((parts[0] | parts[1]).result()["x"] - math.fsum(values) / len(values)) <= 1e-14 * scale * len(values)


@given(st.lists(rows, min_size=1, max_size=4))
def test_the_same_parts_in_the_same_order_give_the_same_bytes(chunks):
    assert Metrics.merge(map(record, chunks)).to_json() == Metrics.merge(map(record, chunks)).to_json()


def test_rows_of_weight_zero_leave_no_trace():
    values = torch.tensor([1.0, math.nan, 3.0, math.inf])
    weights = torch.tensor([1.0, 0.0, 1.0, 0.0])
    metrics = Metrics()
    metrics.spread("critic/score", values, weights)
    metrics.mean("actor/entropy", values, weights.bool())
    metrics.mean("dead", values, torch.zeros(4))
    metrics.spread("none", torch.empty(0))
    assert metrics.result() == {
        "actor/entropy": 2.0,
        "critic/score/mean": 2.0,
        "critic/score/max": 3.0,
        "critic/score/min": 1.0,
    }
    assert b"dead" not in metrics.to_json() and b"none" not in metrics.to_json()


def test_a_nan_with_weight_is_seen_wherever_it_stands():
    for order in ([math.nan, 1.0], [1.0, math.nan]):
        metrics = Metrics()
        for value in order:
            metrics.max("actor/grad_norm", value)
            metrics.mean("actor/pg_loss", value)
        assert all(map(math.isnan, metrics.result().values()))
        assert all(map(math.isnan, Metrics.from_json(metrics.to_json()).result().values()))


def test_a_mean_of_unequal_micro_batches_is_that_of_the_whole():
    """Token losses 3 x 1.0 and 1 x 2.0: the mean is 1.25, not the mean of means 1.5."""
    metrics = Metrics()
    metrics.mean("actor/pg_loss", torch.tensor([1.0, 1.0, 1.0]))
    metrics.mean("actor/pg_loss", torch.tensor([2.0]))
    assert metrics.result() == {"actor/pg_loss": 1.25}


def test_sums_are_float64():
    """In float32 2^24 + 1 is 2^24; and a Python float keeps its 53 bits."""
    metrics = Metrics()
    metrics.total("tokens", torch.tensor([2.0**24, 1.0], dtype=torch.float32))
    metrics.total("half", torch.full((3000,), 1.0, dtype=torch.bfloat16))
    metrics.last("actor/lr", 0.1)
    assert metrics.result() == {"tokens": 2.0**24 + 1, "half": 3000.0, "actor/lr": 0.1}


def test_weights_broadcast_and_gradients_are_let_go():
    values = torch.tensor([[1.0, 2.0], [3.0, 4.0]], requires_grad=True)
    metrics = Metrics()
    metrics.mean("x", values, torch.tensor([[1.0], [0.0]]))
    assert metrics.result() == {"x": 1.5}


def test_last_is_the_rightmost_and_operands_are_left_alone():
    a, b = Metrics(), Metrics()
    a.last("actor/lr", 1e-6)
    b.last("actor/lr", 5e-7)
    a.total("n", 1)
    b.total("n", 2)
    assert (a | b).result() == {"actor/lr": 5e-7, "n": 3.0}
    assert (b | a).result()["actor/lr"] == 1e-6
    assert a.result() == {"actor/lr": 1e-6, "n": 1.0} and b.result() == {"actor/lr": 5e-7, "n": 2.0}


@given(st.lists(st.floats(allow_nan=False), min_size=1, max_size=5))
def test_json_is_lossless(values):
    metrics = Metrics()
    for i, value in enumerate(values):
        metrics.total(f"total/{i}", value)
        metrics.last(f"last/{i}", value)
        metrics.spread(f"spread/{i}", value, weights=0.5)
    again = Metrics.from_json(metrics.to_json())
    assert repr(again.result()) == repr(metrics.result())
    assert again.to_json() == metrics.to_json()


def test_a_name_has_one_kind():
    metrics = Metrics()
    metrics.mean("x", 1.0)
    with pytest.raises(AssertionError, match="x is recorded as mean and as total"):
        metrics.total("x", 1.0)


def test_json_holds_names_as_they_are():
    metrics = Metrics()
    metrics.mean("critic/vf_loss", 2.0)
    assert json.loads(metrics.to_json()) == {"critic/vf_loss": ["mean", [2.0, 1.0, 2.0, 2.0]]}


def test_throughput():
    """12,000 tokens in 60 samples take 4 s on 8 devices."""
    assert throughput(12_000, 60, 4.0, 8) == {
        "perf/total_num_tokens": 12_000,
        "perf/time_per_step": 4.0,
        "perf/tokens_per_s": 3_000.0,
        "perf/samples_per_s": 15.0,
        "perf/throughput": 375.0,
    }
