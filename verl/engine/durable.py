"""Files that survive a power cut, and folders that appear whole or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from verl.errors import UserError


def part_of(target: Path) -> Path:
    """Where a folder that is to become `target` is written: beside it, so that one rename publishes it."""
    return target.with_name(f".{target.name}.part")


def write(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def copy(source: Path, target: Path) -> None:
    shutil.copyfile(source, target)
    sync(target)


def sync(path: Path) -> None:
    """Waits until a file's bytes, or a folder's names, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def start(target: Path) -> Path:
    """An empty folder to write `target` into, in place of what a killed attempt left."""
    part = part_of(target)
    if part.exists():
        shutil.rmtree(part)
    part.mkdir(parents=True)
    return part


def publish(target: Path) -> None:
    """What was written for `target`, each file of it durable already, becomes `target` by one rename.

    Whoever looks sees a whole folder or none. Replacing an older `target` takes two renames: a crash between them
    leaves no `target`.
    """
    part = part_of(target)
    for folder, _, _ in os.walk(part):
        sync(Path(folder))
    old = _out_of_sight(target) if target.exists() else None
    part.rename(target)
    sync(target.parent)
    if old is not None:
        shutil.rmtree(old)


def discard(folder: Path) -> None:
    """Removes a published folder; a crash in between leaves no half of it under its name."""
    shutil.rmtree(_out_of_sight(folder))


def leftovers(parent: Path) -> list[Path]:
    """What killed calls of `start`, `publish` and `discard` left in `parent`."""
    return [path for path in parent.glob(".*") if path.suffix in (".part", ".old") and path.is_dir()]


def _out_of_sight(folder: Path) -> Path:
    old = folder.with_name(f".{folder.name}.old")
    if old.exists():
        shutil.rmtree(old)
    return folder.rename(old)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Around the writing of a run's files: when the system refuses, a UserError with the file and the remedy.

    `path`: named where the system does not say which file it was.
    """
    try:
        yield
    except (OSError, RuntimeError) as error:
        refused = error if isinstance(error, OSError) else error.__context__  # torch.save hides what its file raised
        if not isinstance(refused, OSError):
            raise
        file = Path(refused.filename or path).absolute()
        raise UserError(
            f"trainer.run_dir: {file} cannot be written: {refused.strerror or refused}. Make room there and let this "
            "user write, keep fewer checkpoints (trainer.keep_checkpoints), or move the run's folder to another disk; "
            "started again, the run goes on from the newest whole checkpoint in it."
        ) from error
