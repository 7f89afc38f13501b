"""A launch carried out: a keeper on every node, the order to each, and what comes of them."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from verl.errors import EXIT_CODE, UserError
from verl.launch.keeper import END_SECONDS, Keeper
from verl.launch.node import ALIVE, ALIVE_SECONDS, KILL
from verl.launch.plan import NodePlan, keeper_command, ssh_command
from verl.launch.ssh import LOST, not_connected
from verl.launch.streams import Output

CONNECT_SECONDS = 120.0
"""Until a node's python has answered. ssh itself gives up after 15 s where nobody listens."""
LINGER_SECONDS = 15.0
"""From the first node that fails to the stop of the others, which may know more about the cause."""
_LOOK_SECONDS = 0.1
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def launch(plans: Sequence[NodePlan], python: str, ssh_config: str | None) -> int:
    """Runs a job and returns its exit code: 0, 1, EXIT_CODE for a user's mistake, 128 + number for a signal here.

    Raises UserError, with nothing started anywhere, where nodes cannot be reached.
    """
    out, err = Output(sys.stdout.buffer), Output(sys.stderr.buffer)
    alone = len(plans) == 1 and plans[0].is_here
    with signals_noted() as noted:
        keepers: list[Keeper] = []
        try:
            for plan in plans:
                here = keeper_command(python) + ([] if alone else ["--greet"])
                command = here if plan.is_here else ssh_command(plan.name, python, ssh_config)
                keepers.append(Keeper(plan, command, None if alone else out, err))
            with alive(keepers):
                if not _connect(keepers, noted, python):
                    return 128 + noted[0]
                for keeper in keepers:
                    keeper.send(keeper.plan.order.to_line())
                return _Watch(keepers, noted, out, err).until_the_end()
        finally:
            for keeper in keepers:
                keeper.stop()
            for keeper in keepers:
                if not keeper.close():
                    err.say(
                        f"{keeper.name} has not ended in {END_SECONDS:.0f} s: look there for what is left of the job"
                    )


@contextmanager
def signals_noted() -> Iterator[list[int]]:
    """The numbers of the signals that come, instead of what they do."""
    noted: list[int] = []
    wanted = [number for number in _SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]  # nohup ignores SIGHUP
    before = {number: signal.signal(number, lambda came, _: noted.append(came)) for number in wanted}
    try:
        yield noted
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def alive(keepers: Sequence[Keeper]) -> Iterator[None]:
    """Tells the nodes that this process lives, from a thread: the main one may be held up by who reads the output."""
    done = threading.Event()

    def tell() -> None:
        while not done.wait(ALIVE_SECONDS):
            for keeper in keepers:
                keeper.send(ALIVE)

    thread = threading.Thread(target=tell, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()


def _connect(keepers: Sequence[Keeper], noted: Sequence[int], python: str) -> bool:
    """Waits until every node answers; False where a signal comes first. UserError with all those that do not."""
    deadline = time.monotonic() + CONNECT_SECONDS
    while True:
        codes = [keeper.code() for keeper in keepers]  # first: what a process says, it says before it ends
        waiting = [k for k, code in zip(keepers, codes, strict=True) if code is None and not k.is_connected]
        if noted:
            return False
        if not waiting or time.monotonic() > deadline:
            break
        time.sleep(_LOOK_SECONDS)
    problems = [
        not_connected(keeper.name, code, keeper.said_before, python)
        for keeper, code in zip(keepers, codes, strict=True)
        if code is not None and not keeper.is_connected
    ]
    problems += [
        f"{keeper.name}: no answer within {CONNECT_SECONDS:.0f} s; see what holds up its shell or python there: "
        f"ssh {keeper.name} {python} -V"
        for keeper in waiting
    ]
    if problems:
        raise UserError("verl launch: nothing was started:", *problems)
    return True


@dataclass
class _Watch:
    """The job from its start to its end."""

    keepers: Sequence[Keeper]
    noted: Sequence[int]
    out: Output
    err: Output
    codes: dict[str, int] = field(default_factory=dict)
    """Of the nodes that have ended, in that order."""
    stop_at: float | None = None
    """When the others are to be stopped."""

    is_killed: bool = False

    def until_the_end(self) -> int:
        while running := [keeper for keeper in self.keepers if keeper.name not in self.codes]:
            for keeper in running:
                if (code := keeper.code()) is not None:
                    self.codes[keeper.name] = code
                    self._on_end(keeper, code)
            self._on_interruption()
            if self._is_stopping:
                for keeper in running:
                    keeper.stop()
                if all(keeper.is_overdue for keeper in running):
                    break  # `close` tells of them
            time.sleep(_LOOK_SECONDS)
        if self.noted:
            return 128 + self.noted[0]
        return 128 + signal.SIGPIPE if self._is_unread else exit_code(list(self.codes.values()))

    @property
    def _is_stopping(self) -> bool:
        return self.stop_at is not None and time.monotonic() >= self.stop_at

    @property
    def _is_unread(self) -> bool:
        return self.out.is_broken or self.err.is_broken

    def _on_end(self, keeper: Keeper, code: int) -> None:
        if code == 0 or len(self.keepers) == 1 or self._is_stopping:
            return
        lost = code == LOST and not keeper.plan.is_here
        if self.stop_at is None:
            self.stop_at = time.monotonic() + (0.0 if lost else LINGER_SECONDS)
        rest = [other.name for other in self.keepers if other.name not in self.codes]
        if code != EXIT_CODE:  # which a rank has explained
            what = f"the connection to {keeper.name} is lost" if lost else f"{keeper.name} ended with code {code}"
            self.err.say(what + (f"; {', '.join(rest)} will be stopped" if rest else ""))

    def _on_interruption(self) -> None:
        if (self.noted or self._is_unread) and self.stop_at != 0.0:
            self.stop_at = 0.0
            if self.noted:
                self.err.say(f"{signal.Signals(self.noted[0]).name}: stopping the job (once more: killing it)")
        if len(self.noted) > 1 and not self.is_killed:
            self.is_killed = True
            for keeper in self.keepers:
                keeper.send(KILL)


def exit_code(codes: Sequence[int]) -> int:
    """A job's code from its nodes': a mistake of the user's explains all other ends."""
    if EXIT_CODE in codes:
        return EXIT_CODE
    return 1 if any(codes) else 0
