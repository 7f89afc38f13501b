"""Where every rank is, in the job's store; and a watchdog that ends the job by name when one stands still."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import NoReturn

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from verl.flow.ending import end_process
from verl.flow.signs import NO_SIGN, Entry, Signs

logger = logging.getLogger(__name__)

WRITE_SECONDS = 0.5
"""How old a line on the board may be."""
FOLLOW_SECONDS = 0.05
"""How often the main thread looks at a thread that it waits for."""
LOOKS = 60
"""How often a watchdog looks at the ranks that it waits for while the limit passes."""
STORE_SECONDS = 15.0
"""How long a busy store may take to answer, however short the limit is."""
REPORT_SECONDS = 3.0
"""How long the ranks of a node wait for one another's reports before one of them ends torchrun."""


class StalledError(RuntimeError):
    """A rank stood still for longer than trainer.stage_timeout."""


class Board(Signs):
    """This rank's line, and the reading of the others'.

    The main thread says where it is. A daemon thread with a store connection of its own writes that down and watches,
    since a blocking call of the main thread, or a store that is gone, must not stop the one or raise in the other.
    """

    def __init__(
        self,
        rank: int,
        world: int,
        connect: Callable[[], dist.Store] | None,
        timeout: float,
        nodes: Sequence[str] = (),
    ) -> None:
        """`connect` opens a connection to the job's store; None in a job of one process, which has nobody to tell.

        `nodes`: the node of each rank, for messages of a job of several nodes.
        """
        super().__init__(rank)
        self.world, self.timeout = world, timeout
        self.on_stall: list[Callable[[], None]] = []
        """Called before the process ends itself: stop the children."""
        self._nodes = nodes
        self._seen: dict[tuple[int, str], tuple[int, float]] = {}
        self._known: dict[int, Entry] = {}
        self._rounds = 0
        self._stop = threading.Event()
        if connect:
            threading.Thread(target=self._watch, args=(connect(),), name="verl-watchdog", daemon=True).start()
            threading.Thread(target=self._guard, name="verl-watchdog-guard", daemon=True).start()

    def follow(self, aside: Signs, ended: Callable[[float], bool]) -> None:
        """The main thread waits for another one of this process, and says what that one says of itself.

        `ended`: waits so many seconds at most, and says whether the other one has ended.
        """
        before, said = self.entry, None
        while not ended(FOLLOW_SECONDS):
            if aside.entry is not said:
                said = aside.entry
                self._moved(f"{self._stage}: {said.stage}", said.waits_for)
        self._moved(before.stage, before.waits_for)

    def close(self) -> None:
        self._stop.set()

    # -- the watchdog's thread -------------------------------------------------------------------------------------

    def _watch(self, store: dist.Store) -> None:
        store.set_timeout(timedelta(seconds=5))
        pulse, next_look = 0, 0.0
        while not self._stop.wait(WRITE_SECONDS if pulse else 0.0):
            pulse += 1
            try:
                store.set(_key(self.rank), replace(self.entry, pulse=pulse).dump())
                if time.monotonic() >= next_look:
                    next_look = time.monotonic() + self.timeout / LOOKS
                    fault = self._fault(store)
                    if fault is not None and not self._stop.is_set():
                        self._end(fault, store)
                self._rounds += 1
            except dist.DistStoreError as error:
                logger.warning("the job's store was slow to answer the watchdog, which looks again: %s", error)
            except dist.DistNetworkError as error:
                if not self._stop.is_set():
                    logger.warning("the job's store is gone, so that nobody watches rank %d: %s", self.rank, error)
                return

    # -- the guard's thread: a call to a store whose host cannot be reached does not return ----------------------------

    def _guard(self) -> None:
        """Ends the process where the watchdog has got no answer for the limit. It counts its own steps, since a process
        that was stopped has been given no time to get one."""
        rounds, silent = -1, 0.0
        while not self._stop.wait(WRITE_SECONDS):
            silent = silent + WRITE_SECONDS if rounds == self._rounds else 0.0
            rounds = self._rounds
            if silent > max(self.timeout, STORE_SECONDS):
                host = os.environ.get("MASTER_ADDR", "rank 0's node")
                self._end(f"{self._name(self.rank)} has had no answer from the job's store on {host}", None)

    # -- what is wrong, and the end ------------------------------------------------------------------------------------

    def _fault(self, store: dist.Store) -> str | None:
        """Who keeps this rank waiting, directly or through others, and has stood still for the limit. None: nobody."""
        reached: dict[int, Entry] = {}
        ahead = [self.rank]
        while ahead:
            rank = ahead.pop()
            if rank not in reached:
                reached[rank] = self._read(rank, store)
                ahead += reached[rank].waits_for
        stopped = [r for r, entry in reached.items() if r != self.rank and self._still(r, "pulse", entry.pulse)]
        still = [r for r, entry in reached.items() if self._still(r, "beat", entry.beat)]
        culprits = stopped + [r for r in still if not reached[r].waits_for]
        if culprits:
            return self._blame(culprits[:1])
        if len(still) == len(reached):
            return self._blame(_behind({rank: reached[rank] for rank in _knot(reached)}))
        return None

    def _blame(self, ranks: Sequence[int]) -> str:
        """Those who stand still without waiting for anybody else."""
        waits = "" if self.rank in ranks else f"{self._name(self.rank)} waits, and "
        if len(ranks) == 1:
            return f"{waits}{self._name(ranks[0])} has shown no sign of life"
        return f"{waits}ranks {_list(ranks)} wait for each other, and none of them has moved"

    def _still(self, rank: int, what: str, count: int) -> bool:
        """Whether a rank's count has stood still for the limit, as far as this rank has looked."""
        now = time.monotonic()
        last, since = self._seen.get((rank, what), (None, now))
        if count != last:
            self._seen[rank, what] = count, now
            return False
        return now - since > self.timeout

    def _read(self, rank: int, store: dist.Store) -> Entry:
        if rank == self.rank:
            return self.entry
        self._known[rank] = Entry.load(store.get(_key(rank))) if store.check([_key(rank)]) else NO_SIGN
        return self._known[rank]

    def _name(self, rank: int) -> str:
        return f"rank {rank} ({self._nodes[rank]})" if self._nodes else f"rank {rank}"

    def _end(self, fault: str, store: dist.Store | None) -> None:
        """The main thread may hang in a wait that cannot be interrupted, so the process reports and leaves by force.

        `store`: None where it does not answer. Then the other ranks are where they were last seen, if they were.
        """
        now = time.time()
        last = "" if store else ", as far as it was seen"
        lines = [f"{fault} for trainer.stage_timeout = {self.timeout:g} s. Where every rank is{last}:"]
        for rank in range(self.world):
            known = self.entry if rank == self.rank else self._known.get(rank, NO_SIGN)
            entry = self._read(rank, store) if store else known
            since = f" (for {now - entry.time:.0f} s)" if entry.time else ""
            lines.append(f"  {self._name(rank)}: {entry.stage}{since}")
        try:
            raise StalledError("\n".join(lines))
        except StalledError as error:  # raised, since of what is recorded torchrun shows the traceback
            record = partial(get_error_handler().record_exception, error)
            end_process(str(error), [record, *self.on_stall], partial(_leave, launcher_too=store is None))


def _leave(launcher_too: bool) -> NoReturn:
    """`launcher_too`: torchrun asks the same store about its peers, in a call that returns only when TCP gives up, a
    quarter of an hour later. Until then it neither notices that its ranks are gone nor takes a signal."""
    if launcher_too and "TORCHELASTIC_RUN_ID" in os.environ:
        launcher = os.getppid()
        time.sleep(REPORT_SECONDS)
        if os.getppid() == launcher:
            sys.stderr.write("verl: torchrun waits for that store too, and is ended with its ranks\n")
            sys.stderr.flush()
            os.kill(launcher, signal.SIGKILL)
    os._exit(1)


def _knot(lines: Mapping[int, Entry]) -> list[int]:
    """Of ranks that all wait for some of them: those that wait for each other alone, and whom the others wait for."""

    def reach(rank: int) -> set[int]:
        seen: set[int] = set()
        ahead = [rank]
        while ahead:
            seen.add(last := ahead.pop())
            ahead += set(lines[last].waits_for) - seen
        return seen

    return min((sorted(reach(rank)) for rank in lines), key=lambda ranks: (len(ranks), ranks))


def _behind(knot: Mapping[int, Entry]) -> list[int]:
    """Of ranks that wait for each other: those that the others have got past, if they do the same things in one order.

    Whoever has ended a part needs nobody for it any more, so that what a rank in that part waits for is not there.
    """
    first = min(entry.turn for entry in knot.values())
    if first == 0 or len({entry.stage.partition(":")[0] for entry in knot.values()}) > 1:
        return list(knot)
    return [rank for rank, entry in knot.items() if entry.turn == first]


def _key(rank: int) -> str:
    return f"board/{rank}"


def _list(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))
