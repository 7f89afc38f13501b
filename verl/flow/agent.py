"""torchrun's agent, which has started this rank: when it is gone, nobody would end the rank, and so it ends itself.

The kernel's own means (PR_SET_PDEATHSIG) is not used: it fires when the *thread* that started a process ends, which is
the launcher's affair, and it can say nothing.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

from verl.flow.ending import end_process

LOOK_SECONDS = 0.5


@dataclass(frozen=True)
class Agent:
    """Who started this rank, and whom to look at to see that it is still there."""

    pid: int
    child: int
    """The process that it has started: this one, or the wrapper that runs it. It leads this process's session."""

    @property
    def is_gone(self) -> bool:
        """A process whose parent has ended gets another one, however that one ended; debuggers change no parent."""
        return parent_of(self.child) not in (self.pid, None)


@cache
def agent_of_this_process() -> Agent | None:
    """Found by the first call, which has to come early: who is gone by then is not seen. None: no agent to watch."""
    return find_agent(os.environ)


def find_agent(environ: Mapping[str, str]) -> Agent | None:
    """None for a process that torchrun has not started, or whose agent is not to be seen from here.

    torchrun gives each process that it starts a session of its own, so the agent is the parent of the session's leader.
    """
    if "TORCHELASTIC_RUN_ID" not in environ:
        return None
    leader = os.getsid(0)
    agent = parent_of(leader) if leader else None  # 0: the leader is outside this process's namespace
    return Agent(agent, leader) if agent else None  # 0: the agent is


class AgentWatch:
    """Ends this process when its agent is gone. Does nothing where there is none."""

    def __init__(self, agent: Agent | None, rank: int) -> None:
        self.stops: Sequence[Callable[[], None]] = ()
        """Called before the end: what stops this rank's children."""
        self._closed = threading.Event()
        if agent is not None:
            threading.Thread(target=self._watch, args=(agent, rank), name="verl-agent-watch", daemon=True).start()

    def close(self) -> None:
        self._closed.set()

    def _watch(self, agent: Agent, rank: int) -> None:
        while not self._closed.wait(LOOK_SECONDS):
            if agent.is_gone and not self._closed.is_set():
                end_process(_message(agent, rank), self.stops, partial(os._exit, 1))


def _message(agent: Agent, rank: int) -> str:
    return (
        f"rank {rank} ends: torchrun's agent (process {agent.pid}), which started it, is gone and has not ended its "
        "ranks. Somebody has killed it, or the kernel for want of memory (see dmesg). Start the job again: it goes on "
        "from its newest checkpoint"
    )


def parent_of(pid: int) -> int | None:
    """The parent of a process, 0 where that is outside this process's namespace; None where there is no process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return int(stat.rpartition(")")[2].split()[1])  # the command's name, in brackets, may hold anything
