"""Llama-3-70B on 64 ranks without a single weight: every rank's part is made on the meta device, by the code of a run.

Each rank is played in turn, in a process group of torch's that sends nothing.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from itertools import combinations
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from tests.support.advice import job_of
from verl.advise.budget import budgets
from verl.advise.model import ModelShape, find_config, shape_of
from verl.config import PPOConfig
from verl.flow import placement
from verl.flow.placement import Groups, Placement, make_groups
from verl.model.heads import Head, HeadedModel
from verl.model.load import hf_parameters, local_box, local_tensor, meta_model
from verl.parallel.parallelize import ParallelPlan, parallelize
from verl.parallel.stages import cut, stage_units
from verl.reshard.boxes import node_domains, training_boxes
from verl.reshard.hybrid import Hybrid
from verl.reshard.layout import Box, Domain, Shards, intersect, volume
from verl.reshard.plan import plan

CONFIG = Path(__file__).parents[3] / "configs" / "models" / "llama_70b.json"
ROLE = "{devices: all, parallelism: {pipeline_parallel_size: 4, tensor_parallel_size: 8}}"
MESH = f"actor: {ROLE}\nrollout: {{devices: all, tensor_parallel_size: 8, backend: vllm}}"
NODES = ",".join(f"node{number}:8" for number in range(1, 9))
PLACE = Placement("actor", tuple(range(64)), tp=8, pp=4)
NODE_OF = {rank: f"node{rank // 8 + 1}" for rank in PLACE.ranks}
LIMIT = 60.0
"""Seconds of a processor for all of it: half a minute of one that others do not slow down."""

pytestmark = pytest.mark.timeout(600)


@dataclass(frozen=True)
class Built:
    """What the ranks have, and how long it took to find out."""

    boxes: Mapping[int, Mapping[str, Box]]
    """rank -> name -> part of the whole parameter"""
    sizes: Mapping[int, Mapping[str, tuple[int, ...]]]
    """rank -> name -> shape of the tensor that holds it"""
    seconds: float


@pytest.fixture(scope="module")
def model() -> ModelShape:
    return shape_of(find_config(str(CONFIG)), "llama_70b")


@pytest.fixture(scope="module")
def built() -> Built:
    """All 64 ranks."""
    began = time.process_time()
    whole = meta_model(find_config(str(CONFIG)), Head.lm, torch.float32, "sdpa", 512, trust_remote_code=False)
    stages = []
    for (units,) in stage_units(whole, PLACE.pp):
        stages.append(copy.deepcopy(whole))
        cut(stages[-1], units)
    boxes, sizes = {}, {}
    for rank in PLACE.ranks:
        part = copy.deepcopy(stages[PLACE.coordinate(rank).pp])
        boxes[rank], sizes[rank] = build(part, rank)
    return Built(boxes, sizes, time.process_time() - began)


def build(part: HeadedModel, rank: int) -> tuple[dict[str, Box], dict[str, tuple[int, ...]]]:
    """What a rank has of its stage, by name: boxes and shapes."""
    with playing(rank) as groups:
        parallelize(
            part, groups.mesh, ParallelPlan(torch.bfloat16, reshard_after_forward=False, activation_checkpointing=True)
        )
        parameters = dict(hf_parameters(part))
        assert all(parameter.is_meta for parameter in parameters.values())
        boxes = {name: tuple((side.start, side.stop) for side in local_box(p)) for name, p in parameters.items()}
        return boxes, {name: tuple(local_tensor(p).shape) for name, p in parameters.items()}


@contextmanager
def playing(rank: int) -> Iterator[Groups]:
    dist.init_process_group("fake", rank=rank, world_size=len(PLACE.ranks))
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(placement, "_new_group", fake_group)
            yield make_groups([PLACE], rank, "cpu", timedelta(minutes=1))[PLACE.role]
    finally:
        dist.destroy_process_group()
        _clear_sharding_prop_cache()  # results for this rank's mesh, which torch takes for those of the next one's


def fake_group(ranks: list[int], name: str, timeout: timedelta, backend: str | None) -> Any:
    """In place of gloo's, too."""
    return dist.new_group(list(ranks), backend="fake", sort_ranks=False, group_desc=name)


def test_all_ranks_together_have_every_parameter_exactly(built: Built, model: ModelShape) -> None:
    """Of the boxes that ranks hold of a parameter no two overlap, and together they have all of its elements."""
    held: dict[str, set[Box]] = {}
    for boxes in built.boxes.values():
        for name, box in boxes.items():
            held.setdefault(name, set()).add(box)
    assert held.keys() == model.shapes.keys()
    for name, different in held.items():
        assert sum(volume(box) for box in different) == prod(model.shapes[name]), name
        assert not any(intersect(*pair) for pair in combinations(different, 2)), name
    matrices = [name for name, shape in model.shapes.items() if len(shape) == 2]
    assert {len(held[name]) for name in matrices} == {2 * 8}
    assert {len(held[name]) for name in held.keys() - set(matrices)} == {2}  # norms are alike on tensor-parallel ranks


def test_a_tensor_is_as_large_as_its_part(built: Built) -> None:
    for rank, boxes in built.boxes.items():
        assert built.sizes[rank] == {name: tuple(high - low for low, high in box) for name, box in boxes.items()}


def test_every_stage_is_on_its_own_ranks(built: Built) -> None:
    """20 layers or so on each of four; all ranks of a stage have the same names."""
    stages = [{frozenset(built.boxes[rank]) for rank in range(16 * stage, 16 * stage + 16)} for stage in range(4)]
    assert [len(names) for names in stages] == [1] * 4
    layers = [len({name.split(".")[2] for name in names if ".layers." in name}) for (names,) in stages]
    assert sum(layers) == 80 and max(layers) - min(layers) <= 2
    assert ["model.embed_tokens.weight" in names for (names,) in stages] == [True, False, False, False]
    assert ["lm_head.weight" in names for (names,) in stages] == [False, False, False, True]


def test_what_a_rank_keeps_is_what_the_estimate_says(built: Built, model: ModelShape) -> None:
    """4 bytes a parameter and 8 of AdamW's, of the shards that are really there."""
    job = job_of(MESH, NODES)
    found = budgets(job, {"actor": model}, PPOConfig(), None)
    assert sorted(rank for budget in found for rank in budget.ranks) == list(PLACE.ranks)
    for budget in found:
        for rank in budget.ranks:
            numbers = sum(prod(shape) for shape in built.sizes[rank].values())
            assert budget.needs["actor"].stays == {"parameters": 4 * numbers, "optimizer": 8 * numbers}


def test_the_planner_knows_what_is_where(built: Built, model: ModelShape) -> None:
    """It reckons boxes from degrees alone; they are those of the tensors."""
    job = job_of(MESH, NODES)
    assert built.boxes == training_boxes(model.shapes, model.split(job.spec("actor"), PLACE.dp), PLACE.ranks)


def test_planning_the_weights_takes_seconds(built: Built, model: ModelShape) -> None:
    """To vLLM with eight tensor-parallel workers on each of eight nodes, and to generation in smaller replicas on the
    ranks themselves. The limit is for this and the building of all ranks.
    """
    shards = Shards(built.boxes, NODE_OF)
    split = model.split(job_of(MESH, NODES).spec("actor"), PLACE.dp)
    layouts: dict[str, list[Domain]] = {
        "vLLM, TP 8": node_domains(model.shapes, range(0, 64, 8), NODE_OF, slots=2),
        **{f"in process, TP {tg}": Hybrid(split, pg=1, tg=tg).domains(model.shapes, PLACE.ranks) for tg in (8, 2)},
    }
    total = built.seconds
    print(f"64 ranks in {built.seconds:.1f} s")
    for name, domains in layouts.items():
        began = time.process_time()
        transfers = plan(shards, domains, itemsize=2)
        seconds = time.process_time() - began
        print(f"{name}: {len(transfers)} transfers planned in {seconds:.1f} s")
        wanted = sum(volume(box) for domain in domains for box in domain.boxes.values())
        assert sum(transfer.size for transfer in transfers) == 2 * wanted
        total += seconds
    assert total < LIMIT
