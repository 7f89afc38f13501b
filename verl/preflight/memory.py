"""What memory this process may have: the machine's, its container's limit, and /dev/shm."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import psutil

_UNLIMITED = 1 << 60
"""cgroup v1 writes "no limit" as a number of about 2 ** 63."""


@dataclass(frozen=True)
class Memory:
    """In bytes."""

    machine: int
    """Of the whole machine."""
    free: int
    """Available on the machine, swap included."""
    limit: int | None
    """The container's limit (cgroup). None: it has none."""
    left: int | None
    """What its processes may still take below that limit."""
    shm_size: int
    """Of /dev/shm."""
    shm_free: int

    @property
    def available(self) -> int:
        return self.free if self.left is None else min(self.free, self.left)


def memory() -> Memory:
    whole, swap = psutil.virtual_memory(), psutil.swap_memory()
    limit, left = cgroup_limit(Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")) or (None, None)
    shm_size, shm_free = _shared_memory(Path("/dev/shm"))
    return Memory(whole.total, whole.available + swap.free, limit, left, shm_size, shm_free)


def cgroup_limit(membership: Path, root: Path) -> tuple[int, int] | None:
    """(limit, bytes left below it) of the tightest memory limit on this process, by cgroup v2 or v1.

    Args:
        membership: /proc/self/cgroup.
        root: /sys/fs/cgroup. In a container it is often the container's own, while `membership` names the path that
            the machine sees: what does not exist below `root` is passed over.
    """
    found = []
    for line in membership.read_text().splitlines() if membership.exists() else []:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            top, names = root, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            top, names = root / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        own = top / path.strip("/")
        for folder in (own, *own.parents):
            if folder.is_relative_to(top) and (limit := _limit(folder / names[0])) is not None:
                # pages of files that nobody has touched for long are given up for whoever needs memory
                used = int((folder / names[1]).read_text()) - _statistic(folder / "memory.stat", names[2])
                found.append((limit, limit - used))
    return min(found, key=lambda pair: pair[1]) if found else None


def _limit(file: Path) -> int | None:
    text = file.read_text().strip() if file.is_file() else "max"
    return int(text) if text != "max" and int(text) < _UNLIMITED else None


def _statistic(file: Path, name: str) -> int:
    lines = file.read_text().splitlines() if file.is_file() else []
    return next((int(line.split()[1]) for line in lines if line.split()[0] == name), 0)


def _shared_memory(folder: Path) -> tuple[int, int]:
    if not folder.is_dir():
        return 0, 0
    status = os.statvfs(folder)
    return status.f_blocks * status.f_frsize, status.f_bavail * status.f_frsize
