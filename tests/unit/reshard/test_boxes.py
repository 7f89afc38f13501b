"""Boxes that are worked out from a split, against those of models that are really split, on a fake process group."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import PretrainedConfig

from scripts.make_tiny_model import make_tiny_model
from tests.support.ranks import run_ranks
from verl.flow.placement import AXES, Placement
from verl.model.heads import Head, HeadedModel
from verl.model.load import hf_parameters, local_box, meta_model, read_config
from verl.parallel.parallelize import ParallelPlan, parallelize
from verl.reshard.boxes import Split, coordinate, node_domains, tensor_parallel_dims, training_boxes
from verl.reshard.layout import Box, volume, whole


@contextmanager
def fake_job(rank: int, world: int) -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()


def real_boxes(config: PretrainedConfig, sizes: tuple[int, int, int], copies: int, rank: int) -> dict[str, Box]:
    """What rank `rank` of a (pp, dp, tp) mesh gets from `parallelize`. In a process of its own, since torch remembers
    meshes, and who it was in them.
    """
    pp, dp, tp = sizes
    ranks, names = torch.arange(pp * dp * tp).view(pp, copies, dp // copies, tp), AXES
    if copies == 1:
        ranks, names = ranks[:, 0], ("pp", "shards", "tp")
    with fake_job(rank, pp * dp * tp):
        mesh = DeviceMesh("cpu", ranks, mesh_dim_names=names)
        model = meta(config)
        parallelize(model, mesh, ParallelPlan(torch.float32, False, False))
        return {name: tuple((s.start, s.stop) for s in local_box(p)) for name, p in hf_parameters(model)}


def meta(config: PretrainedConfig) -> HeadedModel:
    return meta_model(config, Head.lm, torch.float32, "sdpa", 8, False)


SIZES = [(1, 1, 1), (1, 2, 1), (1, 3, 1), (1, 8, 1), (1, 1, 2), (1, 2, 2), (1, 3, 2), (1, 1, 4), (1, 2, 4)]


CASES = [
    *(("qwen3", sizes, 1) for sizes in SIZES),
    ("qwen2", (1, 2, 2), 1),
    ("llama", (1, 2, 4), 1),
    ("qwen3", (1, 6, 1), 2),
    ("qwen3", (1, 4, 2), 2),
    ("llama", (1, 2, 2), 2),
]


@pytest.mark.parametrize(
    "architecture, sizes, copies",
    CASES,
    ids=lambda value: "x".join(map(str, value)) if isinstance(value, tuple) else str(value),
)
def test_boxes_are_those_of_the_split_model(
    architecture: str, sizes: tuple[int, int, int], copies: int, tmp_path: Path
) -> None:
    config = read_config(make_tiny_model(tmp_path, architecture, num_layers=2), trust_remote_code=False)
    shapes = {name: tuple(p.shape) for name, p in hf_parameters(meta(config))}
    split = Split(*sizes, tp_dims=tensor_parallel_dims(shapes, config, sizes[2]), copies=copies)
    world = sizes[0] * sizes[1] * sizes[2]
    boxes = training_boxes(shapes, split, range(world))
    for rank in {0, world // 2, world - 1}:
        (real,) = run_ranks(1, real_boxes, config, sizes, copies, rank)
        assert real.keys() == boxes[rank].keys()
        wrong = {n: (boxes[rank][n], box) for n, box in real.items() if not _same(boxes[rank][n], box)}
        assert not wrong


def _same(one: Box, other: Box) -> bool:
    """Empty boxes are where they are."""
    return one == other or volume(one) == volume(other) == 0


def test_coordinates_are_the_placements() -> None:
    place = Placement("actor", tuple(range(100, 124)), tp=3, pp=2)
    split = Split(pp=2, dp=4, tp=3)
    assert [coordinate(split, i) for i in range(24)] == [place.coordinate(rank) for rank in place.ranks]


def test_stages_and_replicas() -> None:
    shapes = {"embed": (8, 2), "first": (4, 4), "last": (4, 4), "norm": (4,)}
    split = Split(pp=2, dp=2, tp=1, stages={"embed": (0, 1), "first": (0,), "last": (1,), "norm": (1,)}, fsdp=False)
    boxes = training_boxes(shapes, split, [5, 6, 7, 8])
    assert [sorted(boxes[rank]) for rank in (5, 6, 7, 8)] == [["embed", "first"]] * 2 + [["embed", "last", "norm"]] * 2
    assert boxes[8]["last"] == whole((4, 4))


def test_copies_are_on_neighbouring_ranks() -> None:
    boxes = training_boxes({"w": (4, 2)}, Split(dp=4, copies=2), [7, 5, 1, 3])
    assert {rank: box["w"] for rank, box in boxes.items()} == {
        7: ((0, 2), (0, 2)),
        5: ((2, 4), (0, 2)),
        1: ((0, 2), (0, 2)),
        3: ((2, 4), (0, 2)),
    }


def test_a_nodes_memory_is_written_by_all_of_its_ranks_and_read_by_its_leaders() -> None:
    nodes = {0: "a", 1: "a", 2: "b", 3: "b", 4: "c"}
    domains = node_domains({"w": (2, 3)}, [3, 0, 2], nodes, slots=2)
    assert [(d.name, d.members, d.readers) for d in domains] == [("node b", (2, 3), (3, 2)), ("node a", (0, 1), (0,))]
    assert all(d.boxes == {"w": ((0, 2), (0, 3))} and d.slots == 2 for d in domains)
