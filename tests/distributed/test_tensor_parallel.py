"""The parts of tensor parallelism on real ranks: the head over shards of the vocabulary, and what lies where."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode

from scripts.make_tiny_model import make_tiny_model
from tests.support.ranks import run_ranks
from tests.unit.model.test_logprobs import VOCAB, Largest, inputs, reference, with_gradients
from verl.flow.job import start_job
from verl.flow.placement import Groups, Placement, make_groups
from verl.model.heads import Head, HeadedModel
from verl.model.load import (
    hf_parameters,
    load_shards,
    local_box,
    local_tensor,
    materialise,
    meta_model,
    read_config,
    whole_tensor,
)
from verl.model.logprobs import VocabShard, token_logprobs
from verl.model.packing import Sequences, pack
from verl.parallel.parallelize import ParallelPlan, parallelize

pytestmark = pytest.mark.dist


def on_mesh(tp: int, world: int, work: Callable[..., Any], *arguments: Any) -> list[Any]:
    """`work(groups, *arguments)` on a mesh (1, world / tp, tp)."""
    return run_ranks(world, _on_mesh, tp, world, work, arguments)


def _on_mesh(tp: int, world: int, work: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    job = start_job(stage_timeout=300, check_program=False)
    groups = make_groups([Placement("actor", tuple(range(world)), tp)], job.rank, "cpu", job.timeout)["actor"]
    result = work(groups, *arguments)
    job.close()
    return result


# -- the head ----------------------------------------------------------------------------------------------------------


def sharded_head(
    groups: Groups, temperature: float, softcap: float | None, entropy: bool, chunk: int
) -> tuple[list[Tensor], int]:
    """(outputs, the gradient of `hidden` summed up, the gradient of this rank's rows; the most elements at once)"""
    hidden, weight, targets = inputs(tokens=64)
    tp = groups.mesh["tp"]
    rows = VOCAB // tp.size()
    first = tp.get_local_rank() * rows
    here = weight.detach()[first : first + rows].clone().requires_grad_()
    with Largest() as largest:
        outputs = token_logprobs(hidden, here, targets, temperature, chunk, softcap, VocabShard(tp.get_group(), first))
        *values, grad_hidden, grad_weight = with_gradients(outputs, hidden, here, entropy=entropy)
    dist.all_reduce(grad_hidden, group=tp.get_group())
    return [*(v.detach() for v in values), grad_hidden, grad_weight], largest.elements


@pytest.mark.parametrize("entropy", [True, False])
@pytest.mark.parametrize(("temperature", "softcap"), [(1.0, None), (0.7, 4.0)])
def test_log_probs_over_shards_of_the_vocabulary(temperature: float, softcap: float | None, entropy: bool) -> None:
    """Against log_softmax over the whole of it in float64; [tokens, vocabulary / ranks] never exists."""
    chunk = 20
    hidden, weight, targets = inputs(tokens=64)
    exact = [t.detach().double().requires_grad_() for t in (hidden, weight)]
    wanted = with_gradients(reference(*exact, targets, temperature, softcap), *exact, entropy=entropy)
    ranks = on_mesh(2, 2, sharded_head, temperature, softcap, entropy, chunk)
    (values, _), (others, _) = ranks
    for one, other in zip(values[:3], others[:3], strict=True):
        assert torch.equal(one, other)
    got = [*values[:3], torch.cat([values[3], others[3]])]
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=2e-5, atol=2e-5)
    for _, largest in ranks:
        assert largest <= max(chunk * VOCAB // 2, hidden.numel(), weight.numel() // 2)


def sharp_head(groups: Groups) -> list[Tensor]:
    hidden, weight, targets = inputs()
    tp = groups.mesh["tp"]
    first = tp.get_local_rank() * VOCAB // 2
    here = weight.detach()[first : first + VOCAB // 2].clone().requires_grad_()
    scaled = (hidden.detach() * 1e4).requires_grad_()
    shard = VocabShard(tp.get_group(), first)
    return [
        t.detach() for t in with_gradients(token_logprobs(scaled, here, targets, 1.0, 2, None, shard), scaled, here)
    ]


def test_large_logits_neither_overflow_nor_give_nan() -> None:
    for outputs in on_mesh(2, 2, sharp_head):
        assert all(t.isfinite().all() for t in outputs)
        assert outputs[1].abs().max() < 1e-3  # one token has all the probability


# -- where shards lie --------------------------------------------------------------------------------------------------


def split_model(groups: Groups, folder: Path, head: Head, dtype: torch.dtype = torch.float32) -> HeadedModel:
    model = meta_model(read_config(folder, False), head, torch.float32, "sdpa", 8, False)
    parallelize(model, groups.mesh, ParallelPlan(dtype, reshard_after_forward=False, activation_checkpointing=False))
    materialise(model, torch.device("cpu"))
    load_shards(model, folder, 0, lambda: None)
    return model


def boxes_and_values(groups: Groups, folder: Path, head: Head) -> dict[str, tuple[tuple[slice, ...], Tensor, Tensor]]:
    """By parameter: its box here, what lies there, and the whole as torch gathers it."""
    model = split_model(groups, folder, head)
    found = {}
    for name, parameter in hf_parameters(model):
        assert isinstance(parameter, DTensor)
        assert parameter.device_mesh.mesh_dim_names == ("shards", "tp")
        gathered = parameter.detach().full_tensor()
        assert torch.equal(whole_tensor(parameter.detach()), gathered), name
        found[name] = (local_box(parameter), local_tensor(parameter.detach()), gathered)
    return found


@pytest.mark.parametrize("head", [Head.lm, Head.token_value])
@pytest.mark.parametrize(("tp", "world"), [(2, 2), (4, 4), (2, 4), (2, 6)])
def test_each_rank_holds_what_its_box_says(tp: int, world: int, head: Head, tmp_path: Path) -> None:
    """Against the folder's tensors; three data-parallel ranks do not share rows out alike, and some get none."""
    folder = make_tiny_model(tmp_path, "qwen3", num_layers=1, num_kv_heads=1)
    stored = load_file(folder / "model.safetensors")
    ranks = on_mesh(tp, world, boxes_and_values, folder, head)
    for name in ranks[0]:
        whole = stored.get(name)
        pieces = [rank[name] for rank in ranks]
        if whole is None:
            assert name == "score.weight"
            whole = pieces[0][2]
        held = torch.zeros(whole.shape, dtype=torch.int64)
        for box, values, gathered in pieces:
            assert torch.equal(values, whole[box]), name
            assert torch.equal(gathered, whole), name
            held[box] += 1
        # every element somewhere, and as often as any other: ranks hold equal boxes or none in common
        assert held.min() == held.max() >= 1, name


def test_matrices_are_cut_and_small_vectors_are_not(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, "qwen2", num_layers=1)
    for rank in on_mesh(2, 2, boxes_and_values, folder, Head.lm):
        for name, (_, values, whole) in rank.items():
            cut = whole.numel() // values.numel()
            assert cut == (1 if "norm" in name else 2), name


# -- messages ----------------------------------------------------------------------------------------------------------


def count_messages(groups: Groups, folder: Path) -> tuple[int, int]:
    """(all-gathers, reduce-scatters) of activations in a forward pass of one layer"""
    model = split_model(groups, folder, Head.lm)
    ids = torch.arange(3, 11)
    batch = pack(Sequences((ids,), (1,), (7,), 1), [[0]], multiple_of=2)
    with torch.no_grad():
        model(batch, 1.0)  # gathers the parameters, which stay
        with CommDebugMode() as messages:
            model(batch, 1.0)
    counts = {str(op).split(".")[-1]: count for op, count in messages.get_comm_counts().items()}
    return counts.get("all_gather_into_tensor", 0), counts.get("reduce_scatter_tensor", 0)


def test_a_layer_gathers_twice_and_scatters_twice(tmp_path: Path) -> None:
    """Attention and MLP each; the embedding scatters once, and the head gathers once."""
    folder = make_tiny_model(tmp_path, num_layers=3)
    assert on_mesh(2, 2, count_messages, folder) == [(2 * 3 + 1, 2 * 3 + 1)] * 2


# -- bfloat16 ----------------------------------------------------------------------------------------------------------


def log_probs_in(groups: Groups, folder: Path, dtype: torch.dtype) -> Tensor:
    model = split_model(groups, folder, Head.lm, dtype)
    draws = torch.Generator().manual_seed(5)
    ids = tuple(torch.randint(3, 300, (n,), generator=draws) for n in (12, 7, 20))
    rows = Sequences(ids, (1,) * 3, tuple(len(i) - 1 for i in ids), 1)
    batch = pack(rows, [[0, 1], [2]], groups.mesh["tp"].size())
    with torch.no_grad():
        values = model(batch, 1.0).values
    return torch.zeros(rows.num_outputs).index_copy(0, batch.tokens, values)


def test_in_bfloat16_splitting_costs_no_more_than_bfloat16_itself(tmp_path: Path) -> None:
    """A rank rounds its part of a sum to bfloat16, and the sum of the parts again, where one process rounds once.

    A rounding is off by up to 2^-9. Of some 15 a layer in a row two, those behind attention and MLP, become three each
    with two ranks, so that the errors of two layers, which add up as their root does, grow from sqrt(30) to sqrt(34)
    roundings: by 7 %. Both are held against float32, with twice as much room for the luck of the draw.
    """
    folder = make_tiny_model(tmp_path, num_layers=2)
    exact = on_mesh(1, 1, log_probs_in, folder, torch.float32)[0]
    alone = on_mesh(1, 1, log_probs_in, folder, torch.bfloat16)[0]
    split = on_mesh(2, 2, log_probs_in, folder, torch.bfloat16)
    assert torch.equal(split[0], split[1])

    def error(logprobs: Tensor) -> float:
        return math.sqrt((logprobs - exact).square().mean())

    assert 1e-4 < error(alone) < 0.1
    assert error(split[0]) < 2 * 1.07 * error(alone)
