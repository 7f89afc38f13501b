"""Prompt files: parquet and JSON lines, opened whole, parsed a row at a time."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.parquet as pq

from verl.data.rows import RowError
from verl.errors import UserError


class PromptFile(Protocol):
    path: Path

    def __len__(self) -> int:
        """Rows in the file."""
        ...

    def row(self, i: int) -> dict[str, Any]:
        """Row i, from 0. Raises `RowError`, without the row's place, if it is no mapping."""
        ...

    def place(self, i: int) -> str:
        """Where row i is, for messages."""
        ...


class ParquetFile:
    """A parquet file whose wanted columns are held in memory as Arrow, far smaller than Python objects."""

    def __init__(self, path: Path, required: Iterable[str], optional: Iterable[str]) -> None:
        self.path = path
        try:
            with pq.ParquetFile(path) as file:
                present = file.schema_arrow.names
                missing = [name for name in required if name not in present]
                if not missing:
                    wanted = [name for name in (*required, *optional) if name in present]
                    self._table = file.read(columns=wanted)
        except (pa.ArrowException, OSError) as error:
            raise UserError(f"{path}: cannot be read as parquet: {error}") from error
        if missing:
            raise UserError(f"{path}: no column {', '.join(map(repr, missing))}; the file has {', '.join(present)}")

    def __len__(self) -> int:
        return self._table.num_rows

    def row(self, i: int) -> dict[str, Any]:
        return self._table.slice(i, 1).to_pylist()[0]

    def place(self, i: int) -> str:
        return f"{self.path}, row {i}"


class JsonlFile:
    """A file with one JSON object a line. Blank lines are no rows."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            lines = path.read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n")
        except OSError as error:
            raise UserError(f"{path}: cannot be read: {error}") from error
        self._numbers = [number for number, line in enumerate(lines, start=1) if line.strip()]
        self._lines = [lines[number - 1] for number in self._numbers]

    def __len__(self) -> int:
        return len(self._lines)

    def row(self, i: int) -> dict[str, Any]:
        try:
            value = json.loads(self._lines[i])
        except (ValueError, RecursionError) as error:  # a JSON error, an encoding error, an integer without end
            raise RowError(f"not valid JSON: {error}") from error
        if not isinstance(value, dict):
            raise RowError(f"a JSON {type(value).__name__}, not an object")
        return value

    def place(self, i: int) -> str:
        return f"{self.path}, row {i} (line {self._numbers[i]})"


def open_file(name: str, prompt_key: str, needs_ground_truth: bool) -> PromptFile:
    """Opens a prompt file by its suffix, `.parquet` or `.jsonl`.

    Raises `ValueError` for a file that is missing, unreadable, empty, of another kind, or a parquet file that lacks a
    column.
    """
    path = Path(name).expanduser()
    if not path.is_file():
        raise UserError(f"{path}: {'not a file' if path.exists() else 'no such file'} (looked from {Path.cwd()})")
    file: PromptFile
    if path.suffix == ".parquet":
        rewarded = ("data_source", "reward_model")
        required, optional = (rewarded, ()) if needs_ground_truth else ((), rewarded)
        file = ParquetFile(path, (prompt_key, *required), (*optional, "extra_info"))
    elif path.suffix == ".jsonl":
        file = JsonlFile(path)
    else:
        raise UserError(
            f"{path}: the name ends in {path.suffix or 'no suffix'!r}; give .parquet or .jsonl (a line each)"
        )
    if len(file) == 0:
        raise UserError(f"{path}: the file has no rows")
    return file
