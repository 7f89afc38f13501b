"""A node's process (`verl.launch.node`, here or behind ssh) as the launcher sees it."""

from __future__ import annotations

import contextlib
import os
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from verl.launch.node import GRACE_SECONDS, GREETING, ORPHAN_SECONDS, STOP
from verl.launch.plan import NodePlan
from verl.launch.streams import LineSplitter, Output
from verl.processes import KILL_SECONDS

END_SECONDS = GRACE_SECONDS + ORPHAN_SECONDS + KILL_SECONDS + 10.0
"""From the stop until a node that has not ended is given up; the last ten for what lies between."""
_KEPT_LINES = 20
_DRAIN_SECONDS = 5.0
_CHUNK = 1 << 16


class Keeper:
    """It stops its job when the pipe to it closes, so also when this process is killed."""

    def __init__(self, plan: NodePlan, command: Sequence[str], out: Output | None, err: Output) -> None:
        """Starts the process. `out` None: the job writes straight to where this process does, and nobody greets."""
        self.plan = plan
        self.name = plan.name or "this machine"
        self._is_greeted = out is None
        self._greeting = threading.Lock()
        self._sending = threading.Lock()
        self._stopped_at: float | None = None
        self._before: deque[bytes] = deque(maxlen=_KEPT_LINES)
        """What came on standard error before the greeting: ssh's complaints, if there will be none."""
        pipe = None if out is None else subprocess.PIPE
        # A session of its own: what a terminal signals to the launcher is the launcher's to pass on.
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=pipe, stderr=pipe, start_new_session=True
        )
        self._readers: list[threading.Thread] = []
        if out is not None:
            assert self._process.stdout is not None and self._process.stderr is not None
            self._read(self._process.stdout.fileno(), lambda line: self._on_stdout(line, out, err))
            self._read(self._process.stderr.fileno(), lambda line: self._on_stderr(line, err))

    @property
    def is_connected(self) -> bool:
        return self._is_greeted

    @property
    def said_before(self) -> str:
        return b"\n".join(self._before).decode(errors="replace")

    def code(self) -> int | None:
        """The exit code, None while it runs. All its output has been written by then."""
        code = self._process.poll()
        if code is not None:
            for reader in self._readers:
                reader.join(_DRAIN_SECONDS)
        return code

    def send(self, line: bytes) -> None:
        assert self._process.stdin is not None
        # it may have ended, which `code` tells, or be closed
        with self._sending, contextlib.suppress(BrokenPipeError, ValueError):
            self._process.stdin.write(line)
            self._process.stdin.flush()

    def stop(self) -> None:
        """Has the job end in order, if it still runs; it is not waited for. Once is enough."""
        if self._stopped_at is None:
            self._stopped_at = time.monotonic()
            if not self.is_connected:  # then there is no job, and ssh may try for long
                self._process.terminate()
            self.send(STOP)

    def close(self) -> bool:
        """Stops what still runs and waits for it. Whether it has ended; if not, it is beyond reach."""
        self.stop()
        assert self._process.stdin is not None and self._stopped_at is not None
        with self._sending, contextlib.suppress(BrokenPipeError):  # it has ended, with something sent and not read
            self._process.stdin.close()
        try:
            self._process.wait(max(0.1, self._stopped_at + END_SECONDS - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._process.kill()  # the one here
            self._process.wait()
            return False
        return True

    @property
    def is_overdue(self) -> bool:
        """It was told to stop and should have ended by now."""
        return self._stopped_at is not None and time.monotonic() > self._stopped_at + END_SECONDS

    def _read(self, fd: int, on_line: Callable[[bytes], None]) -> None:
        def read() -> None:
            lines = LineSplitter()
            while raw := os.read(fd, _CHUNK):
                for line in lines.feed(raw):
                    on_line(line)
            for line in lines.close():
                on_line(line)

        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        self._readers.append(reader)

    def _on_stdout(self, line: bytes, out: Output, err: Output) -> None:
        if self._is_greeted or not line.endswith(GREETING.encode()):  # a login shell may have left a line without end
            out.line(self.name, line)
            return
        with self._greeting:
            self._is_greeted = True
            for warning in self._before:  # as there were no complaints
                err.line(self.name, warning)

    def _on_stderr(self, line: bytes, err: Output) -> None:
        with self._greeting:
            if not self._is_greeted:
                self._before.append(line)
                return
        err.line(self.name, line)
