"""The process between a rank and its reward worker: whatever the reward function has started ends with the worker.

The kernel ends a worker with its rank, but not what the worker has started. So the process that the rank starts stays
small, runs nothing of the user's, and has the worker as its child; what is orphaned below it becomes its child too. It
ends all of them as soon as the worker has ended, the rank orders it, or the rank is gone.
"""

from __future__ import annotations

import os
import resource
import signal

from verl.processes import die_with, end_descendants, keep_orphans, reap_orphans

ORDER = signal.SIGRTMIN
"""To the guard: end. A number that no terminal, scheduler or launcher sends to all processes of a job."""


def guarded(rank: int, connection: int) -> None:
    """Forks. The child, which is to be the worker, returns; this process becomes its guard and never returns.

    rank: the process that started this one. connection: the worker's file descriptor to it, which the guard closes.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # the guard takes them one by one
    die_with(rank, ORDER)
    keep_orphans()
    guard = os.getpid()
    worker = os.fork()
    if worker == 0:
        die_with(guard, signal.SIGKILL)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return
    os.close(connection)
    _wait(worker)
    end_descendants(patience=0.0)
    _end_as(worker)


def _wait(worker: int) -> None:
    """Until the worker has ended or this process is to end."""
    while _end_of(worker) is None:
        if signal.sigwaitinfo({ORDER, signal.SIGCHLD}).si_signo == ORDER:
            return
        reap_orphans(worker)


def _end_of(worker: int) -> os.waitid_result | None:
    return os.waitid(os.P_PID, worker, os.WEXITED | os.WNOHANG | os.WNOWAIT)


def _end_as(worker: int) -> None:
    """Ends as the worker has ended: the rank waits for this process, and tells the user how its worker ended."""
    end = _end_of(worker)
    if end is not None and end.si_code != os.CLD_EXITED:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # where a core is wanted, the worker has left one
        os.kill(os.getpid(), end.si_status)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {end.si_status})
    os._exit(end.si_status if end is not None else 1)
