"""This process ends itself, from a thread: the main one may hang in a wait that cannot be interrupted."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Sequence
from typing import NoReturn

EXIT_SECONDS = 10.0
"""What the clean-up may take."""

_ending = threading.Lock()


def end_process(message: str, stops: Sequence[Callable[[], None]], leave: Callable[[], NoReturn]) -> NoReturn:
    """Says why, stops the children, and leaves, by force where stopping takes longer than EXIT_SECONDS.

    Of several threads that come here the first one does it, and the others wait for the end.

    message: for standard error. stops: called one after the other. leave: ends the process.
    """
    _ending.acquire()  # for good
    with contextlib.suppress(OSError):  # nobody may read any more
        sys.stderr.write(f"verl: {message}\n")
        sys.stderr.flush()
    by_force = threading.Timer(EXIT_SECONDS, leave)
    by_force.daemon = True
    by_force.start()
    try:
        for stop in stops:
            stop()
    finally:
        leave()
