"""What a whole checkpoint consists of, and how to tell one from a broken one."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from verl.engine import durable

MANIFEST = "manifest.json"
TRAINER = "trainer.json"
FORMAT = 1
_NAME = re.compile(r"step_(\d+)")


class BrokenCheckpointError(ValueError):
    """A checkpoint that is not whole; the message says what is wrong with it."""


@dataclass(frozen=True)
class Manifest:
    """Written last, so that a folder that has it had everything else."""

    step: int
    """Steps done."""
    world: int
    """Ranks of the job that wrote it."""
    meshes: dict[str, Any]
    """For each role its ranks as nested lists [pp][dp][tp], or [pp][copy][dp of a copy][tp]."""
    files: dict[str, int]
    """Every other file's size in bytes, by its path in the folder."""
    format: int = FORMAT

    def write(self, folder: Path) -> None:
        durable.write(folder / MANIFEST, json.dumps(asdict(self), indent=1).encode())


@dataclass(frozen=True)
class Found:
    """A checkpoint that is whole."""

    folder: Path
    manifest: Manifest

    @property
    def step(self) -> int:
        return self.manifest.step

    @property
    def trainer_state(self) -> dict[str, Any]:
        return json.loads((self.folder / TRAINER).read_bytes())


def find(folder: Path) -> Found:
    """The checkpoint in `folder`. Raises BrokenCheckpointError unless every file has its size and the JSON is JSON."""
    try:
        found = Found(folder, Manifest(**json.loads((folder / MANIFEST).read_bytes())))
        _ = found.trainer_state
    except FileNotFoundError as error:
        raise BrokenCheckpointError(f"{folder} has no {Path(error.filename).name}") from error
    except (ValueError, TypeError, OSError) as error:
        raise BrokenCheckpointError(f"{folder} cannot be read: {error}") from error
    if found.manifest.format != FORMAT:
        raise BrokenCheckpointError(f"{folder} has format {found.manifest.format}; this version reads format {FORMAT}")
    for name, size in found.manifest.files.items():
        file = folder / name
        if not file.is_file():
            raise BrokenCheckpointError(f"{folder} has lost its file {name}")
        if file.stat().st_size != size:
            raise BrokenCheckpointError(f"{file} has {file.stat().st_size} bytes, not {size}")
    return found


def sizes(folder: Path) -> dict[str, int]:
    """Every file below `folder` with its size in bytes."""
    return {str(p.relative_to(folder)): p.stat().st_size for p in sorted(folder.rglob("*")) if p.is_file()}


def step_folder(parent: Path, step: int) -> Path:
    return parent / f"step_{step}"


def step_folders(parent: Path) -> dict[int, Path]:
    """The published checkpoints, whole or not, in the order of their steps."""
    matches = [(_NAME.fullmatch(path.name), path) for path in parent.glob("step_*")]
    return dict(sorted((int(match[1]), path) for match, path in matches if match))
