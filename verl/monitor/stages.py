"""What this process is doing, and what it did: named stages with start and end."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from verl.monitor.metrics import Metrics
from verl.monitor.names import STAGE_SECONDS


@dataclass(frozen=True)
class Span:
    name: str
    start: float
    """Seconds since the epoch."""
    end: float
    role: str | None = None


class Stages:
    """`with stages("gen", role="rollout"):` around each stage; stages may lie inside each other.

    Times are the monotonic clock's, moved once to wall time: spans never run backwards when the wall clock is set, and
    those of several processes line up as far as their wall clocks agree.
    """

    def __init__(self, listeners: Iterable[Callable[[str | None], None]] = ()) -> None:
        """Each listener is told the stage that the process is now in, or None outside of all.

        When a stage is left by an exception they are not told: they go on naming the stage that failed.
        """
        self._listeners = tuple(listeners)
        self._open: list[str] = []
        self._done: list[Span] = []
        self._to_wall = time.time() - time.monotonic()

    @contextmanager
    def __call__(self, name: str, role: str | None = None) -> Iterator[None]:
        self._open.append(name)
        start = time.monotonic() + self._to_wall
        self._tell()
        try:
            yield
        finally:
            self._done.append(Span(name, start, time.monotonic() + self._to_wall, role))
            self._open.pop()
        self._tell()

    def drain(self) -> list[Span]:
        """The stages that ended since the last call, in the order of ending."""
        done, self._done = self._done, []
        return done

    def _tell(self) -> None:
        for listener in self._listeners:
            listener(self._open[-1] if self._open else None)


def timings(spans: Iterable[Span]) -> Metrics:
    """timing_s/<name>: seconds that this rank spent in a stage, all visits together; merged, the slowest rank's."""
    seconds: dict[str, float] = {}
    for span in spans:
        seconds[span.name] = seconds.get(span.name, 0.0) + span.end - span.start
    metrics = Metrics()
    for name, spent in seconds.items():
        metrics.max(STAGE_SECONDS + name, spent)
    return metrics
