"""What a rank prints, beside other ranks that write to the same terminal, file or pipe."""

from __future__ import annotations

import io
import sys


def write_whole_lines() -> None:
    """Has standard output and error write a line that is printed at once, its end included.

    torchrun starts Python unbuffered (-u), which writes what is printed and the end of the line apart, so that another
    rank's line may come between. Nothing is held back longer than to the end of its line. (Of several lines in one
    print the last still has its end apart.)
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a notebook or a test may have put something else there
            stream.reconfigure(line_buffering=True, write_through=False)
