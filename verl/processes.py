"""How Linux processes end: by themselves, with their parent, and with all of their descendants."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import sys
import time
from collections.abc import Callable
from typing import NoReturn

import psutil

KILL_SECONDS = 10.0
"""For what was killed to be gone."""

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def exit_with(main: Callable[[], int]) -> NoReturn:
    """Runs `main` and exits with what it returns, after all exit handlers that are set from here on, and without
    taking the interpreter apart.

    A thread of gloo may have a tensor of the last message to release yet. Python before 3.14 ends a thread that asks
    for its lock in the midst of finalisation, which C++ makes an abort of: a run that is done would have failed.
    """
    returned: list[int] = []

    def leave() -> None:
        if returned:  # otherwise an exception is on its way out
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(OSError, ValueError):  # nobody reads it any more; it has been closed
                    stream.flush()
            os._exit(returned[0])

    atexit.register(leave)  # the first that is set is the last that runs
    returned.append(main())
    sys.exit(returned[0])


def die_with(parent: int, number: int) -> None:
    """Has the kernel send this process the signal `number` as soon as the thread that started it ends, by any cause.

    parent: the process of that thread; where it is gone already, the signal comes now.
    """
    _prctl(_PR_SET_PDEATHSIG, number, "this process could outlive its parent")
    if os.getppid() != parent:
        os.kill(os.getpid(), number)


def keep_orphans() -> None:
    """Descendants whose parent ends become this process's children: so none can get away from it."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1, "a descendant could outlive this process")


def reap_orphans(child: int) -> None:
    """Takes away the zombies among the children that others have left; the end of `child` is left to who waits for it.

    Stops at `child` once that has ended.
    """
    while (ended := _ended_child()) is not None and ended != child:
        os.waitpid(ended, 0)


def end_descendants(patience: float) -> list[int]:
    """SIGTERM to all of them, after `patience` seconds (0: at once) SIGKILL until none is left, new ones included.

    Returns those that have not ended KILL_SECONDS later: a device or a file system hangs, or they are another user's.
    """
    begin = time.monotonic()
    told: set[psutil.Process] = set()  # a second SIGTERM would cut off what a process does about the first
    while family := _descendants():
        impatient = time.monotonic() >= begin + patience
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):  # it has ended, or is another user's
                if impatient:
                    process.kill()
                elif process not in told:
                    process.terminate()
        told.update(family)
        if time.monotonic() > begin + patience + KILL_SECONDS:
            return [process.pid for process in family]
        time.sleep(0.05)
    return []


def _descendants() -> list[psutil.Process]:
    """Those that live. A zombie does not."""
    living = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.status() != psutil.STATUS_ZOMBIE:
                living.append(process)
    return living


def _ended_child() -> int | None:
    try:
        found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return None
    return found.si_pid if found is not None else None


def _prctl(option: int, value: int, otherwise: str) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}) failed: {otherwise}")
