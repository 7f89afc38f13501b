"""Weights from training shards into what engines read, on real ranks, again and again."""

from __future__ import annotations

import os
import re
import signal
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import pytest
import torch
import torch.distributed as dist
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.support.ranks import RankFailed, run_ranks
from tests.support.stalls import announce_hang, watch_for_hangs_alone
from tests.unit.reshard.test_reshard_plan import SHAPES as PLANNED_SHAPES
from tests.unit.reshard.test_reshard_plan import Layout, layouts
from verl.flow.job import Job, start_job
from verl.flow.placement import make_world_group
from verl.flow.window import Address, Window
from verl.generation.vllm.buffer import WeightBuffer
from verl.reshard import schedule
from verl.reshard.boxes import Split, node_domains, own_domains, training_boxes
from verl.reshard.buckets import Buckets, cut_buckets, largest_bucket
from verl.reshard.execute import Target, WeightSync
from verl.reshard.flight import Views
from verl.reshard.layout import Box, Domain, Shapes, Shards, volume
from verl.reshard.plan import plan
from verl.reshard.schedule import Copy, from_neighbours

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


def weights(version: int, shapes: Shapes) -> dict[str, Tensor]:
    """float32, with digits that bfloat16 has no room for, other ones in each version."""
    draws = torch.Generator().manual_seed(version)
    return {name: torch.randn(shape, generator=draws) for name, shape in shapes.items()}


@dataclass(frozen=True)
class Setup:
    """Six ranks, two on each of three nodes, or all on one."""

    ranks: tuple[int, ...]
    """That train."""
    split: Split
    generating: tuple[int, ...]
    """Leaders of the engines (`shared`), or ranks with parameters of their own, neighbours being TP peers."""
    shared: bool = False
    gen_tp: int = 1
    dtype: torch.dtype = torch.bfloat16
    nodes: Mapping[int, str] = field(default_factory=lambda: NODES)
    opened: bool = True
    """Parameters that neighbours have something of are in memory which these can write."""
    shapes: Shapes = field(default_factory=lambda: SHAPES)

    @property
    def shards(self) -> Shards:
        return Shards(training_boxes(self.shapes, self.split, self.ranks), self.nodes)

    @property
    def domains(self) -> Sequence[Domain]:
        if self.shared:
            return node_domains(self.shapes, self.generating, self.nodes, slots=2)
        split = Split(tp=self.gen_tp, dp=len(self.generating) // self.gen_tp, tp_dims=TP_DIMS, fsdp=False)
        return own_domains(training_boxes(self.shapes, split, self.generating))

    def buckets(self, limit: int) -> Buckets:
        return cut_buckets(self.shapes, self.dtype.itemsize, limit)


@dataclass(frozen=True)
class AnySetup(Setup):
    """Whatever may be asked of a plan."""

    layout: Layout = field(kw_only=True)

    @classmethod
    def of(cls, layout: Layout, opened: bool) -> AnySetup:
        return cls((), fsdp(1), (), shapes=PLANNED_SHAPES, opened=opened, layout=layout)

    @property
    def shards(self) -> Shards:
        return self.layout.shards

    @property
    def domains(self) -> Sequence[Domain]:
        return self.layout.domains


def fsdp(size: int) -> Split:
    return Split(dp=size)


THREE_D = Split(pp=2, dp=1, tp=2, tp_dims=TP_DIMS, stages=STAGES)
ALL = (0, 1, 2, 3, 4, 5)
ONE_NODE: dict[int, str] = dict.fromkeys(ALL, "a")
SETUPS = {
    "own memory, colocated": Setup(ALL, fsdp(6), ALL),
    "own memory, replicas, descending": Setup((3, 2, 1, 0), Split(dp=4, fsdp=False), ALL),
    "own memory, disjoint": Setup((2, 0), fsdp(2), (1, 3, 5)),
    "own memory, TP 2, trained as 2 x 1 x 2": Setup((1, 0, 3, 2), THREE_D, ALL, gen_tp=2),
    "own memory, TP 2, descending and apart": Setup((0, 1), fsdp(2), (5, 4, 3, 2), gen_tp=2),
    "one node": Setup(ALL, fsdp(6), ALL, nodes=ONE_NODE),
    "one node, TP 2, trained as 2 x 1 x 2": Setup((1, 0, 3, 2), THREE_D, ALL, gen_tp=2, nodes=ONE_NODE),
    "one node, disjoint": Setup((2, 0), fsdp(2), (1, 3, 5), nodes=ONE_NODE),
    "one node, disjoint, not opened": Setup((2, 0), fsdp(2), (1, 3, 5), nodes=ONE_NODE, opened=False),
    "nodes' memory, a ring": Setup(ALL, fsdp(6), (0, 2, 3, 5), shared=True),
    "nodes' memory, a chain": Setup((1, 0), fsdp(2), (1, 3, 2, 4), shared=True),
    "nodes' memory, a ring and a chain": Setup((0, 1, 2, 3), THREE_D, (0, 2, 5, 4), shared=True),
    "nodes' memory, trained elsewhere": Setup((4, 1), fsdp(2), (3,), shared=True),
    "in float32": Setup((0, 1, 2), fsdp(3), (2, 5), shared=True, dtype=torch.float32),
}


@dataclass
class Engine:
    """Reads a bucket as early and as late as it may, and finds the same. Parameters of its own it finds loaded."""

    target: Target
    during: Callable[[int], None] = lambda bucket: None
    """Called between the two, and with -1 when a load begins."""
    weights: dict[str, Tensor] = field(default_factory=dict)
    log: list[str] = field(default_factory=list)
    taking: int = -1

    def begin_load(self) -> None:
        self.weights = {}
        self.during(-1)
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


class Memory:
    """What this rank writes or reads of the domains' memory: slots that a node shares, or parameters of its own."""

    def __init__(self, setup: Setup, buckets: Buckets, job: Job) -> None:
        layouts = [[(name, setup.shapes[name], setup.dtype) for name in bucket] for bucket in buckets]
        mine = [domain for domain in setup.domains if job.rank in domain.members]
        made = {d.name: WeightBuffer(layouts, 2) for d in mine if d.slots is not None and d.readers[0] == job.rank}
        paths = job.everywhere({name: buffer.path for name, buffer in made.items()})
        self.targets: dict[str, Target] = {}
        self.addresses: dict[str, Address] = {}
        for domain in mine:
            if domain.slots is not None:
                path = paths[domain.readers[0]][domain.name]
                self.targets[domain.name] = (made.get(domain.name) or WeightBuffer.open(path, layouts, 2)).tensors
            else:
                own = self._parameters(setup, domain)
                self.targets[domain.name] = lambda bucket, own=own: {name: own[name] for name in buckets[bucket]}

    def _parameters(self, setup: Setup, domain: Domain) -> dict[str, Tensor]:
        shapes = {name: [high - low for low, high in box] for name, box in domain.boxes.items()}
        transfers = plan(setup.shards, setup.domains, setup.dtype.itemsize)
        names = from_neighbours(transfers, setup.shards.node_of, domain.name) if setup.opened else set()
        own = {name: torch.full(shape, torch.nan, dtype=setup.dtype) for name, shape in shapes.items()}
        if names:
            window = Window({name: shapes[name] for name in names}, setup.dtype)
            self.addresses[domain.name] = window.address(window.tensors)
            own |= window.tensors
        return own


@dataclass
class Side:
    """One rank's part of a setup."""

    setup: Setup
    job: Job
    limit: int = LARGE

    def __post_init__(self) -> None:
        setup, job = self.setup, self.job
        self.buckets = setup.buckets(self.limit)
        memory = Memory(setup, self.buckets, job)
        self.targets = memory.targets
        group = make_world_group("weights", job.timeout)
        self.sync = WeightSync(
            job.rank,
            setup.shards,
            setup.domains,
            self.buckets,
            setup.dtype,
            group,
            job.board,
            addresses=memory.addresses,
        )
        self.domain = next((d for d in setup.domains if job.rank in d.readers), None)
        self.engine = Engine(self.targets[self.domain.name]) if self.domain else None

    def load(self, version: int) -> None:
        self.run(self.sources(version))

    def run(self, sources: Mapping[str, Tensor]) -> None:
        self.sync.run(sources, self.targets, self.engine)
        if self.engine is not None and self.domain is not None and self.domain.slots is None:
            for bucket in range(len(self.buckets)):
                self.engine.weights |= self.engine.target(bucket)

    def sources(self, version: int) -> dict[str, Tensor]:
        boxes, whole = self.setup.shards.boxes.get(self.job.rank, {}), weights(version, self.setup.shapes)
        return {name: whole[name][slices(box)].clone() for name, box in boxes.items()}

    def check(self, version: int) -> None:
        if self.engine is not None and self.domain is not None:
            whole = weights(version, self.setup.shapes)
            for name, box in self.domain.boxes.items():
                expected = whole[name][slices(box)].to(self.setup.dtype)
                assert torch.equal(self.engine.weights[name], expected), (version, name)


def slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(*side) for side in box)


def joined(setup: Setup, limit: int = LARGE, stage_timeout: float = 300) -> Side:
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
    side = joined(setup, limit)
    result = load_and_count(side)
    side.job.close()
    return result


def load_and_count(side: Side) -> Result:
    sent: list[int] = []
    send, copy, dtype = dist.isend, Views.copy, side.setup.dtype

    def counting(tensor: Tensor, dst: int, group: dist.ProcessGroup, tag: int) -> dist.Work | None:
        if tensor.dtype == dtype:
            sent.append(tensor.nbytes)
        return send(tensor, dst, group, tag)

    def counting_written(self: Views, copies: Sequence[Copy]) -> None:
        sent.extend(volume(t.box) * dtype.itemsize for t, _, _ in copies if t.src != t.dst)
        copy(self, copies)

    dist.isend, Views.copy = counting, counting_written  # type: ignore[assignment, method-assign]
    try:
        for version in range(LOADS):
            side.load(version)
            side.check(version)
        side.sync.close()
    finally:
        dist.isend, Views.copy = send, copy  # type: ignore[method-assign]
    traffic = side.sync.traffic
    log = tuple(side.engine.log) if side.engine else ()
    return Result(sum(sent) // LOADS, traffic.wire, traffic.local, side.sync.staging_bytes, log)


def missing(setup: Setup) -> int:
    """Elements that no member of a domain trains, over all domains: they must come over the wire."""
    total = 0
    for domain in setup.domains:
        for name, box in domain.boxes.items():
            held = torch.zeros(setup.shapes[name], dtype=torch.bool)
            for rank in domain.members:
                if name in setup.shards.boxes.get(rank, {}):
                    held[slices(setup.shards.boxes[rank][name])] = True
            total += int((~held[slices(box)]).sum())
    return total


@pytest.mark.parametrize("limit", [LARGE, SMALL], ids=["one bucket", "many"])
@pytest.mark.parametrize("name", SETUPS)
def test_engines_take_every_version_whole(name: str, limit: int) -> None:
    setup = SETUPS[name]
    results = run_ranks(WORLD, load_again_and_again, setup, limit)
    check_results(setup, limit, results)
    assert max(r.staging for r in results) <= 2 * largest_bucket(setup.buckets(limit), SHAPES, setup.dtype.itemsize)


def check_results(setup: Setup, limit: int, results: Sequence[Result]) -> None:
    """Of all ranks: the fewest bytes have moved, and each engine took each bucket of its node's memory."""
    size, buckets = setup.dtype.itemsize, setup.buckets(limit)
    assert [r.sent for r in results] == [r.planned for r in results]
    assert sum(r.sent for r in results) == missing(setup) * size
    wanted = sum(volume(box) for domain in setup.domains for box in domain.boxes.values())
    assert sum(r.sent + r.local for r in results) == wanted * size
    logs: dict[int, tuple[str, ...]] = dict.fromkeys(range(WORLD), ())
    for domain in setup.domains:
        taken = () if domain.slots is None else (str(number) for number in range(len(buckets)))
        logs |= dict.fromkeys(domain.readers, ("begin", *taken) * LOADS)
    assert {rank: r.log for rank, r in enumerate(results)} == logs


def load_layouts(setups: list[AnySetup], limit: int) -> list[Result]:
    job = start_job(300, check_program=False)
    results = [load_and_count(Side(setup, job, limit)) for setup in setups]
    job.close()
    return results


@settings(max_examples=4, deadline=None, phases=[Phase.generate])
@given(st.lists(layouts(), min_size=8, max_size=8), st.integers(1, 80), st.booleans())
def test_engines_take_every_version_whole_in_any_layout(drawn: list[Layout], limit: int, opened: bool) -> None:
    setups = [AnySetup.of(layout, opened) for layout in drawn]
    of_ranks = run_ranks(WORLD, load_layouts, setups, limit)
    for setup, *results in zip(setups, *of_ranks, strict=True):
        check_results(setup, limit, results)


@pytest.mark.parametrize("opened", [True, False])
def test_within_a_node_no_memory_is_needed_for_messages(opened: bool) -> None:
    """Every rank writes where it belongs, and nothing goes by a socket; where it cannot, everything does."""
    setup = replace(SETUPS["one node"], opened=opened)
    results = run_ranks(WORLD, load_again_and_again, setup, SMALL)
    assert all((r.staging == 0) == opened for r in results)


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
    side.run(made)
    side.check(1)
    side.sync.close()
    side.job.close()
    held = [len(set(bucket) & set(made)) for bucket in side.buckets]
    return made.asked, made.most, max(a + b for a, b in zip([0, *held], [*held, 0], strict=True))


@pytest.mark.parametrize(
    "name", ["own memory, colocated", "one node", "nodes' memory, a ring", "nodes' memory, trained elsewhere"]
)
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


def begin_late(setup: Setup, late: int) -> None:
    """One engine goes on with the weights that it has for a while, after the others have begun the next load."""
    side = joined(setup, SMALL)
    for version in range(LOADS):
        if version and side.job.rank == late:
            time.sleep(0.2)
            side.check(version - 1)
        side.load(version)
        side.check(version)
    side.sync.close()
    side.job.close()


@pytest.mark.parametrize("name", ["one node", "one node, disjoint"])
def test_parameters_are_not_written_before_their_engine_begins_a_load(name: str) -> None:
    run_ranks(WORLD, begin_late, SETUPS[name], 3)


def alias() -> tuple[int, bool]:
    """The engine's parameters are the trainer's shards: one rank trains all of the model."""
    job = start_job(300, check_program=False)
    setup = Setup((0,), fsdp(1), (0,), dtype=torch.float32, nodes={0: "a"})
    mine = weights(0, SHAPES)
    buckets = setup.buckets(LARGE)
    group = make_world_group("weights", job.timeout)
    sync = WeightSync(0, setup.shards, setup.domains, buckets, torch.float32, group, job.board)
    before = {name: tensor._version for name, tensor in mine.items()}
    sync.run(mine, {"rank 0": lambda _: mine}, Engine(lambda _: mine))
    job.close()
    return sync.staging_bytes, before == {name: tensor._version for name, tensor in mine.items()}


def test_nothing_is_copied_onto_itself() -> None:
    assert run_ranks(1, alias) == [(0, True)]


def sleep_for_ever() -> None:
    announce_hang(3)
    time.sleep(1000)


def hang(setup: Setup, where: str) -> None:
    watch_for_hangs_alone()
    side = joined(setup, stage_timeout=2)
    side.job.board.at("reshard")
    if side.job.rank == 3:
        side.job.board.timeout = 1000  # the others are to find it
        if where == "before":
            sleep_for_ever()
        assert side.engine is not None
        side.engine.during = lambda bucket: sleep_for_ever()
    for version in range(2):
        side.load(version)
    side.job.close()


@pytest.mark.parametrize("where", ["before", "reading"])
@pytest.mark.parametrize("name", ["own memory, disjoint", "one node, disjoint", "nodes' memory, a chain"])
def test_the_rank_that_holds_the_weights_up_is_named(name: str, where: str, capfd: pytest.CaptureFixture[str]) -> None:
    """Others only send to rank 3, or tell it that it may read, and wait until it has taken or heard that."""
    with pytest.raises(RankFailed):
        run_ranks(WORLD, hang, SETUPS[name], where, grace=0.0)
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
@pytest.mark.parametrize("name", ["nodes' memory, a chain", "one node"])
def test_a_rank_killed_within_a_load_leaves_nobody_with_a_committed_mixture(name: str, victim: int) -> None:
    """On every engine's rank `run` raises, so that nothing is committed there, unless the weights are all there."""
    with pytest.raises(RankFailed) as failed:
        run_ranks(WORLD, die_in_the_middle, SETUPS[name], victim)
    assert failed.value.tracebacks.keys() == {victim}
    assert "exit status -9" in failed.value.tracebacks[victim]


def die_while_writing(setup: Setup, victim: int, limit: int) -> None:
    """The victim is killed in the second load, with one part of a message in the memory of another rank."""
    side = joined(setup, limit)
    side.load(0)
    steps = side.sync._steps
    written_by_victim = any(m.src == victim and m.direct for step in steps for turn in step.rounds for m in turn)
    copy = Views.copy

    def copy_and_die(self: Views, copies: Sequence[Copy]) -> None:
        if any(t.dst != victim for t, _, _ in copies):
            copy(self, copies[:1])
            os.kill(os.getpid(), signal.SIGKILL)
        copy(self, copies)

    if side.job.rank == victim:
        Views.copy = copy_and_die  # type: ignore[method-assign]
    try:
        side.load(1)
    except RuntimeError:
        return
    assert not written_by_victim, "it has never heard that all of it is there"
    side.check(1)


@pytest.mark.parametrize("limit", [LARGE, SMALL], ids=["one bucket", "many"])
@pytest.mark.parametrize("name", ["one node", "one node, disjoint", "one node, TP 2, trained as 2 x 1 x 2"])
def test_a_rank_killed_while_it_writes_into_anothers_memory_leaves_no_engine_with_it(name: str, limit: int) -> None:
    with pytest.raises(RankFailed) as failed:
        run_ranks(WORLD, die_while_writing, SETUPS[name], 2, limit)
    assert failed.value.tracebacks.keys() == {2}
    assert "exit status -9" in failed.value.tracebacks[2]
