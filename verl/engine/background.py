"""Checkpoints that are written while the run goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist

from verl.engine.copies import Copies
from verl.flow.circle import Circle
from verl.flow.job import Job
from verl.flow.placement import Placement, make_role_group, make_world_group
from verl.flow.signs import Signs


class Background:
    """A thread on each rank, which writes one checkpoint after the other.

    The threads speak to each other on process groups of their own. The board does not see them until the main thread
    waits for its own, and then says what that one says.
    """

    def __init__(self, job: Job, trained: Mapping[str, Placement]) -> None:
        """Collective over the job: makes the groups. `trained`: the roles that checkpoints hold."""
        self._board, self._signs = job.board, Signs(job.rank)
        self.circle = Circle(make_world_group("checkpoint", job.timeout), self._signs, "a checkpoint")
        made = {role: make_role_group(place, "checkpoint", job.timeout) for role, place in trained.items()}
        self.groups: dict[str, dist.ProcessGroup] = {
            role: group for role, group in made.items() if job.rank in trained[role].ranks
        }
        """Of the roles that this rank serves."""
        self.copies = {role: Copies() for role in self.groups}
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def start(self, what: str, do: Callable[[], None]) -> None:
        """`do` in the thread, on all ranks alike, once what was started before has ended."""
        self.finish()
        self._signs.at(what)
        self._thread = threading.Thread(target=self._run, args=(do,), name="verl-checkpoint", daemon=True)
        self._thread.start()

    def raise_if_failed(self) -> None:
        """Raises what went wrong in the thread."""
        if self._error is not None:
            raise self._error

    def finish(self) -> None:
        """Waits for the thread. Raises what went wrong in it."""
        if self._thread is not None:
            self._board.follow(self._signs, self._ended)
            self._thread = None
        self.raise_if_failed()

    def _run(self, do: Callable[[], None]) -> None:
        try:
            with torch.no_grad():
                do()
        except BaseException as error:  # the main thread's to raise
            self._error = error

    def _ended(self, seconds: float) -> bool:
        assert self._thread is not None
        self._thread.join(seconds)
        return not self._thread.is_alive()
