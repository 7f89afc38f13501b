"""Weights from training shards into what engines read, on real ranks, again and again."""

from __future__ import annotations

import os
import re
import signal
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.support.ranks import RankFailed, run_ranks
from verl.flow.job import Job, start_job
from verl.flow.placement import make_world_group
from verl.generation.vllm.buffer import WeightBuffer
from verl.reshard import schedule
from verl.reshard.boxes import Split, node_domains, own_domains, training_boxes
from verl.reshard.buckets import Buckets, cut_buckets
from verl.reshard.execute import Target, WeightSync
from verl.reshard.layout import Box, Domain, Shards, volume, whole
from verl.reshard.staging import Staging

pytestmark = pytest.mark.dist

SHAPES: dict[str, tuple[int, ...]] = {
    "embed": (33, 8),
    "layers.0.mlp.up": (8, 8),
    "layers.0.mlp.down": (8, 8),
    "layers.1.mlp.up": (12, 160),
    "norm": (8,),
    "head": (1, 8),
}
TP_DIMS = {"layers.0.mlp.up": 0, "layers.0.mlp.down": 1, "layers.1.mlp.up": 1}
STAGES = {"embed": (0,), "layers.0.mlp.up": (0,), "layers.0.mlp.down": (0,), "head": (0, 1), "norm": (1,)}
LOADS = 3
WORLD = 6
NODES = {0: "a", 1: "a", 2: "b", 3: "b", 4: "c", 5: "c"}
SMALL, LARGE = 200, 1 << 20
"""Bytes of a bucket: most parameters have one of their own, or all are in one."""


def weights(version: int) -> dict[str, Tensor]:
    """float32, with digits that bfloat16 has no room for, other ones in each version."""
    draws = torch.Generator().manual_seed(version)
    return {name: torch.randn(shape, generator=draws) for name, shape in SHAPES.items()}


@dataclass(frozen=True)
class Setup:
    """Six ranks, two on each of three nodes."""

    ranks: tuple[int, ...]
    """That train."""
    split: Split
    generating: tuple[int, ...]
    """Leaders of the engines (`shared`), or ranks with parameters of their own, neighbours being TP peers."""
    shared: bool = False
    gen_tp: int = 1
    dtype: torch.dtype = torch.bfloat16

    @property
    def trained(self) -> dict[int, dict[str, Box]]:
        return training_boxes(SHAPES, self.split, self.ranks)

    @property
    def domains(self) -> list[Domain]:
        if self.shared:
            return node_domains(SHAPES, self.generating, NODES, slots=2)
        split = Split(tp=self.gen_tp, dp=len(self.generating) // self.gen_tp, tp_dims=TP_DIMS, fsdp=False)
        return own_domains(training_boxes(SHAPES, split, self.generating))

    def buckets(self, limit: int) -> Buckets:
        return cut_buckets(SHAPES, self.dtype.itemsize, limit)


def fsdp(size: int) -> Split:
    return Split(dp=size)


THREE_D = Split(pp=2, dp=1, tp=2, tp_dims=TP_DIMS, stages=STAGES)
ALL = (0, 1, 2, 3, 4, 5)
SETUPS = {
    "own memory, colocated": Setup(ALL, fsdp(6), ALL),
    "own memory, replicas, descending": Setup((3, 2, 1, 0), Split(dp=4, fsdp=False), ALL),
    "own memory, disjoint": Setup((2, 0), fsdp(2), (1, 3, 5)),
    "own memory, TP 2, trained as 2 x 1 x 2": Setup((1, 0, 3, 2), THREE_D, ALL, gen_tp=2),
    "own memory, TP 2, descending and apart": Setup((0, 1), fsdp(2), (5, 4, 3, 2), gen_tp=2),
    "nodes' memory, a ring": Setup(ALL, fsdp(6), (0, 2, 3, 5), shared=True),
    "nodes' memory, a chain": Setup((1, 0), fsdp(2), (1, 3, 2, 4), shared=True),
    "nodes' memory, a ring and a chain": Setup((0, 1, 2, 3), THREE_D, (0, 2, 5, 4), shared=True),
    "nodes' memory, trained elsewhere": Setup((4, 1), fsdp(2), (3,), shared=True),
    "in float32": Setup((0, 1, 2), fsdp(3), (2, 5), shared=True, dtype=torch.float32),
}


@dataclass
class Engine:
    """Reads a bucket as early and as late as it may, and finds the same."""

    target: Target
    during: Callable[[int], None] = lambda bucket: None
    """Called between the two."""
    weights: dict[str, Tensor] = field(default_factory=dict)
    log: list[str] = field(default_factory=list)
    taking: int = -1

    def begin_load(self) -> None:
        self.weights = {}
        self.log.append("begin")

    def take_bucket(self, number: int) -> None:
        self.taking = number
        self.early = self._read()

    def await_bucket(self) -> None:
        self.during(self.taking)
        late = self._read()
        assert all(torch.equal(late[name], early) for name, early in self.early.items()), self.taking
        self.weights |= late
        self.log.append(str(self.taking))

    def _read(self) -> dict[str, Tensor]:
        return {name: tensor.clone() for name, tensor in self.target(self.taking).items()}


def memory(setup: Setup, buckets: Buckets, job: Job) -> dict[str, Target]:
    """The domains' memory that this rank writes or reads: slots that a node shares, or tensors of its own."""
    layouts = [[(name, SHAPES[name], setup.dtype) for name in bucket] for bucket in buckets]
    mine = [domain for domain in setup.domains if job.rank in domain.members]
    made = {d.name: WeightBuffer(layouts, 2) for d in mine if setup.shared and d.readers[0] == job.rank}
    paths = job.everywhere({name: buffer.path for name, buffer in made.items()})
    targets: dict[str, Target] = {}
    for domain in mine:
        if setup.shared:
            path = paths[domain.readers[0]][domain.name]
            targets[domain.name] = (made.get(domain.name) or WeightBuffer.open(path, layouts, 2)).tensors
        else:
            own = {n: torch.empty([h - low for low, h in box], dtype=setup.dtype) for n, box in domain.boxes.items()}
            targets[domain.name] = lambda bucket, own=own: {name: own[name] for name in buckets[bucket]}
    return targets


@dataclass
class Side:
    """One rank's part of a setup."""

    setup: Setup
    job: Job
    limit: int = LARGE

    def __post_init__(self) -> None:
        setup, job = self.setup, self.job
        self.buckets = setup.buckets(self.limit)
        self.targets = memory(setup, self.buckets, job)
        group = make_world_group("weights", job.timeout)
        shards = Shards(setup.trained, NODES)
        self.sync = WeightSync(job.rank, shards, setup.domains, self.buckets, setup.dtype, group, job.board)
        self.domain = next((d for d in setup.domains if job.rank in d.readers), None)
        self.engine = Engine(self.targets[self.domain.name]) if self.domain else None

    def load(self, version: int) -> None:
        self.sync.run(self.sources(version), self.targets, self.engine)

    def sources(self, version: int) -> dict[str, Tensor]:
        boxes = self.setup.trained.get(self.job.rank, {})
        return {name: weights(version)[name][slices(box)].clone() for name, box in boxes.items()}

    def check(self, version: int) -> None:
        if self.engine is not None and self.domain is not None:
            for name, box in self.domain.boxes.items():
                expected = weights(version)[name][slices(box)].to(self.setup.dtype)
                assert torch.equal(self.engine.weights[name], expected), (version, name)


def slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(*side) for side in box)


def joined(setup: Setup, limit: int = LARGE, stage_timeout: float = 30) -> Side:
    return Side(setup, start_job(stage_timeout, check_program=False), limit)


@dataclass(frozen=True)
class Result:
    sent: int
    """Bytes that left the rank, each load."""
    planned: int
    local: int
    staging: int
    log: tuple[str, ...]


def load_again_and_again(setup: Setup, limit: int, alone_bytes: int = schedule.ALONE_BYTES) -> Result:
    schedule.ALONE_BYTES = alone_bytes
    side, sent = joined(setup, limit), []
    real = dist.isend

    def counting(tensor: Tensor, dst: int, group: dist.ProcessGroup, tag: int) -> dist.Work | None:
        if tensor.dtype == setup.dtype:
            sent.append(tensor.nbytes)
        return real(tensor, dst, group, tag)

    def counting_shared(self: Staging, packed: Tensor) -> Tensor:
        sent.append(packed.nbytes)
        return real_notice(self, packed)

    real_notice = Staging.notice
    dist.isend, Staging.notice = counting, counting_shared  # type: ignore[assignment, method-assign]
    for version in range(LOADS):
        side.load(version)
        side.check(version)
    side.sync.close()
    side.job.close()
    traffic = side.sync.traffic
    log = tuple(side.engine.log) if side.engine else ()
    return Result(sum(sent) // LOADS, traffic.wire, traffic.local, side.sync.staging_bytes, log)


def missing(setup: Setup) -> int:
    """Elements that no member of a domain trains, over all domains: they must come over the wire."""
    total = 0
    for domain in setup.domains:
        for name, box in domain.boxes.items():
            held = torch.zeros(SHAPES[name], dtype=torch.bool)
            for rank in domain.members:
                if name in setup.trained.get(rank, {}):
                    held[slices(setup.trained[rank][name])] = True
            total += int((~held[slices(box)]).sum())
    return total


@pytest.mark.parametrize("limit", [LARGE, SMALL], ids=["one bucket", "many"])
@pytest.mark.parametrize("name", SETUPS)
def test_engines_take_every_version_whole(name: str, limit: int) -> None:
    setup = SETUPS[name]
    results = run_ranks(WORLD, load_again_and_again, setup, limit)
    size, buckets = setup.dtype.itemsize, setup.buckets(limit)
    assert [r.sent for r in results] == [r.planned for r in results]
    assert sum(r.sent for r in results) == missing(setup) * size
    wanted = sum(volume(box) for domain in setup.domains for box in domain.boxes.values())
    assert sum(r.sent + r.local for r in results) == wanted * size
    largest = max(sum(volume(whole(SHAPES[name])) for name in bucket) for bucket in buckets) * size
    assert max(r.staging for r in results) <= 2 * largest
    one_load = ("begin", *(str(number) for number in range(len(buckets))))
    readers = {rank for domain in setup.domains for rank in domain.readers}
    assert [r.log for r in results] == [one_load * LOADS if rank in readers else () for rank in range(WORLD)]


class Made(Mapping[str, Tensor]):
    """Training shards that are made when they are asked for."""

    def __init__(self, shards: dict[str, Tensor]) -> None:
        self._shards = shards
        self.asked: list[str] = []
        self.living: list[weakref.ref[Tensor]] = []
        self.most = 0

    def __getitem__(self, name: str) -> Tensor:
        self.asked.append(name)
        made = self._shards[name].clone()
        self.living.append(weakref.ref(made))
        self.most = max(self.most, sum(ref() is not None for ref in self.living))
        return made

    def __iter__(self) -> Iterator[str]:
        return iter(self._shards)

    def __len__(self) -> int:
        return len(self._shards)


def load_what_is_made(setup: Setup) -> tuple[list[str], int, int]:
    """(what was asked for, the most that lived at a time, the most in two buckets)"""
    side = joined(setup, SMALL)
    made = Made(side.sources(1))
    side.sync.run(made, side.targets, side.engine)
    side.check(1)
    side.sync.close()
    side.job.close()
    held = [len(set(bucket) & set(made)) for bucket in side.buckets]
    return made.asked, made.most, max(a + b for a, b in zip([0, *held], [*held, 0], strict=True))


@pytest.mark.parametrize("name", ["own memory, colocated", "nodes' memory, a ring", "nodes' memory, trained elsewhere"])
def test_shards_may_be_made_when_they_are_asked_for(name: str) -> None:
    """Each once, and no more of them live than those of two buckets."""
    for asked, most, two_buckets in run_ranks(WORLD, load_what_is_made, SETUPS[name]):
        assert len(set(asked)) == len(asked)
        assert most <= two_buckets


@pytest.mark.parametrize("name", ["own memory, disjoint", "nodes' memory, a ring", "nodes' memory, a ring and a chain"])
def test_large_parts_from_other_nodes_are_received_where_they_belong(name: str) -> None:
    """The same weights, with less memory in between."""
    setup = SETUPS[name]
    packed = run_ranks(WORLD, load_again_and_again, setup, LARGE)
    in_place = run_ranks(WORLD, load_again_and_again, setup, LARGE, 1)
    assert [r.sent for r in in_place] == [r.sent for r in packed]
    assert sum(r.staging for r in in_place) < sum(r.staging for r in packed)


def test_small_buckets_are_more_than_the_slots() -> None:
    """So that the parametrisation above means something."""
    setup = SETUPS["nodes' memory, a chain"]
    assert len(setup.buckets(SMALL)) > 3 > len(setup.buckets(LARGE))


def read_slowly(setup: Setup, slow: int) -> None:
    side = joined(setup, SMALL)
    if side.engine is not None and side.job.rank == slow:
        side.engine.during = lambda bucket: time.sleep(0.1)
    for version in range(LOADS):
        side.load(version)
        side.check(version)
    side.sync.close()
    side.job.close()


@pytest.mark.parametrize("slow", [1, 2, 3, 4])
def test_a_slot_is_not_written_while_a_reader_still_reads_it(slow: int) -> None:
    """Rank 1 trains, ranks 2 and 3 share what comes to their node and pass it on to rank 4."""
    run_ranks(WORLD, read_slowly, SETUPS["nodes' memory, a chain"], slow)


def alias() -> tuple[int, bool]:
    """The engine's parameters are the trainer's shards: one rank trains all of the model."""
    job = start_job(30, check_program=False)
    setup = Setup((0,), fsdp(1), (0,), dtype=torch.float32)
    mine = weights(0)
    buckets = setup.buckets(LARGE)
    group = make_world_group("weights", job.timeout)
    shards = Shards(setup.trained, {0: "a"})
    sync = WeightSync(0, shards, setup.domains, buckets, torch.float32, group, job.board)
    before = {name: tensor._version for name, tensor in mine.items()}
    sync.run(mine, {"rank 0": lambda _: mine}, Engine(lambda _: mine))
    job.close()
    return sync.staging_bytes, before == {name: tensor._version for name, tensor in mine.items()}


def test_nothing_is_copied_onto_itself() -> None:
    assert run_ranks(1, alias) == [(0, True)]


def hang(setup: Setup, where: str) -> None:
    side = joined(setup, stage_timeout=2)
    side.job.board.at("reshard")
    if side.job.rank == 3:
        side.job.board.timeout = 100  # the others are to find it
        time.sleep(100 if where == "before" else 0)
        assert side.engine is not None
        side.engine.during = lambda bucket: time.sleep(100)
    for version in range(2):
        side.load(version)
    side.job.close()


@pytest.mark.parametrize("where", ["before", "reading"])
@pytest.mark.parametrize("name", ["own memory, disjoint", "nodes' memory, a chain"])
def test_the_rank_that_holds_the_weights_up_is_named(name: str, where: str, capfd: pytest.CaptureFixture[str]) -> None:
    """Others only send to rank 3, or tell it that it may read, and wait until it has taken or heard that."""
    with pytest.raises(RankFailed):
        run_ranks(WORLD, hang, SETUPS[name], where)
    assert set(re.findall(r"rank (\d) has shown no sign of life", capfd.readouterr().err)) == {"3"}


def die_in_the_middle(setup: Setup, victim: int) -> str:
    """How the second load ends on a rank while another is killed in it. Where it returns, the weights are whole."""
    side = joined(setup, SMALL)
    side.load(0)
    if side.job.rank == victim:
        steps = iter(range(3))
        carry_out = side.sync._carry_out

        def carry_out_or_die(*args: object) -> None:
            if next(steps, None) is None:
                os.kill(os.getpid(), signal.SIGKILL)
            carry_out(*args)  # type: ignore[arg-type]

        side.sync._carry_out = carry_out_or_die  # type: ignore[method-assign, assignment]
    try:
        side.load(1)
    except RuntimeError:
        return "raised"
    side.check(1)
    return "returned"


@pytest.mark.parametrize("victim", [0, 2])
def test_a_rank_killed_within_a_load_leaves_nobody_with_a_committed_mixture(victim: int) -> None:
    """On every engine's rank `run` raises, so that nothing is committed there, unless the weights are all there."""
    with pytest.raises(RankFailed) as failed:
        run_ranks(WORLD, die_in_the_middle, SETUPS["nodes' memory, a chain"], victim)
    assert failed.value.tracebacks.keys() == {victim}
    assert "exit status -9" in failed.value.tracebacks[victim]
