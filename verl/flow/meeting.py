"""The ranks of a job before they have a process group: what they say to each other through the job's store alone.

A rank may be told here that it does not fit to the others, or that another one could not even start, in place of a
process group that waits for a peer that will not come.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from verl.errors import SharedError

JOIN_SECONDS = 600.0
"""How long the store, and then a rank, may take to be there: nodes import torch from cold disks at different speeds."""
LOOK_SECONDS = 0.1
"""How often a rank that waits looks whether another one has refused."""
PART_SECONDS = 10.0
"""How long rank 0 waits before it leaves, where not all others have left."""
REFUSAL_SECONDS = 5.0
"""How long a rank that leaves tries to reach the store, to say why."""
_REFUSED = "meeting/refused"
_END = "the end of the meeting"


class AbsentError(RuntimeError):
    """A rank that was awaited has not come."""


@dataclass(frozen=True)
class Meeting:
    rank: int
    world: int
    store: dist.Store
    patience: float = JOIN_SECONDS
    """Seconds that each wait may last."""

    def gather(self, what: str, mine: str) -> list[str]:
        """What each rank says, by rank, on rank 0. Elsewhere [], at once.

        Raises SharedError where a rank has left with a mistake of the user's, AbsentError where one does not come.
        """
        self.store.set(_key(what, self.rank), mine)
        return self._await(what, range(self.world)) if self.rank == 0 else []

    def announce(self, what: str, text: str) -> str:
        """What rank 0 says, on every rank. Raises as `gather` does."""
        if self.rank == 0:
            self.store.set(_key(what, 0), text)
            return text
        (said,) = self._await(what, [0])
        return said

    def part(self) -> None:
        """Before all leave: rank 0, whose end may take the store away, waits a moment for the others to hear why."""
        self.store.set(_key(_END, self.rank), "")
        deadline = time.monotonic() + PART_SECONDS
        while self.rank == 0 and self._absent(_END, range(self.world)) and time.monotonic() < deadline:
            time.sleep(LOOK_SECONDS)

    def _absent(self, what: str, ranks: Sequence[int]) -> list[int]:
        return [rank for rank in ranks if not self.store.check([_key(what, rank)])]

    def _await(self, what: str, ranks: Sequence[int]) -> list[str]:
        deadline = time.monotonic() + self.patience
        while absent := self._absent(what, ranks):
            if self.world > 1 and self.store.check([_REFUSED]):
                node, problems = json.loads(self.store.get(_REFUSED))
                self.part()
                raise SharedError(*(f"on {node}: {problem}" for problem in problems))
            if time.monotonic() > deadline:
                raise AbsentError(
                    f"rank {self.rank} has waited {self.patience:g} s for {what} from rank "
                    f"{', '.join(map(str, absent))}: see what its node says, and whether it was started"
                )
            time.sleep(LOOK_SECONDS)
        return [self.store.get(_key(what, rank)).decode() for rank in ranks]


def refuse(problems: Sequence[str], environ: Mapping[str, str]) -> None:
    """Tells the ranks that wait in the meeting that this one leaves, and why. Does nothing in a job of one process.

    For mistakes that are found before `start_job`. Where the store cannot be reached nobody is told: then the others
    end by their own limit.
    """
    if int(environ.get("WORLD_SIZE", "1")) > 1 and "MASTER_ADDR" in environ:
        try:
            store = join_store(environ, serve=False, timeout=REFUSAL_SECONDS)
            store.set(_key(_END, int(environ.get("RANK", "0"))), "")
            store.set(_REFUSED, json.dumps([node_name(environ), list(problems)]))
        except (dist.DistNetworkError, dist.DistStoreError):
            pass  # the mistake itself is about to be printed, and is what counts


def node_name(environ: Mapping[str, str]) -> str:
    """How messages call this node."""
    return environ.get("VERL_NODE_NAME") or socket.gethostname()


def store_factory(rank: int, world: int) -> Callable[[], dist.Store] | None:
    """Connections to the job's store. None: this process is the whole job."""
    if world == 1:
        return None
    serve = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    first = [join_store(os.environ, serve)]
    return lambda: first.pop() if first else join_store(os.environ, serve=False)


def join_store(environ: Mapping[str, str], serve: bool, timeout: float = JOIN_SECONDS) -> dist.Store:
    """A connection with keys of this attempt alone. `timeout`: seconds that the store may take to be there.

    torchrun's store outlives a failed attempt, and a restarted rank would read the addresses of the dead one.
    """
    host, port = environ["MASTER_ADDR"], int(environ["MASTER_PORT"])
    attempt = environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = dist.TCPStore(host, port, is_master=serve, timeout=timedelta(seconds=timeout))
    return dist.PrefixStore(f"attempt_{attempt}", store)


def _key(what: str, rank: int) -> str:
    return f"meeting/{what}/{rank}"
