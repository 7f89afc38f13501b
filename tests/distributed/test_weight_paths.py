"""The ways of vLLM's own weight transfer, on real ranks: what engines find in every bucket, again and again.

Host memory stands in for the devices', gloo for NCCL, and a process that only reads for the engine.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.host_transfer import HostDevice
from tests.support.ranks import RankFailed, run_ranks
from tests.support.reading_entry import LATE, digest
from verl.flow.job import Job, start_job
from verl.flow.placement import Placement, make_groups, make_world_group
from verl.generation.vllm import engine as engine_module
from verl.generation.vllm.child import Child
from verl.generation.vllm.delivery import WeightTransfer
from verl.generation.vllm.engine import VllmEngine
from verl.generation.vllm.options import VllmOptions
from verl.generation.vllm.tree import session_members
from verl.reshard.boxes import Split, training_boxes
from verl.reshard.buckets import cut_buckets
from verl.reshard.execute import Reader, Target, WeightSync
from verl.reshard.layout import Shards
from verl.roles import weight_paths
from verl.roles.weight_paths import WeightPath, make_path

pytestmark = pytest.mark.dist

WORLD = 4
SHAPES = {f"layers.{number}.mlp.{part}": (8, 4 + number) for number in range(4) for part in ("up", "down")} | {
    "head": (3,)
}
DTYPE = torch.bfloat16
BUCKETS = cut_buckets(SHAPES, DTYPE.itemsize, 1)
"""One for each block: an odd number, so that the last one of a load lies where the first of the next one will."""
LOADS = 3


@dataclass(frozen=True)
class Case:
    by: WeightTransfer
    actor: tuple[int, ...]
    rollout: tuple[int, ...]
    tp: int = 1

    @property
    def leaders(self) -> tuple[int, ...]:
        return self.rollout[:: self.tp]


COLOCATED = Case(WeightTransfer.ipc, (0, 1, 2, 3), (0, 1, 2, 3), 2)
APART = Case(WeightTransfer.nccl, (0, 1), (2, 3))


def weights(version: int) -> dict[str, Tensor]:
    draws = torch.Generator().manual_seed(version)
    return {name: torch.randn(shape, generator=draws) for name, shape in SHAPES.items()}


def expected(version: int) -> list[str]:
    """Of each bucket, its tensors in the engine's dtype one behind the other."""
    whole = weights(version)
    return [
        digest(torch.cat([whole[name].to(DTYPE).flatten() for name in bucket]).view(torch.uint8)) for bucket in BUCKETS
    ]


def late(target: Target) -> Target:
    """A rank that is slower to write its own part of a bucket than an engine is to read."""

    def wait(bucket: int) -> Mapping[str, Tensor]:
        time.sleep(2 * LATE)
        return target(bucket)

    return wait


class DiesWithin:
    """A reader whose rank is killed when it has a bucket of the second load."""

    def __init__(self, inner: Reader) -> None:
        self._inner, self._loads = inner, 0

    def begin_load(self) -> None:
        self._loads += 1
        self._inner.begin_load()

    def take_bucket(self, number: int) -> None:
        if (self._loads, number) == (2, 2):
            os.kill(os.getpid(), signal.SIGKILL)
        self._inner.take_bucket(number)

    def await_bucket(self) -> None:
        self._inner.await_bucket()


def run_case(case: Case, folder: Path, dies: int | None = None) -> None:
    """On every rank."""
    job = start_job(300, check_program=False)
    path = _make_path(case, job)
    engine = _start_engine(case, path, folder, job)
    if engine is not None:
        (folder / f"pid_{job.rank}").write_text(str(engine.pid))
        engine.wait_ready()
    path.meet(engine)
    boxes = training_boxes(SHAPES, Split(dp=len(case.actor)), case.actor)
    shards = Shards(boxes, dict.fromkeys(range(WORLD), "node"))
    group = make_world_group("weights", job.timeout)
    sync = WeightSync(job.rank, shards, path.domains, BUCKETS, DTYPE, group, job.board, path.on_host)
    reader = path.reader(engine)
    if job.rank == dies:
        assert reader is not None
        reader = DiesWithin(reader)
    is_late = job.rank == case.rollout[1]  # in a replica of two it does not lead
    targets = {name: late(target) if is_late else target for name, target in path.targets.items()}
    for version in range(LOADS):
        whole = weights(version)
        mine = {name: _part(whole[name], box) for name, box in boxes.get(job.rank, {}).items()}
        sync.run(mine, targets, reader)
        if engine is not None:
            engine.commit(version)
    sync.close()
    if engine is not None:
        engine.close()
    job.close()


def _make_path(case: Case, job: Job) -> WeightPath:
    weight_paths.Cuda = lambda _: HostDevice(job.rank)  # type: ignore[assignment, misc]
    actor = Placement("actor", case.actor)
    rollout = Placement("rollout", case.rollout, tp=case.tp, leaders_only=True)
    groups = make_groups([actor, rollout], job.rank, "cpu", job.timeout)
    layouts = [[(name, SHAPES[name], DTYPE) for name in bucket] for bucket in BUCKETS]
    return make_path(case.by, SHAPES, layouts, rollout, [actor], ["node"] * WORLD, groups.get("rollout"), job)


def _start_engine(case: Case, path: WeightPath, folder: Path, job: Job) -> VllmEngine | None:
    assert (path.delivery is not None) == (job.rank in case.leaders)
    if path.delivery is None:
        return None
    engine_module.Child = lambda _, *rest: Child("tests.support.reading_entry", *rest)  # type: ignore[assignment, misc]
    return VllmEngine(
        VllmOptions(model_path="-", dtype="bfloat16", max_model_len=16, max_num_seqs=4, tensor_parallel_size=case.tp),
        path.delivery,
        name=f"the replica of rank {job.rank}",
        log_path=folder / f"log_{job.rank}",
        start_timeout=600.0,
        stage_timeout=300.0,
        on_progress=job.board.beat,
    )


def _part(tensor: Tensor, box: Sequence[tuple[int, int]]) -> Tensor:
    return tensor[tuple(slice(low, high) for low, high in box)].clone()


def log_of(folder: Path, leader: int) -> list[Mapping[str, Any]]:
    """Without what it has to say of the end of a rank."""
    lines = (folder / f"log_{leader}").read_text().splitlines()
    return [json.loads(line) for line in lines if line.startswith("{")]


def loads(case: Case, count: int) -> list[Mapping[str, Any]]:
    """What every engine's log then says."""
    workers = case.tp if case.by is WeightTransfer.ipc else 1
    lines: list[Mapping[str, Any]] = []
    for version in range(count):
        lines += [{"bucket": number, "bytes": [found] * workers} for number, found in enumerate(expected(version))]
        lines.append({"commit": version})
    return lines


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(COLOCATED, id="read on the actor's devices, TP 2"),
        pytest.param(Case(WeightTransfer.ipc, (2, 0, 1), (1, 3)), id="read on some of the actor's devices"),
        pytest.param(Case(WeightTransfer.ipc, (0, 1), (3, 2), 2), id="read elsewhere, TP 2", marks=pytest.mark.slow),
        pytest.param(Case(WeightTransfer.nccl, (3, 1, 0), (1, 3, 2)), id="sent by the only rank that can"),
        pytest.param(APART, id="sent", marks=pytest.mark.slow),
    ],
)
def test_every_worker_finds_every_bucket_of_every_load(case: Case, tmp_path: Path) -> None:
    assert len(BUCKETS) == 5
    run_ranks(WORLD, run_case, case, tmp_path)
    for leader in case.leaders:
        assert log_of(tmp_path, leader) == loads(case, LOADS)


@pytest.mark.parametrize("case, dies", [(COLOCATED, 3), (APART, 0)], ids=["one that does not lead", "the sender"])
def test_a_rank_that_dies_within_a_load_leaves_no_engine_with_a_mixture(case: Case, dies: int, tmp_path: Path) -> None:
    """What has been committed is whole, and no engine is left."""
    with pytest.raises(RankFailed) as failed:
        run_ranks(WORLD, run_case, case, tmp_path, dies)
    assert dies in failed.value.tracebacks
    for leader in case.leaders:
        log = log_of(tmp_path, leader)
        assert {"commit": 0} in log
        assert {"commit": 1} not in log
        assert log == loads(case, 2)[: len(log)]
        _await_end(int((tmp_path / f"pid_{leader}").read_text()))


def _await_end(session: int) -> None:
    deadline = time.monotonic() + 60
    while session_members(session):
        assert time.monotonic() < deadline, f"engine {session} has not ended"
        time.sleep(0.05)
