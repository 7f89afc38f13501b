"""Who is on a device at each stage of a step: pure, from the placement alone. And in which order they change places.

A replica's engine is one process on all of the replica's devices, so that one shared device makes all of them shared:
the engine sleeps while the trainers work. Trainers stay, or leave while the engine is awake
(`rollout.offload_trainers`). Has never been run on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from verl.flow.placement import Placement
from verl.monitor.stages import Stages


class Resident(StrEnum):
    trainer = "trainer"
    """Parameters, gradients and optimizer state of the roles with a model."""
    weights = "weights"
    """The engine's."""
    kv_cache = "kv_cache"


class Stage(StrEnum):
    start = "start"
    """Engines have started, trainers have not loaded yet."""
    train = "train"
    load = "load"
    generate = "generate"


@dataclass(frozen=True)
class Sharing:
    """A replica whose devices other roles use too, as one of its ranks sees it."""

    ranks: tuple[int, ...]
    leader: int


def sharing(rollout: Placement, others: Sequence[Placement], rank: int) -> Sharing | None:
    """The replica that `rank` belongs to, where it has to share; None: it has its devices for itself, or is none."""
    if rank not in rollout.ranks:
        return None
    replica = rollout.replica(rank)
    shared = any(set(replica) & set(other.ranks) for other in others)
    return Sharing(replica, replica[0]) if shared else None


def residency(
    rollout: Placement, others: Sequence[Placement], rank: int, trainers_leave: bool = False
) -> Mapping[Stage, frozenset[Resident]]:
    """What is on this rank's device. `others`: the roles that have a model. `trainers_leave`: to host memory, from
    devices that they share with an engine while it is awake.
    """
    trainer = frozenset({Resident.trainer} if any(rank in other.ranks for other in others) else ())
    engine = frozenset({Resident.weights, Resident.kv_cache})
    if rank not in rollout.ranks:
        here: dict[Stage, frozenset[Resident]] = dict.fromkeys(Stage, trainer)
    elif sharing(rollout, others, rank) is None:
        here = dict.fromkeys(Stage, engine)
    else:
        beside = frozenset() if trainers_leave else trainer
        here = {
            Stage.start: frozenset(),
            Stage.train: trainer,
            Stage.load: beside | {Resident.weights},
            Stage.generate: beside | engine,
        }
    return here | {Stage.start: here[Stage.start] - {Resident.trainer}}


class Sleeper(Protocol):
    """An engine that can leave its devices."""

    def sleep(self) -> None: ...

    def wake(self, *tags: str) -> None: ...


class Trainer(Protocol):
    """What a role with a model has on this rank's device. To leave twice is to leave once, and so with coming back."""

    @property
    def host_bytes(self) -> int:
        """Host memory that it keeps for that."""
        ...

    def leave(self) -> None: ...

    def come_back(self) -> None: ...


class Turns:
    """Takes turns on the devices of one replica. On a rank that shares none, nothing is done.

    All of the replica's ranks enter and leave together: none of them still has memory when the engine wakes, and none
    takes any before it sleeps. Between `to_load` or `to_generate` and `back_to_train` no trainer computes.
    """

    def __init__(
        self,
        here: Sharing | None,
        engine: Sleeper | None,
        trainers: Sequence[Trainer],
        free: Callable[[], None],
        barrier: Callable[[], None],
        stages: Stages,
    ) -> None:
        """`engine`: on the replica's leader. `trainers`: on this rank, those that leave. `free`: gives cached device
        memory back. `barrier`: of the replica.
        """
        self._here, self._engine, self._trainers, self._free, self._barrier = here, engine, trainers, free, barrier
        self._stages = stages
        self._in = False

    @property
    def host_bytes(self) -> int:
        """Host memory of this rank for trainers that have left."""
        return sum(trainer.host_bytes for trainer in self._trainers)

    def to_load(self) -> None:
        """Before new weights. The engine stays awake after them: what comes next is generation."""
        self._enter(Resident.weights)

    def to_generate(self) -> None:
        self._enter(Resident.weights, Resident.kv_cache)

    def back_to_train(self) -> None:
        """After generation: the device is the trainers' again, if it is not theirs already."""
        if self._here is not None and self._in:
            self._in = False
            if self._engine is not None:
                self._engine.sleep()
            self._barrier()
            self._move("onload", lambda trainer: trainer.come_back())

    def _enter(self, *residents: Resident) -> None:
        if self._here is not None:
            self._in = True
            self._move("offload", lambda trainer: trainer.leave())
            self._free()
            self._barrier()
            if self._engine is not None:
                self._engine.wake(*residents)

    def _move(self, stage: str, move: Callable[[Trainer], None]) -> None:
        if self._trainers:
            with self._stages(stage):
                for trainer in self._trainers:
                    move(trainer)
