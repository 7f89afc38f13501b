"""One reward worker as its rank sees it: start it, have a sample scored within a limit, end it.

What the rank starts, waits for and ends is the worker's guard; it speaks with the worker itself.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from verl.rewards.guard import ORDER
from verl.rewards.resolve import FunctionSpec
from verl.rewards.worker import BOOTSTRAP, HEADER

logger = logging.getLogger(__name__)

LOOK_ROUND = 0.2
"""Seconds between looks at whether the worker still lives and is still wanted, while it works."""

REPLY_LIMIT = 16 << 20
"""Bytes of a reply; more is no reply of ours."""

KILL_LIMIT = 10.0
"""Seconds that a process which ends is waited for."""


class WorkerTimeout(Exception):
    """The worker did not answer within the limit."""


class WorkerDied(Exception):
    """The worker ended or no longer speaks the protocol; the message says how."""


class Unwanted(Exception):
    """The pool closes; nobody waits for the answer."""


class WorkerProcess:
    """A worker in a session of its own, with a socket to it.

    Not shared between threads, and the thread that creates it must outlive it: the worker dies with that thread. After
    any of the exceptions above it can only be killed.
    """

    def __init__(self, spec: FunctionSpec, unwanted: Callable[[], bool]) -> None:
        """Starts the process and returns at once; `wait_ready` waits. `unwanted` is asked while waiting."""
        self._unwanted = unwanted
        self._connection, theirs = socket.socketpair()
        with theirs:
            arguments = (json.dumps(sys.path), str(theirs.fileno()), str(os.getpid()))
            self._process = subprocess.Popen(
                [sys.executable, "-c", BOOTSTRAP, *arguments],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                # Away from the rank's process group, which a terminal and torchrun signal as a whole; and a group that
                # can be killed together with whatever the function started.
                start_new_session=True,
                # The order of a set of strings, which a score may depend on, is the same in all workers and all runs.
                env={**os.environ, "PYTHONHASHSEED": "0"},
            )
        self._first_message = pickle.dumps(spec)

    @property
    def pid(self) -> int:
        """Of the worker's guard."""
        return self._process.pid

    def wait_ready(self, limit: float) -> None:
        """Waits up to `limit` seconds until the function is imported. Raises `ValueError` with what is wrong with it,
        or one of the exceptions above.
        """
        reply = self._ask(self._first_message, limit)
        if "refused" in reply:
            raise ValueError(reply["refused"])

    def score(self, arguments: dict[str, Any], limit: float) -> dict[str, Any]:
        """The function's reply for one sample: `score` and `extra`, or `error` with a traceback. Raises one of the
        exceptions above.
        """
        return self._ask(pickle.dumps(arguments), limit)

    def has_exited(self) -> bool:
        """Whether it has, while it was not asked for anything."""
        return self._exit_status() is not None or self._has_hung_up()

    def kill(self) -> None:
        """Ends the worker and what its function started, at once."""
        self._connection.close()
        if self._process.returncode is not None:  # done before; the group's number may be another's by now
            return
        deadline = time.monotonic() + KILL_LIMIT
        if self._exit_status() is None:
            os.kill(self.pid, ORDER)
        while self._exit_status() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        # A guard that hangs or was killed itself leaves the worker's group behind, whose number is no other's yet.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        try:
            self._process.wait(KILL_LIMIT)
        except subprocess.TimeoutExpired:
            logger.warning("The reward worker %d has not ended %.0f s after SIGKILL", self.pid, KILL_LIMIT)

    def _ask(self, payload: bytes, limit: float) -> dict[str, Any]:
        deadline = time.monotonic() + limit
        try:
            self._send(HEADER.pack(len(payload)) + payload, deadline)
            size = HEADER.unpack(self._receive(HEADER.size, deadline))[0]
            if size > REPLY_LIMIT:
                raise WorkerDied(f"its worker announced a reply of {size} bytes; did the function write to its socket?")
            return json.loads(self._receive(size, deadline))
        except OSError as error:  # it ended while it was sent to
            raise WorkerDied(self._how_it_ended()) from error
        except ValueError as error:
            raise WorkerDied("its worker sent what is no JSON; did the function write to its socket?") from error

    def _send(self, data: bytes, deadline: float) -> None:
        rest = memoryview(data)
        while rest:
            self._connection.settimeout(_patience(deadline))
            try:
                rest = rest[self._connection.send(rest) :]
            except TimeoutError:
                if (over := self._over(deadline)) is not None:
                    raise over from None

    def _receive(self, size: int, deadline: float) -> bytes:
        data = bytearray()
        over: Exception | None = None
        while len(data) < size:
            self._connection.settimeout(_patience(deadline))
            try:
                part = self._connection.recv(size - len(data))
            except TimeoutError:
                if over is not None:
                    raise over from None
                # Once it is over there is one more try: the interpreter's lock may have kept this thread for long, and
                # an answer that is there counts.
                over = self._over(deadline)
                continue
            if not part:
                raise WorkerDied(self._how_it_ended())
            data += part
        return bytes(data)

    def _over(self, deadline: float) -> Exception | None:
        """Why there is nothing more to wait for, if so."""
        if self._unwanted():
            return Unwanted()
        if self._exit_status() is not None:  # its socket still open in a process that the function started
            return WorkerDied(self._how_it_ended())
        return WorkerTimeout() if time.monotonic() >= deadline else None

    def _how_it_ended(self) -> str:
        """For messages. Its socket closes a moment before the process is gone, hence the wait."""
        deadline = time.monotonic() + KILL_LIMIT
        while (status := self._exit_status()) is None:
            if time.monotonic() > deadline:
                return "its worker closed the socket; did the function close it?"
            time.sleep(0.01)
        if status.si_code == os.CLD_EXITED:
            return f"its worker exited with code {status.si_status}"
        name = signal.Signals(status.si_status).name
        return f"its worker was killed by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")

    def _has_hung_up(self) -> bool:
        """The worker has ended, and its guard is about to."""
        self._connection.setblocking(False)
        try:
            return not self._connection.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except ConnectionResetError:
            return True

    def _exit_status(self) -> os.waitid_result | None:
        """None while it runs. Leaves it unreaped: so its process group's number is no other's when `kill` uses it."""
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)


def _patience(deadline: float) -> float:
    return max(0.001, min(deadline - time.monotonic(), LOOK_ROUND))
