"""Where every rank is, in the job's store; and a watchdog that ends the job by name when one stands still."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

POLL_SECONDS = 0.5


class StalledError(RuntimeError):
    """A rank stood still for longer than trainer.stage_timeout."""


@dataclass(frozen=True)
class Entry:
    """One rank's line on the board."""

    beat: int
    """Counts every sign of life."""
    time: float
    stage: str
    waits_for: tuple[int, ...] = ()

    def dump(self) -> str:
        return json.dumps([self.beat, self.time, self.stage, self.waits_for])

    @classmethod
    def load(cls, raw: bytes) -> Entry:
        beat, at, stage, waits_for = json.loads(raw)
        return cls(beat, at, stage, tuple(waits_for))


class Board:
    """This rank's line, and the reading of the others'.

    The main thread writes; a daemon thread with a store connection of its own watches, since a blocking call on a
    shared connection would stop it too.
    """

    def __init__(self, rank: int, world: int, connect: Callable[[], dist.Store] | None, timeout: float) -> None:
        """`connect` opens a new connection to the job's store; None in a job of one process, which has nobody to tell."""
        self.rank, self.world, self.timeout = rank, world, timeout
        self.on_stall: list[Callable[[], None]] = []
        """Called before the process ends itself: stop the children."""
        self._store = connect() if connect else None
        self._entry = Entry(0, time.time(), "start")
        self._lock = threading.Lock()
        self._sent = 0.0
        self._write(force=True)
        self._stop = threading.Event()
        if connect:
            self._watcher = threading.Thread(target=self._watch, args=(connect(),), name="verl-watchdog", daemon=True)
            self._watcher.start()

    def at(self, stage: str) -> None:
        """The main thread enters a stage."""
        self._entry = Entry(self._entry.beat + 1, time.time(), stage)
        self._write(force=True)

    def beat(self) -> None:
        """A sign of life inside a stage: a finished sample, a micro-batch."""
        self._entry = Entry(self._entry.beat + 1, time.time(), self._entry.stage, self._entry.waits_for)
        self._write(force=False)

    @contextmanager
    def waiting(self, ranks: Sequence[int], what: str) -> Iterator[None]:
        """Around a wait for other ranks: it may last as long as they show signs of life."""
        before = self._entry
        self._entry = Entry(
            before.beat + 1, time.time(), f"{before.stage}: waits for {what} from rank {_list(ranks)}", tuple(ranks)
        )
        self._write(force=True)
        yield
        self._entry = Entry(self._entry.beat + 1, time.time(), before.stage, before.waits_for)
        self._write(force=True)

    def close(self) -> None:
        self._stop.set()

    def _write(self, force: bool) -> None:
        now = time.monotonic()
        if self._store is None or not (force or now - self._sent > POLL_SECONDS):
            return
        self._sent = now
        self._store.set(f"board/{self.rank}", self._entry.dump())

    def _watch(self, store: dist.Store) -> None:
        store.set_timeout(timedelta(seconds=max(5.0, POLL_SECONDS)))
        seen: dict[int, tuple[int, float]] = {}
        while not self._stop.wait(POLL_SECONDS):
            try:
                culprit = self._stalled(self.rank, store, seen, ())
            except RuntimeError:
                # the store is gone: its host has ended, and torchrun is ending this rank too
                return
            if culprit is not None and not self._stop.is_set():
                self._end(culprit, store)

    def _stalled(
        self, rank: int, store: dist.Store, seen: dict[int, tuple[int, float]], path: tuple[int, ...]
    ) -> int | None:
        """The rank at the end of a chain of waits that has shown no sign of life for the limit, or None."""
        entry = self._entry if rank == self.rank else self._read(rank, store)
        if entry is None or rank in path:
            return None
        beat, since = seen.setdefault(rank, (entry.beat, time.monotonic()))
        if beat != entry.beat:
            seen[rank] = (entry.beat, time.monotonic())
            return None
        if entry.waits_for:
            culprits = [self._stalled(other, store, seen, (*path, rank)) for other in entry.waits_for]
            return next((c for c in culprits if c is not None), None)
        return rank if time.monotonic() - since > self.timeout else None

    def _read(self, rank: int, store: dist.Store) -> Entry | None:
        key = f"board/{rank}"
        return Entry.load(store.get(key)) if store.check([key]) else None

    def _end(self, culprit: int, store: dist.Store) -> None:
        """The main thread hangs in a wait that cannot be interrupted, so the process reports and leaves by force."""
        rows = [(r, self._entry if r == self.rank else self._read(r, store)) for r in range(self.world)]
        now = time.time()
        lines = [
            f"  rank {r}: {e.stage} (for {now - e.time:.0f} s)" if e else f"  rank {r}: no sign yet" for r, e in rows
        ]
        place = f"rank {culprit}" if culprit == self.rank else f"rank {self.rank} waits, and rank {culprit}"
        error = StalledError(
            f"{place} has shown no sign of life for trainer.stage_timeout = {self.timeout:g} s. Where every rank is:\n"
            + "\n".join(lines)
        )
        print(f"verl: {error}", file=sys.stderr, flush=True)
        get_error_handler().record_exception(error)
        for stop in self.on_stall:
            stop()
        os._exit(1)


def _list(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))
