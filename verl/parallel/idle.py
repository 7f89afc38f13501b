"""How much of a step a rank's device had nothing to do."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

Mark = float | torch.cuda.Event
"""A point in time, the program's or a GPU's."""


@dataclass(frozen=True)
class Idle:
    """Seconds of one step."""

    idle: float
    total: float

    @property
    def share(self) -> float:
        return self.idle / self.total


class IdleClock:
    """Runs from when it is made. On a GPU, which works behind the program's back, it reads the device's own times."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._waits: list[tuple[Mark, Mark]] = []
        self._start = self._now()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Around what waits for another rank and does nothing else."""
        start = self._now()
        yield
        self._waits.append((start, self._now()))

    def stop(self) -> Idle:
        """What it has seen; waits for the device."""
        total = _seconds(self._start, self._now())
        return Idle(sum(_seconds(*wait) for wait in self._waits), total)

    def _now(self) -> Mark:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def _seconds(start: Mark, end: Mark) -> float:
    if isinstance(start, torch.cuda.Event) and isinstance(end, torch.cuda.Event):
        end.synchronize()
        return start.elapsed_time(end) / 1000
    assert isinstance(start, float) and isinstance(end, float)
    return end - start
