"""The output of many nodes on one terminal: whole lines, each with its node in front."""

from __future__ import annotations

import os
import re
import threading
from typing import IO

LONGEST_LINE = 1 << 20
"""Bytes; a longer line is cut, so that memory stays bounded."""


class LineSplitter:
    """Bytes as they come -> whole lines. A carriage return ends a line too: progress bars write no other end."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, raw: bytes) -> list[bytes]:
        text, begin, lines = self._rest + raw, 0, []
        for end in re.finditer(rb"\r\n|\n|\r", text):
            if end[0] == b"\r" and end.end() == len(text):
                break  # a line feed may follow
            line = text[begin : end.start()]
            if line or end[0] != b"\r":
                lines.append(line)
            begin = end.end()
        self._rest = text[begin:]
        if len(self._rest) >= LONGEST_LINE:
            lines.append(self._rest)
            self._rest = b""
        return lines

    def close(self) -> list[bytes]:
        """What was left without an end."""
        rest, self._rest = self._rest.removesuffix(b"\r"), b""
        return [rest] if rest else []


class Output:
    """A stream that several threads write lines to."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self._lock = threading.Lock()
        self.is_broken = False
        """Its reader, such as `head`, has gone. Further lines are dropped."""

    def line(self, node: str, line: bytes) -> None:
        self._write(f"{node} | ".encode() + line + b"\n")

    def say(self, text: str) -> None:
        """A message of the launcher's own."""
        self._write(f"verl launch: {text}\n".encode())

    def _write(self, raw: bytes) -> None:
        with self._lock:
            if self.is_broken:
                return
            try:
                self._stream.write(raw)
                self._stream.flush()
            except BrokenPipeError:
                self.is_broken = True
                # what is still buffered would be written at exit, and Python's exit code would be about that
                os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())
