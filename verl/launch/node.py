"""One node's end of `verl launch`: runs what it is told on standard input, and leaves nothing running when that closes.

    python -m verl.launch.node [--greet]

Input: a line with an `Order`, then lines: "" (the launcher lives), "stop" (SIGTERM), "kill" (at once). Where the input
closes, or nothing comes for SILENCE_SECONDS, the launcher or the connection is gone, and the job is stopped. Output is
the job's, after a line GREETING for who waits for the connection. Exit code: the job's.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from verl.errors import EXIT_CODE
from verl.launch.plan import Order
from verl.processes import die_with, end_descendants, keep_orphans, reap_orphans

GREETING = "verl launch: connected"
STOP, KILL, ALIVE = b"stop\n", b"kill\n", b"\n"
ALIVE_SECONDS = 5.0
"""How often the launcher says that it lives."""
SILENCE_SECONDS = 60.0
GRACE_SECONDS = 40.0
"""From SIGTERM to SIGKILL. torchrun itself gives its ranks 30."""
ORPHAN_SECONDS = 5.0
"""From SIGTERM to SIGKILL for what the job has left running."""
LOOK_SECONDS = 0.2


def main() -> int:
    if "--greet" in sys.argv[1:]:
        say(GREETING, sys.stdout.fileno())
    # A terminal sends SIGINT and SIGHUP to all that it has started; the launcher decides what becomes of the job.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    orders = Orders(sys.stdin.fileno())
    signal.signal(signal.SIGTERM, lambda number, frame: orders.lines.append(STOP))
    line = orders.next_line()
    if line is None or line in (STOP, KILL):
        return 128 + signal.SIGTERM
    order = Order.from_line(line)
    keep_orphans()
    try:
        job = start(order)
    except OSError as error:
        say(
            f"verl launch: cannot run {order.command[0]} in {order.workdir}: {error.strerror}: {error.filename}; both "
            "must be on every node (--workdir DIR for another folder)"
        )
        return EXIT_CODE
    try:
        return keep(job, orders)
    finally:
        end_all(patience=ORPHAN_SECONDS)


def start(order: Order) -> subprocess.Popen[bytes]:
    """The job, in a session of its own. It gets SIGTERM from the kernel should this process be killed."""
    parent = os.getpid()

    def before_exec() -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # what is ignored here would stay ignored there
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        die_with(parent, signal.SIGTERM)

    return subprocess.Popen(
        order.command,
        cwd=order.workdir,
        env={**os.environ, **order.environment},
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=before_exec,
    )


@dataclass
class Orders:
    """Lines from the launcher."""

    fd: int
    lines: list[bytes] = field(default_factory=list)
    heard: float = field(default_factory=time.monotonic)
    _closed: bool = False
    _rest: bytes = b""

    @property
    def is_lost(self) -> bool:
        """No launcher any more, as far as can be seen from here."""
        return self._closed or time.monotonic() > self.heard + SILENCE_SECONDS

    def look(self, seconds: float) -> None:
        """Takes in what has come, and waits up to so long for it."""
        if self._closed:
            time.sleep(seconds)
            return
        if not select.select([self.fd], [], [], seconds)[0]:
            return
        try:
            raw = os.read(self.fd, 1 << 16)
        except ConnectionResetError:  # where sshd gives a socket and is killed
            raw = b""
        self._closed, self.heard = not raw, time.monotonic()
        *whole, self._rest = (self._rest + raw).split(b"\n")
        self.lines += [line + b"\n" for line in whole]

    def next_line(self) -> bytes | None:
        """The next line that says more than that the launcher lives; None where it is lost before."""
        while True:
            for line in self.take():
                return line
            if self.is_lost:
                return None
            self.look(LOOK_SECONDS)

    def take(self) -> Iterator[bytes]:
        while self.lines:
            line = self.lines.pop(0)
            if line != ALIVE:
                yield line


def keep(job: subprocess.Popen[bytes], orders: Orders) -> int:
    """Watches job and launcher until the job has ended. Returns its exit code, 128 + number for a signal."""
    deadline: float | None = None  # for a job that was told to stop
    while True:
        orders.look(LOOK_SECONDS)
        reap_orphans(job.pid)
        if (code := job.poll()) is not None:
            return code if code >= 0 else 128 - code
        for line in orders.take():
            if line == KILL:
                deadline = 0.0
            elif deadline is None:
                job.terminate()
                deadline = time.monotonic() + GRACE_SECONDS
        if deadline is None and orders.is_lost:
            say("verl launch: the launcher or the connection to it is gone; the job is stopped")
            job.terminate()
            deadline = time.monotonic() + GRACE_SECONDS
        if deadline is not None and time.monotonic() > deadline:
            end_all(patience=0.0)


def end_all(patience: float) -> None:
    """Ends what the job has left running, and tells what cannot be ended."""
    if left := end_descendants(patience):
        say(f"verl launch: cannot be killed, a device or a file system may hang: {left}")


def say(line: str, fd: int = 2) -> None:
    """A line to the launcher. Nobody may read any more, and this process has still to end the job."""
    with contextlib.suppress(OSError):
        os.write(fd, f"{line}\n".encode())


if __name__ == "__main__":
    sys.exit(main())
