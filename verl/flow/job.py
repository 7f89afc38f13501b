"""This process's place in the job: its rank, its device, the process group, the board and the exchange."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from verl.flow.agent import AgentWatch, agent_of_this_process
from verl.flow.board import Board
from verl.flow.circle import Circle
from verl.flow.exchange import Exchange
from verl.flow.meeting import Meeting, store_factory
from verl.flow.placement import make_world_group

Result = TypeVar("Result")

BACKSTOP_FACTOR = 4
"""Process groups give up only long after the watchdog, whose report names the rank that stands still."""


@dataclass(frozen=True)
class Job:
    rank: int
    world: int
    local_rank: int
    device: torch.device
    board: Board
    hand_over: Exchange
    timeout: timedelta
    """Of process groups: the backstop behind the watchdog."""
    agent_watch: AgentWatch

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @cached_property
    def circle(self) -> Circle:
        """All ranks, for the start-up; inside a step there are hand_over and agree."""
        return Circle(self.hand_over.group, self.board, "start-up")

    def everywhere(self, value: Any) -> list[Any]:
        """What each rank says, on every rank. For start-up; inside a step use hand_over and agree."""
        return self.circle.everywhere(value)

    def together(self, do: Callable[[], Result]) -> Result:
        """`do()` on every rank. What one rank's user got wrong ends all ranks alike, with one SharedError."""
        return self.circle.together(do)

    def close(self) -> None:
        """The normal end, on every rank: nobody leaves while another still waits for its messages."""
        self.hand_over.close()
        with self.board.waiting([r for r in range(self.world) if r != self.rank], "the end of the job"):
            dist.barrier(group=self.hand_over.group)
        self.leave()

    def leave(self) -> None:
        """Frees the process group for another run of this process. Nobody may wait for this rank any more."""
        self.board.close()
        self.agent_watch.close()
        dist.destroy_process_group()


def start_job(
    stage_timeout: float, check_program: bool, admit: Callable[[Meeting], Sequence[str]] = lambda meeting: ()
) -> Job:
    """Join the job that torchrun started, or be a job of one process.

    `admit` meets the other ranks before there is a process group. It may raise what ends the job, and gives the node of
    each rank where there are several.
    """
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    agent_watch = AgentWatch(agent_of_this_process(), rank)
    connect = store_factory(rank, world)
    store = connect() if connect else dist.HashStore()
    nodes = admit(Meeting(rank, world, store))
    device = _device(local_rank)
    timeout = timedelta(seconds=BACKSTOP_FACTOR * stage_timeout)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout)
    board = Board(rank, world, connect, stage_timeout, nodes)
    agent_watch.stops = board.on_stall
    exchange = Exchange(rank, make_world_group("hand-over", timeout), board, check_program)
    return Job(rank, world, local_rank, device, board, exchange, timeout, agent_watch)


def _device(local_rank: int) -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    if local_rank < torch.cuda.device_count():  # if not, the mesh is held against what there is, and says so
        torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)
