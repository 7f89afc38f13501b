"""Generation on the actor's ranks: the paper's groups, and its formulas of volume, peak and redundancy in bytes.

Expected values: HybridFlow (arXiv:2409.19256), figure 8 and table 2, with a model whose every tensor is cut evenly, so
that its M bytes split without a rest.
"""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest

from scripts.make_tiny_model import make_tiny_model
from verl.flow.placement import Placement
from verl.flow.regroup import generation_order
from verl.model.load import read_config
from verl.reshard.boxes import (
    Split,
    boxes_at,
    coordinate,
    generation_domains,
    own_domains,
    tensor_parallel_dims,
    training_boxes,
)
from verl.reshard.hybrid import Hybrid
from verl.reshard.layout import Domain, Shards, intersect, volume, whole
from verl.reshard.plan import PlannedBytes, plan, planned_bytes

ITEMSIZE = 2
LAYERS = 8
SHAPES = {f"layers.{i}.{name}": (64, 64) for i in range(LAYERS) for name in ("column", "row")}
TP_DIMS = {name: 1 if name.endswith("row") else 0 for name in SHAPES}
M = len(SHAPES) * 64 * 64 * ITEMSIZE


def split(p: int, t: int, d: int, fsdp: bool = False) -> Split:
    stages = {name: (int(name.split(".")[1]) * p // LAYERS,) for name in SHAPES}
    return Split(p, d, t, TP_DIMS, stages, fsdp)


def bill(training: Split, domains: list[Domain]) -> PlannedBytes:
    ranks = range(training.pp * training.tp * training.dp)
    nodes = dict.fromkeys(ranks, "a")
    return planned_bytes(plan(Shards(training_boxes(SHAPES, training, ranks), nodes), domains, ITEMSIZE), nodes)


CASES = [
    (p, t, d, pg, tg)
    for p, t, d, pg, tg in product((1, 2, 4), (1, 2, 4, 8), (1, 2), (1, 2, 4), (1, 2, 4, 8))
    if p % pg == 0 and t % tg == 0 and p * t * d <= 32
]


def test_the_papers_groups() -> None:
    """Training 1-4-2, generation with TP 2, on GPUs 1 to 8."""
    hybrid, ranks = Hybrid(split(1, 4, 2), pg=1, tg=2), range(1, 9)
    assert hybrid.tensor_parallel_groups(ranks) == [(1, 3), (2, 4), (5, 7), (6, 8)]
    assert hybrid.micro_groups(ranks) == [(1, 2), (3, 4), (5, 6), (7, 8)]


def test_a_runs_rollout_is_grouped_so(tmp_path: Path) -> None:
    """On the actor's ranks with the torch backend: the same ranks hold the same boxes."""
    config = read_config(make_tiny_model(tmp_path, num_layers=4), trust_remote_code=False)
    shapes = {"model.embed_tokens.weight": (320, 64), "model.norm.weight": (64,)}
    for layer in range(4):
        shapes[f"model.layers.{layer}.self_attn.k_proj.weight"] = (128, 64)
        shapes[f"model.layers.{layer}.mlp.down_proj.weight"] = (64, 128)
    stages = {name: (int(name.split(".")[2]) // 2,) for name in shapes if "layers" in name}
    ranks = (5, 4, 9, 8, 1, 0, 3, 2)
    training = Split(2, 1, 4, tensor_parallel_dims(shapes, config, 4), stages)
    order = generation_order(Placement("actor", ranks, tp=4, pp=2), 2)
    made = generation_domains(shapes, config, Placement("rollout", order, tp=2, leaders_only=True))
    wanted = Hybrid(training, pg=1, tg=2).domains(shapes, ranks)
    assert {d.readers: d.boxes for d in made} == {d.readers: d.boxes for d in wanted}
    held = training_boxes(shapes, training, ranks)
    for domain in made:
        for name, box in held[domain.readers[0]].items():
            assert intersect(box, domain.boxes[name]) == box, "what a rank trains, it generates with"


@pytest.mark.parametrize("p, t, d, pg, tg", CASES)
def test_a_rank_receives_what_the_formula_says(p: int, t: int, d: int, pg: int, tg: int) -> None:
    """(tp - tg pg) / (tg pg tp) M, with tp = t p; it peaks at M / (tg pg), and nothing of it is a second copy."""
    training, hybrid = split(p, t, d), Hybrid(split(p, t, d), pg, tg)
    domains = hybrid.domains(SHAPES, range(p * t * d))
    moved, tp = bill(training, domains), t * p
    volume_per_gpu = (tp - tg * pg) * M // (tg * pg * tp)
    assert moved.received == dict.fromkeys(range(p * t * d), volume_per_gpu)
    for rank, domain in enumerate(domains):
        peak = sum(volume(box) for box in domain.boxes.values()) * ITEMSIZE
        assert peak == M // (tg * pg)
        shard = boxes_at(SHAPES, training, coordinate(training, rank))
        assert all(intersect(box, domain.boxes[name]) == box for name, box in shard.items()), "no redundancy"
        assert peak - volume_per_gpu == sum(map(volume, shard.values())) * ITEMSIZE


@pytest.mark.parametrize("p, t, d", sorted({case[:3] for case in CASES}))
def test_the_other_columns_of_the_table(p: int, t: int, d: int) -> None:
    """HybridFlow-V gathers whole models within a training replica: (tp - 1) / tp M. DeepSpeed-Chat, which trains with
    every parameter sharded over all ranks, gathers them there: (tpd - 1) / (tpd) M. Both peak at M.
    """
    ranks = range(p * t * d)
    model = {name: whole(shape) for name, shape in SHAPES.items()}
    everything = own_domains(dict.fromkeys(ranks, model))
    vanilla = bill(split(p, t, d), everything)
    assert vanilla.received == dict.fromkeys(ranks, M * (t * p - 1) // (t * p))
    sharded = bill(Split(dp=t * p * d), everything)
    assert sharded.received == dict.fromkeys(ranks, M * (t * p * d - 1) // (t * p * d))


@pytest.mark.parametrize("tg, share", [(1, 0.875), (2, 0.375), (4, 0.125), (8, 0.0)])
def test_the_papers_example_of_eight_ranks(tg: int, share: float) -> None:
    """Training 1-8-2."""
    moved = bill(split(1, 8, 2), Hybrid(split(1, 8, 2), 1, tg).domains(SHAPES, range(16)))
    assert set(moved.received.values()) == {int(share * M)}


@pytest.mark.parametrize("p, t, d, pg, tg", [case for case in CASES if case[2] == 2])
def test_with_fsdp_a_rank_receives_what_its_smaller_shard_lacks(p: int, t: int, d: int, pg: int, tg: int) -> None:
    """M / (tg pg) - M / (t p f): our data-parallel ranks share each shard out among themselves."""
    training, hybrid = split(p, t, d, fsdp=True), Hybrid(split(p, t, d, fsdp=True), pg, tg)
    moved = bill(training, hybrid.domains(SHAPES, range(p * t * d)))
    assert moved.received == dict.fromkeys(range(p * t * d), M // (tg * pg) - M // (t * p * d))


def test_consecutive_groups_would_move_more() -> None:
    """1-4-2 with TP peers that are neighbours: ranks 2, 3, 6 and 7 (from 1) could keep nothing of what they train."""
    training = split(1, 4, 2)
    boxes = {
        rank: boxes_at(SHAPES, Split(tp=2, tp_dims=TP_DIMS), coordinate(Split(tp=2), rank % 2)) for rank in range(8)
    }
    moved = bill(training, own_domains(boxes))
    assert [rank + 1 for rank, size in moved.received.items() if size == M // 2] == [2, 3, 6, 7]
    ours = bill(training, Hybrid(training, 1, 2).domains(SHAPES, range(8)))
    assert (moved.wire, ours.wire) == (4 * M // 2 + 4 * M // 4, 8 * M // 4)


@pytest.mark.parametrize("pg, tg", [(1, 3), (3, 1), (1, 8)])
def test_sizes_that_do_not_divide_are_refused(pg: int, tg: int) -> None:
    with pytest.raises(ValueError, match=rf"generation on {pg} stages x {tg} .* training on 2 x 4"):
        Hybrid(split(2, 4, 1), pg, tg)
