"""What one thread says of itself: where it is, what it does there, for whom it waits, and that it moves."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class Entry:
    """One rank's line on the board."""

    pulse: int
    """Counts the watchdog's writes: a process that is stopped or gone makes none, whatever it was doing."""
    beat: int
    """Counts the main thread's signs of life."""
    time: float
    """When it entered the stage, or gave the last sign of life in it (seconds since the epoch, its own clock)."""
    stage: str
    waits_for: tuple[int, ...] = ()
    turn: int = 0
    """The last part that it has begun, of those which several ranks do in one order; 0: none in this stage yet."""

    def dump(self) -> str:
        return json.dumps([self.pulse, self.beat, self.time, self.stage, self.waits_for, self.turn])

    @classmethod
    def load(cls, raw: bytes) -> Entry:
        pulse, beat, at, stage, waits_for, turn = json.loads(raw)
        return cls(pulse, beat, at, stage, tuple(waits_for), turn)


NO_SIGN = Entry(-1, -1, 0.0, "no sign yet")


class Signs:
    """Given by one thread; `entry` may be read by others."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.entry = Entry(0, 0, time.time(), "start")
        self._stage = "start"

    def at(self, stage: str) -> None:
        """The thread enters a stage."""
        self._stage = stage
        self.entry = Entry(0, self.entry.beat + 1, time.time(), stage)

    def beat(self) -> None:
        """A sign of life inside a stage: a finished sample, a micro-batch."""
        self._moved(self.entry.stage, self.entry.waits_for)

    @contextmanager
    def doing(self, what: str, ranks: Sequence[int], turn: int = 0) -> Iterator[None]:
        """Around a part of a stage, which may need `ranks` to go on; within a wait it says what is really done.

        Every rank without which the part does not end belongs to `ranks`. Without any, this rank is itself to blame
        when it stands still. `turn`: counts the parts where `ranks` do the same ones in the same order: of ranks that
        wait for each other, the one which the others have got past is to blame.
        """
        before = self.entry
        self._moved(f"{self._stage}: {what}", tuple(ranks), turn)
        yield
        self._moved(before.stage, before.waits_for)

    @contextmanager
    def waiting(self, ranks: Sequence[int], what: str) -> Iterator[None]:
        """Around a wait for other ranks: it may last as long as they show signs of life. `ranks` may be empty.

        Every rank without which the wait does not end belongs to it, the receivers of a send too.
        """
        if not ranks:
            yield
            return
        with self.doing(f"waits for {what} from rank {', '.join(map(str, ranks))}", ranks):
            yield

    def _moved(self, stage: str, waits_for: tuple[int, ...], turn: int = 0) -> None:
        self.entry = Entry(0, self.entry.beat + 1, time.time(), stage, waits_for, turn or self.entry.turn)
