"""Faults that are put into a stage of a run on one rank."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count

from tests.support.stalls import announce_hang, watch_for_hangs_alone
from verl.monitor.stages import Stages

FOR_EVER = 1000.0


class InjectedError(Exception):
    """Nothing in the program raises it."""


@dataclass(frozen=True)
class Fault:
    how: str
    """raise, hang, or kill: SIGKILL to the rank itself."""
    stage: str
    rank: int
    visit: int = 1
    """In which of the rank's visits to the stage, from 1."""

    def __str__(self) -> str:
        return f"{self.how} {self.stage} {self.rank} {self.visit}"

    @classmethod
    def parse(cls, text: str) -> Fault:
        how, stage, rank, visit = text.split()
        return cls(how, stage, int(rank), int(visit))

    def install(self) -> None:
        """On every rank; it happens on its own."""
        if self.how == "hang":
            watch_for_hangs_alone()
        enter: Callable[..., object] = Stages.__call__
        visits = count(1)

        @contextmanager
        def faulty(stages: Stages, name: str, role: str | None = None) -> Iterator[None]:
            with enter(stages, name, role):  # type: ignore[attr-defined]
                if name == self.stage and os.environ["RANK"] == str(self.rank) and next(visits) == self.visit:
                    self.happen()
                yield

        Stages.__call__ = faulty  # type: ignore[method-assign, assignment]

    def happen(self) -> None:
        if self.how == "raise":
            raise InjectedError(f"in {self.stage} on rank {self.rank}")
        if self.how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        announce_hang(self.rank)
        time.sleep(FOR_EVER)
