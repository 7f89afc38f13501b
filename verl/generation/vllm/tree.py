"""The processes of an engine (one session: the engine and its workers) and the shared memory that they leave behind."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

_SHARED_MEMORY = Path("/dev/shm")
# What vLLM makes there and may leave: message queues (Python's SharedMemory) and the CPU's tensor-parallel exchange.
_SEGMENT_NAME = re.compile(r"/dev/shm/(psm_\w+|\S+-cpushm\S*)")


def session_members(session: int) -> list[int]:
    """Living processes of a session. A zombie does not live."""
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit() and _is_member(entry, session)]


def shared_segments(session: int) -> set[Path]:
    """Files in /dev/shm that vLLM made and that processes of the session have mapped."""
    return {path for pid in session_members(session) for path in _mapped_segments(pid)}


def remove_segments(paths: Iterable[Path]) -> None:
    """Takes away the names; the memory goes with the last process that has it mapped."""
    for path in paths:
        path.unlink(missing_ok=True)


def _is_member(process: Path, session: int) -> bool:
    try:
        # Behind the command's name, which may hold spaces and brackets: state, parent, process group, session.
        state, _, _, found = (process / "stat").read_text().rpartition(")")[2].split()[:4]
    except (FileNotFoundError, ProcessLookupError):
        return False  # it ended since the folder was listed
    return int(found) == session and state != "Z"


def _mapped_segments(pid: int) -> set[Path]:
    try:
        maps = Path(f"/proc/{pid}/maps").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return set()
    return {_SHARED_MEMORY / name for name in _SEGMENT_NAME.findall(maps)}
