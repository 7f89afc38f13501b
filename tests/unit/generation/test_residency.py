"""Who is on a device, and the order in which engine and trainers change places, on ranks that are threads."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from functools import partial

import pytest

from verl.flow.placement import Placement
from verl.generation.residency import Resident, Sharing, Stage, Turns, residency, sharing
from verl.monitor.stages import Stages

TRAINER, WEIGHTS, CACHE = Resident.trainer, Resident.weights, Resident.kv_cache


def placements(rollout: tuple[int, ...], actor: tuple[int, ...], tp: int = 1) -> tuple[Placement, list[Placement]]:
    return Placement("rollout", rollout, tp=tp, leaders_only=True), [Placement("actor", actor)]


def test_a_colocated_rank_holds_the_engine_only_when_it_is_its_turn() -> None:
    rollout, others = placements((0, 1), (0, 1))
    assert residency(rollout, others, 1) == {
        Stage.start: frozenset(),
        Stage.train: {TRAINER},
        Stage.load: {TRAINER, WEIGHTS},
        Stage.generate: {TRAINER, WEIGHTS, CACHE},
    }


def test_trainers_that_leave_are_there_only_while_they_train() -> None:
    rollout, others = placements((0, 1), (0, 1))
    assert residency(rollout, others, 1, trainers_leave=True) == {
        Stage.start: frozenset(),
        Stage.train: {TRAINER},
        Stage.load: {WEIGHTS},
        Stage.generate: {WEIGHTS, CACHE},
    }


@pytest.mark.parametrize("leave", [False, True])
def test_disjoint_ranks_keep_what_they_have(leave: bool) -> None:
    rollout, others = placements((2, 3), (0, 1))
    trainer = {Stage.start: set()} | dict.fromkeys(list(Stage)[1:], frozenset({TRAINER}))
    assert residency(rollout, others, 0, leave) == trainer
    assert residency(rollout, others, 2, leave) == dict.fromkeys(Stage, frozenset({WEIGHTS, CACHE}))


def test_one_shared_device_makes_the_whole_replica_leave() -> None:
    """Replicas (1, 2) and (3, 4) of two ranks; the actor is on 0, 1 and 5."""
    rollout, others = placements((1, 2, 3, 4), (0, 1, 5), tp=2)
    assert sharing(rollout, others, 1) == sharing(rollout, others, 2) == Sharing((1, 2), 1)
    assert [sharing(rollout, others, rank) for rank in (0, 3, 4, 5)] == [None] * 4
    assert residency(rollout, others, 2)[Stage.train] == set()
    assert residency(rollout, others, 2)[Stage.load] == {WEIGHTS}
    assert residency(rollout, others, 4)[Stage.train] == {WEIGHTS, CACHE}
    assert residency(rollout, others, 0, trainers_leave=True)[Stage.generate] == {TRAINER}, "its device is not shared"
    assert residency(rollout, others, 1, trainers_leave=True)[Stage.generate] == {WEIGHTS, CACHE}


@dataclass
class Device:
    """What is said to be on every rank's device, checked against the placement's table whenever it changes."""

    log: list[tuple[str, int]] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def note(self, what: str, rank: int) -> None:
        with self.lock:
            self.log.append((what, rank))


@dataclass
class FakeEngine:
    """One process on all devices of a replica."""

    device: Device
    leader: int
    awake: set[str] = field(default_factory=set)

    def sleep(self) -> None:
        time.sleep(0.02)  # as it does: others must wait for it
        self.awake.clear()
        self.device.note("sleep", self.leader)

    def wake(self, *tags: str) -> None:
        for tag in tags:
            if tag not in self.awake:
                self.awake.add(tag)
                self.device.note(f"wake {tag}", self.leader)


@dataclass
class FakeTrainer:
    device: Device
    rank: int
    host_bytes: int = 7
    away: bool = False

    def leave(self) -> None:
        if not self.away:
            self.device.note("leave", self.rank)
        self.away = True

    def come_back(self) -> None:
        self.device.note("return", self.rank)
        self.away = False


def run_step(rollout: Placement, others: list[Placement], device: Device) -> None:
    """train, load, generate, generate, train on every rank, each a thread that takes its own time. Where they share,
    the actor's ranks have two trainers that leave.
    """
    ranks = sorted({*rollout.ranks, *others[0].ranks})
    engines = {leader: FakeEngine(device, leader) for leader in rollout.leaders}
    barriers = {shared.leader: threading.Barrier(len(shared.ranks)) for shared in _sharing(rollout, others)}

    def rank(number: int) -> None:
        here = sharing(rollout, others, number)
        trainers = [FakeTrainer(device, number) for _ in range(2)] if here and number in others[0].ranks else []

        def barrier() -> None:
            if here is not None:
                barriers[here.leader].wait()

        turns = Turns(here, engines.get(number), trainers, partial(device.note, "free", number), barrier, Stages())
        assert turns.host_bytes == 7 * len(trainers)
        for _ in range(2):
            time.sleep(0.01 * (number % 3))
            device.note("train", number)
            turns.to_load()
            device.note("load", number)
            for _ in range(2):
                turns.to_generate()
                device.note("generate", number)
                turns.back_to_train()
                turns.back_to_train()  # it is their turn already
        device.note("train", number)

    threads = [threading.Thread(target=rank, args=(number,)) for number in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
        assert not thread.is_alive()


def _sharing(rollout: Placement, others: list[Placement]) -> set[Sharing]:
    return {found for rank in rollout.ranks if (found := sharing(rollout, others, rank)) is not None}


@pytest.mark.parametrize(
    "rollout, actor, tp",
    [((0, 1, 2), (0, 1, 2), 1), ((0, 1), (0, 1), 2), ((1, 2, 3, 4), (0, 1, 5), 2), ((2, 3), (0, 3), 2)],
    ids=["colocated", "one replica", "overlapping", "not the leader's device"],
)
def test_nobody_trains_while_the_engine_is_awake(rollout: tuple[int, ...], actor: tuple[int, ...], tp: int) -> None:
    place, others = placements(rollout, actor, tp)
    device = Device()
    run_step(place, others, device)
    for shared in _sharing(place, others):
        awake: set[str] = set()
        freed: set[int] = set()
        trainers = {rank: 2 for rank in shared.ranks if rank in actor}
        for what, rank in [entry for entry in device.log if entry[1] in shared.ranks]:
            match what:
                case "free":
                    freed.add(rank)
                case "leave":
                    trainers[rank] -= 1
                case "return":
                    assert not awake, "the engine is there"
                    trainers[rank] += 1
                case "train":
                    assert not awake and trainers.get(rank, 2) == 2, "the engine is there"
                    freed.discard(rank)
                case "sleep":
                    awake.clear()
                case "generate" if rank == shared.leader:
                    assert awake == {"weights", "kv_cache"}
                case "load" if rank == shared.leader:
                    assert awake == {"weights"}
                case wake if wake.startswith("wake"):
                    assert freed == set(shared.ranks), "all of the replica's ranks make room first"
                    assert not any(trainers.values()), "and their trainers have left"
                    awake.add(wake.removeprefix("wake "))
    alone = set(place.ranks) - {rank for shared in _sharing(place, others) for rank in shared.ranks}
    assert not [what for what, rank in device.log if rank in alone and what in ("free", "sleep", "leave", "return")]
