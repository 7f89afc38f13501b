"""The house's own rules, where neither ruff nor the import contracts can say them. CONTRIBUTING.md has the reasons."""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = [*sorted((ROOT / "verl").rglob("*.py")), ROOT / "train_ppo.py"]
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 80
MAKES_A_GROUP = {"new_group", "new_subgroups", "new_subgroups_by_enumeration", "split_group", "init_device_mesh"}


def place(path: Path, line: int) -> str:
    return f"{path.relative_to(ROOT)}:{line}"


def nodes(path: Path) -> Iterator[ast.AST]:
    return ast.walk(ast.parse(path.read_text(), filename=str(path)))


def called_name(call: ast.Call) -> str:
    match call.func:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
    return ""


def calls(path: Path) -> Iterator[tuple[str, int]]:
    return ((called_name(node), node.lineno) for node in nodes(path) if isinstance(node, ast.Call))


def imported_packages(path: Path) -> Iterator[tuple[str, int]]:
    """Top-level packages that a file imports, inside functions too."""
    for node in nodes(path):
        if isinstance(node, ast.Import):
            yield from ((name.name.partition(".")[0], node.lineno) for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module.partition(".")[0], node.lineno


def test_there_is_something_to_look_at() -> None:
    assert len(SOURCES) > 20


def test_process_groups_are_made_in_one_place() -> None:
    """All ranks must make all groups in one order; a second place that makes one breaks that silently."""
    home = ROOT / "verl" / "flow" / "placement.py"
    others = [path for path in SOURCES if path != home]
    assert [place(path, line) for path in others for name, line in calls(path) if name in MAKES_A_GROUP] == []
    assert any(name in MAKES_A_GROUP for name, _ in calls(home))


def test_the_job_is_joined_in_one_place() -> None:
    joins = {path.relative_to(ROOT) for path in SOURCES for name, _ in calls(path) if name == "init_process_group"}
    assert joins <= {Path("verl/flow/job.py")}


def test_hydra_stops_at_the_command_line() -> None:
    allowed = {ROOT / "train_ppo.py", ROOT / "verl" / "cli" / "command_line.py"}
    others = [path for path in SOURCES if path not in allowed]
    assert [place(path, line) for path in others for name, line in imported_packages(path) if name == "hydra"] == []


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_and_functions_are_short(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= MAX_FILE_LINES
    long = [
        f"{place(path, node.lineno)} {node.name}: {node.end_lineno - node.lineno + 1} lines"
        for node in nodes(path)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.end_lineno is not None
        and node.end_lineno - node.lineno >= MAX_FUNCTION_LINES
    ]
    assert long == []


def test_every_package_has_a_floor() -> None:
    """Import contracts are silent on a package that they do not name."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (floors,) = (contract["layers"] for contract in contracts if contract["type"] == "layers")
    named = {name.strip(" ()") for floor in floors for name in floor.replace(":", "|").split("|")}
    modules = {path.stem for path in (ROOT / "verl").glob("*.py")} - {"__init__"}
    packages = {path.parent.name for path in (ROOT / "verl").glob("*/__init__.py")}
    assert modules | packages == named


def test_packages_are_packages() -> None:
    """A folder without __init__.py would be left out of the installed distribution."""
    folders = {path.parent for path in SOURCES if path.is_relative_to(ROOT / "verl")}
    assert [str(folder.relative_to(ROOT)) for folder in sorted(folders) if not (folder / "__init__.py").exists()] == []


def test_the_version_is_declared_once() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["dynamic"] == ["version"] and "version" not in project
    tree = ast.parse((ROOT / "verl" / "__init__.py").read_text())
    (version,) = (
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__version__"
    )
    assert version == "0.2.0a0"
