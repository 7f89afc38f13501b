"""Files of one JSON object a line, which a process may be killed while writing."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """The objects of a file; none if there is no file. A last line without its end, cut off by a kill, is left out.

    Raises ValueError, with file and line, if any other line is not JSON.
    """
    if not path.exists():
        return []
    rows: list[dict[str, Any]] = []
    # as bytes: the cut may go through a character
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                break
            try:
                rows.append(json.loads(line))
            except ValueError as error:
                message = f"{path}, line {number} is not JSON ({error}): {line[:80]!r}; repair or delete the line"
                raise ValueError(message) from error
    return rows


def write_jsonl(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write a whole file: a reader sees the old one or the new one, whenever the process ends."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    with unfinished.open("w", encoding="utf-8") as file:
        file.writelines(map(_line, rows))
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)


class JsonLines:
    """A file that grows by objects with a "step". Opened anew, it forgets the steps that are about to be done again."""

    def __init__(self, path: Path, first_step: int) -> None:
        """`first_step` is the first step this process will write: older lines stay, those of it and later ones go."""
        write_jsonl(path, [row for row in read_jsonl(path) if row["step"] < first_step])
        self._file = path.open("a", encoding="utf-8")

    def append(self, rows: Iterable[Mapping[str, Any]]) -> None:
        self._file.writelines(map(_line, rows))
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def _line(row: Mapping[str, Any]) -> str:
    """Strict JSON: numbers that are not finite are an error, and what JSON does not know is written as its str()."""
    text = json.dumps(row, ensure_ascii=False, allow_nan=False, default=str)
    # a lone surrogate, which UTF-8 cannot hold, becomes JSON's own escape
    return text.encode("utf-8", "backslashreplace").decode("utf-8") + "\n"
