"""One node's end of `verl launch`: runs what it is told on standard input, and leaves nothing running when that closes.

    python -m verl.launch.node [--greet]

Input: a line with an `Order`, then lines: "" (the launcher lives), "stop" (SIGTERM), "kill" (at once). Where the input
closes, or nothing comes for SILENCE_SECONDS, the launcher or the connection is gone, and the job is stopped. Output is
the job's, after a line GREETING for who waits for the connection. Exit code: the job's.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import psutil

from verl.errors import EXIT_CODE
from verl.launch.plan import Order

GREETING = "verl launch: connected"
STOP, KILL, ALIVE = b"stop\n", b"kill\n", b"\n"
ALIVE_SECONDS = 5.0
"""How often the launcher says that it lives."""
SILENCE_SECONDS = 60.0
GRACE_SECONDS = 40.0
"""From SIGTERM to SIGKILL. torchrun itself gives its ranks 30."""
ORPHAN_SECONDS = 5.0
"""From SIGTERM to SIGKILL for what the job has left running."""
KILL_SECONDS = 10.0
"""For what was killed to be gone."""
LOOK_SECONDS = 0.2

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


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
        end_descendants(patience=ORPHAN_SECONDS)


def start(order: Order) -> subprocess.Popen[bytes]:
    """The job, in a session of its own. It gets SIGTERM from the kernel should this process be killed."""
    libc, parent = ctypes.CDLL(None, use_errno=True), os.getpid()

    def before_exec() -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # what is ignored here would stay ignored there
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:
            os.kill(os.getpid(), signal.SIGTERM)

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
            end_descendants(patience=0.0)


def keep_orphans() -> None:
    """Descendants whose parent ends become this process's children: so none can get away from it."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed: ranks could outlive the launch")


def reap_orphans(job: int) -> None:
    """Takes away the zombies among the children that others have left; the job's own end is its Popen's to see."""
    while (ended := _ended_child()) is not None and ended != job:
        os.waitpid(ended, 0)


def _ended_child() -> int | None:
    try:
        found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return None
    return found.si_pid if found is not None else None


def end_descendants(patience: float) -> None:
    """SIGTERM to all of them, after `patience` seconds SIGKILL until none is left, those born meanwhile included."""
    begin = time.monotonic()
    told: set[psutil.Process] = set()  # a second SIGTERM would cut off what a process does about the first
    while family := _descendants():
        impatient = time.monotonic() >= begin + patience
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):  # it has ended by itself
                if impatient:
                    process.kill()
                elif process not in told:
                    process.terminate()
        told.update(family)
        if time.monotonic() > begin + patience + KILL_SECONDS:
            say(f"verl launch: cannot be killed, a device or a file system may hang: {[p.pid for p in family]}")
            return
        time.sleep(0.05)


def _descendants() -> list[psutil.Process]:
    """Those that live. A zombie does not."""
    living = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.status() != psutil.STATUS_ZOMBIE:
                living.append(process)
    return living


def say(line: str, fd: int = 2) -> None:
    """A line to the launcher. Nobody may read any more, and this process has still to end the job."""
    with contextlib.suppress(OSError):
        os.write(fd, f"{line}\n".encode())


if __name__ == "__main__":
    sys.exit(main())
