"""Weights from training shards into what engines read, on real ranks, again and again."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from tests.support.ranks import RankFailed, run_ranks
from verl.flow.job import Job, start_job
from verl.flow.placement import make_world_group
from verl.generation.vllm.buffer import WeightBuffer
from verl.reshard import execute
from verl.reshard.execute import WeightSync
from verl.reshard.layout import Box, Domain, Shards, whole

pytestmark = pytest.mark.dist

SHAPES: dict[str, tuple[int, ...]] = {"embed": (33, 8), "layer.weight": (8, 8), "layer.norm": (8,), "head": (1, 8)}
LOADS = 3


def weights(version: int) -> dict[str, Tensor]:
    """float32, with digits that bfloat16 has no room for, other ones in each version."""
    draws = torch.Generator().manual_seed(version)
    return {name: torch.randn(shape, generator=draws) for name, shape in SHAPES.items()}


def rows_of(ranks: tuple[int, ...], replicas: int = 1) -> dict[int, dict[str, Box]]:
    """Rows cut as FSDP cuts them over ranks // replicas parts; neighbours hold the same part."""
    parts = len(ranks) // replicas
    boxes: dict[int, dict[str, Box]] = {}
    for i, rank in enumerate(ranks):
        boxes[rank] = {}
        for name, (size, *rest) in SHAPES.items():
            step = -(-size // parts)
            low = min(i // replicas * step, size)
            boxes[rank][name] = ((low, min(low + step, size)), *whole(tuple(rest)))
    return boxes


@dataclass(frozen=True)
class Setup:
    """Four ranks, two on each node."""

    trained: dict[int, dict[str, Box]]
    readers: dict[str, tuple[int, ...]]
    """By domain."""
    shared: bool
    dtype: torch.dtype = torch.bfloat16

    @property
    def nodes(self) -> dict[int, str]:
        return {0: "a", 1: "a", 2: "b", 3: "b"}

    @property
    def domains(self) -> list[Domain]:
        members = {"node a": (0, 1), "node b": (2, 3)} if self.shared else self.readers
        boxes = {name: whole(shape) for name, shape in SHAPES.items()}
        return [Domain(name, members[name], readers, boxes) for name, readers in self.readers.items()]


OWN = {f"rank {r}": (r,) for r in range(4)}
SETUPS = {
    "own memory, colocated": Setup(rows_of((0, 1, 2, 3)), OWN, shared=False),
    "own memory, replicas, descending": Setup(rows_of((3, 2, 1, 0), replicas=2), OWN, shared=False),
    "own memory, disjoint": Setup(rows_of((2, 0)), {"rank 1": (1,), "rank 3": (3,)}, shared=False),
    "nodes' memory, colocated": Setup(rows_of((0, 1, 2, 3)), {"node a": (0, 1), "node b": (3, 2)}, shared=True),
    "nodes' memory, trained on one": Setup(rows_of((1, 0)), {"node a": (1,), "node b": (2, 3)}, shared=True),
    "in float32": Setup(rows_of((0, 1, 2)), {"node b": (2,)}, shared=True, dtype=torch.float32),
}


def memory(setup: Setup, job: Job) -> dict[str, dict[str, Tensor]]:
    """The domains' memory that this rank writes or reads: shared by a node, or its own."""
    layout = [(name, shape, setup.dtype) for name, shape in SHAPES.items()]
    makers = {domain.name: domain.readers[0] for domain in setup.domains}
    made = {name: WeightBuffer(layout) for name, maker in makers.items() if maker == job.rank}
    paths = job.everywhere({name: buffer.path for name, buffer in made.items()})
    mine = {}
    for domain in setup.domains:
        if job.rank in domain.members:
            buffer = made.get(domain.name) or WeightBuffer.open(paths[makers[domain.name]][domain.name], layout)
            mine[domain.name] = buffer.tensors()
    return mine


def make_sync(setup: Setup, job: Job) -> WeightSync:
    group = make_world_group("weights", job.timeout)
    shards = Shards(setup.trained, setup.nodes)
    return WeightSync(job.rank, shards, setup.domains, setup.dtype, group, job.board)


def sources(setup: Setup, rank: int, version: int) -> dict[str, Tensor]:
    whole_ones = weights(version)
    boxes = setup.trained.get(rank, {})
    return {name: whole_ones[name][tuple(slice(*side) for side in box)].clone() for name, box in boxes.items()}


def check(read: dict[str, dict[str, Tensor]], setup: Setup, version: int) -> None:
    for tensors in read.values():
        for name, wanted in weights(version).items():
            assert torch.equal(tensors[name], wanted.to(setup.dtype)), (version, name)


def load_again_and_again(setup: Setup) -> tuple[int, int, int]:
    """(loads that this rank read, bytes that it sent, bytes that it wrote itself, each load)"""
    job = start_job(stage_timeout=30, check_program=False)
    targets, sync = memory(setup, job), make_sync(setup, job)
    reads = []
    for version in range(LOADS):
        sync.run(sources(setup, job.rank, version), targets, lambda v=version: reads.append(check(targets, setup, v)))
    sync.close()
    job.close()
    return len(reads), sync.traffic.wire, sync.traffic.local


def missing(setup: Setup) -> int:
    """Elements that no member of a domain trains, over all domains: they must come over the wire."""
    total = 0
    for domain in setup.domains:
        for name, shape in SHAPES.items():
            held = torch.zeros(shape, dtype=torch.bool)
            for rank in domain.members:
                if rank in setup.trained:
                    held[tuple(slice(*side) for side in setup.trained[rank][name])] = True
            total += int((~held).sum())
    return total


@pytest.mark.parametrize("bucket", [None, 100], ids=["one round", "rounds of 100 bytes"])
@pytest.mark.parametrize("name", SETUPS)
def test_engines_read_every_version(name: str, bucket: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    setup = SETUPS[name]
    if bucket is not None:
        monkeypatch.setattr(execute, "BUCKET_BYTES", bucket)
    results = run_ranks(4, load_again_and_again, setup)
    readers = {rank for ranks in setup.readers.values() for rank in ranks}
    assert [reads for reads, _, _ in results] == [LOADS if rank in readers else 0 for rank in range(4)]
    size = setup.dtype.itemsize
    assert sum(wire for _, wire, _ in results) == missing(setup) * size
    everything = len(setup.domains) * sum(torch.Size(shape).numel() for shape in SHAPES.values()) * size
    assert sum(wire + local for _, wire, local in results) == everything


def test_buckets_of_the_messages_above_take_several_rounds() -> None:
    """So that the parametrisation above means something."""
    setup = SETUPS["nodes' memory, trained on one"]
    transfers = execute.plan(Shards(setup.trained, setup.nodes), setup.domains, 2)
    assert len(execute.buckets(transfers, 100)) > 1 == len(execute.buckets(transfers, execute.BUCKET_BYTES))


def read_slowly(setup: Setup, slow: int) -> None:
    """The slow reader looks at its memory for a while; it must stay the version that it was told to read."""
    job = start_job(stage_timeout=30, check_program=False)
    targets, sync = memory(setup, job), make_sync(setup, job)

    def read(version: int) -> None:
        end = time.monotonic() + (0.4 if job.rank == slow else 0)
        check(targets, setup, version)
        while time.monotonic() < end:
            check(targets, setup, version)
            time.sleep(0.02)
        check(targets, setup, version)

    for version in range(LOADS):
        sync.run(sources(setup, job.rank, version), targets, lambda v=version: read(v))
    sync.close()
    job.close()


@pytest.mark.parametrize("slow", [2, 3])
def test_memory_is_not_written_while_a_reader_still_reads_it(slow: int) -> None:
    """Rank 2 receives for its node; rank 3 only reads what rank 2 writes."""
    run_ranks(4, read_slowly, SETUPS["nodes' memory, trained on one"], slow)


def hang(setup: Setup, where: str) -> None:
    job = start_job(stage_timeout=2, check_program=False)
    targets, sync = memory(setup, job), make_sync(setup, job)
    job.board.at("reshard")
    if job.rank == 3:
        job.board.timeout = 100  # the others are to find it
        time.sleep(100 if where == "before" else 0)
    for version in range(2):
        sync.run(
            sources(setup, job.rank, version),
            targets,
            lambda: time.sleep(100 if where == "reading" and job.rank == 3 else 0),
        )
    job.close()


@pytest.mark.parametrize("where", ["before", "reading"])
@pytest.mark.parametrize("name", ["own memory, disjoint", "nodes' memory, trained on one"])
def test_the_rank_that_holds_the_weights_up_is_named(name: str, where: str, capfd: pytest.CaptureFixture[str]) -> None:
    """Others only send to rank 3, or tell it that it may read, and wait until it has taken or heard that."""
    with pytest.raises(RankFailed):
        run_ranks(4, hang, SETUPS[name], where)
    assert set(re.findall(r"rank (\d) has shown no sign of life", capfd.readouterr().err)) == {"3"}
