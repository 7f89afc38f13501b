"""A line is written at once, so that lines of several ranks do not mix."""

from __future__ import annotations

import socket
import subprocess
import sys

PRINTS = "print('one', 'line'); print('another'); raise SystemExit('the end')"
WHOLE = "from verl.cli.whole_lines import write_whole_lines; write_whole_lines(); "


def writes(code: str) -> list[bytes]:
    """What each call of write() carried: a datagram socket keeps them apart. As torchrun starts a rank."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    with ours:
        with theirs:
            subprocess.run([sys.executable, "-u", "-c", code], stdout=theirs, stderr=theirs, timeout=300)
        ours.setblocking(False)
        found = []
        while True:
            try:
                found.append(ours.recv(1 << 16))
            except BlockingIOError:
                return found
            except ConnectionResetError:
                return found


def test_unbuffered_python_cuts_lines() -> None:
    """If it no longer does, write_whole_lines can go."""
    assert not all(part.endswith(b"\n") for part in writes(PRINTS))


def test_every_write_is_a_whole_line() -> None:
    assert writes(WHOLE + PRINTS) == [b"one line\n", b"another\n", b"the end\n"]


def test_output_is_not_held_back_where_the_process_is_killed() -> None:
    assert writes(WHOLE + "import os, signal; print('last words'); os.kill(os.getpid(), signal.SIGKILL)") == [
        b"last words\n"
    ]
