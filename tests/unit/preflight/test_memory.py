"""Memory limits as the two kinds of cgroups write them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from verl.preflight.memory import cgroup_limit, memory

GIB = 1 << 30


def tree(root: Path, files: Mapping[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def membership(root: Path, text: str) -> Path:
    return tree(root, {"cgroup": text}) / "cgroup"


def v2(limit: str, used: int, inactive: int = 0) -> dict[str, str]:
    stat = f"anon 1\nfile 2\ninactive_file {inactive}\nactive_file 3\n"
    return {"memory.max": f"{limit}\n", "memory.current": f"{used}\n", "memory.stat": stat}


def test_v2_in_a_container_of_its_own(tmp_path: Path) -> None:
    root = tree(tmp_path / "fs", v2(str(8 * GIB), 3 * GIB, inactive=GIB))
    assert cgroup_limit(membership(tmp_path, "0::/\n"), root) == (8 * GIB, 6 * GIB)


def test_v2_without_a_limit(tmp_path: Path) -> None:
    root = tree(tmp_path / "fs", v2("max", 3 * GIB))
    assert cgroup_limit(membership(tmp_path, "0::/\n"), root) is None


def test_v2_takes_the_tightest_limit_above_it(tmp_path: Path) -> None:
    slices = {"a": v2(str(4 * GIB), 3 * GIB), "a/b": v2(str(8 * GIB), GIB), "a/b/c": v2("max", GIB)}
    root = tree(tmp_path / "fs", {f"{at}/{name}": text for at, files in slices.items() for name, text in files.items()})
    assert cgroup_limit(membership(tmp_path, "0::/a/b/c\n"), root) == (4 * GIB, GIB)


def v1(limit: int, used: int) -> dict[str, str]:
    return {
        "memory.limit_in_bytes": f"{limit}\n",
        "memory.usage_in_bytes": f"{used}\n",
        "memory.stat": f"cache 5\ninactive_file 7\ntotal_inactive_file {GIB}\n",
    }


def test_v1_whose_path_is_the_machines(tmp_path: Path) -> None:
    """In a container the mount is the container's own folder, and the path in /proc leads nowhere below it."""
    root = tree(tmp_path / "fs", {f"memory/{name}": text for name, text in v1(2 * GIB, 2 * GIB).items()})
    lines = "12:cpu,cpuacct:/docker/abc\n9:memory:/docker/abc\n0::/system.slice\n"
    assert cgroup_limit(membership(tmp_path, lines), root) == (2 * GIB, GIB)


def test_v1_without_a_limit(tmp_path: Path) -> None:
    root = tree(tmp_path / "fs", {f"memory/{name}": text for name, text in v1(9223372036854771712, GIB).items()})
    assert cgroup_limit(membership(tmp_path, "9:memory:/\n"), root) is None


def test_no_cgroups_at_all(tmp_path: Path) -> None:
    assert cgroup_limit(tmp_path / "nowhere", tmp_path) is None


def test_this_machine() -> None:
    found = memory()
    assert 0 < found.available <= found.free
    assert found.free <= found.machine or found.limit is None
    assert 0 <= found.shm_free <= found.shm_size
