"""Who is on a device at each stage of a step: pure, from the placement alone. And in which order they change places.

A replica's engine is one process on all of the replica's devices, so that one shared device makes all of them shared:
the engine sleeps while the trainers work. Trainers are not moved to the host; what they free for the engine is what
their activations and gathered parameters took. Has never been run on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from verl.flow.placement import Placement


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
    start = rollout.ranks.index(rank) // rollout.tp * rollout.tp
    replica = rollout.ranks[start : start + rollout.tp]
    shared = any(set(replica) & set(other.ranks) for other in others)
    return Sharing(replica, replica[0]) if shared else None


def residency(rollout: Placement, others: Sequence[Placement], rank: int) -> Mapping[Stage, frozenset[Resident]]:
    """What is on this rank's device. `others`: the roles that have a model."""
    trainer = frozenset({Resident.trainer} if any(rank in other.ranks for other in others) else ())
    engine = frozenset({Resident.weights, Resident.kv_cache})
    if rank not in rollout.ranks:
        here: dict[Stage, frozenset[Resident]] = dict.fromkeys(Stage, trainer)
    elif sharing(rollout, others, rank) is None:
        here = dict.fromkeys(Stage, engine)
    else:
        here = {
            Stage.start: frozenset(),
            Stage.train: trainer,
            Stage.load: trainer | {Resident.weights},
            Stage.generate: trainer | engine,
        }
    return here | {Stage.start: here[Stage.start] - {Resident.trainer}}


class Sleeper(Protocol):
    """An engine that can leave its devices."""

    def sleep(self) -> None: ...

    def wake(self, *tags: str) -> None: ...


class Turns:
    """Takes turns on the devices of one replica. On a rank that shares none, nothing is done.

    All of the replica's ranks enter and leave together: none of them still has memory when the engine wakes, and none
    takes any before it sleeps.
    """

    def __init__(
        self,
        here: Sharing | None,
        engine: Sleeper | None,
        free: Callable[[], None],
        barrier: Callable[[], None],
    ) -> None:
        """`engine`: on the replica's leader. `free`: gives cached device memory back. `barrier`: of the replica."""
        self._here, self._engine, self._free, self._barrier = here, engine, free, barrier

    def to_load(self) -> None:
        """Before new weights. The engine stays awake after them: what comes next is generation."""
        self._enter(Resident.weights)

    def to_generate(self) -> None:
        self._enter(Resident.weights, Resident.kv_cache)

    def back_to_train(self) -> None:
        """After generation: the device is the trainers' again."""
        if self._here is not None:
            if self._engine is not None:
                self._engine.sleep()
            self._barrier()

    def _enter(self, *residents: Resident) -> None:
        if self._here is not None:
            self._free()
            self._barrier()
            if self._engine is not None:
                self._engine.wake(*residents)
