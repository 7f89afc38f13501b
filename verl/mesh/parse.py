"""`device_mesh.yaml` -> MeshSpec. Every problem of a file is reported at once, each with its line and the remedy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from verl.errors import MeshError
from verl.mesh.document import Node, branch, read, shorten, wrap
from verl.mesh.roles import read_roles
from verl.mesh.spec import ROLES, MeshSpec

_MOST_PROBLEMS = 50
_COMMAND_LINE = "command line"
_DEEPEST_NAME = 3  # actor.parallelism.tensor_parallel_size


def parse(text: str, source: str, overrides: Sequence[str] = ()) -> MeshSpec:
    """Reads a mesh.

    Args:
        text: YAML.
        source: the file's name, for messages.
        overrides: "device_mesh.actor.parallelism.tensor_parallel_size=4" and the like ("device_mesh." may be left
            out); the value is YAML. They are applied after the file and win.
    Raises:
        MeshError: with all problems, for any text that is not a mesh.
    """
    root, problems = read(text, source)
    return _spec(root, source, overrides, problems)


def parse_value(
    value: object, source: str, overrides: Sequence[str] = (), *, place: Callable[[str], str] | None = None
) -> MeshSpec:
    """The same for a mesh that is already data (dict, list, scalars); `place` tells where a dotted path is written."""
    return _spec(wrap(value, place or (lambda path: source)), source, overrides, [])


def single_device(overrides: Sequence[str] = ()) -> MeshSpec:
    """The mesh of a job that names none: all roles on device 0."""
    return parse_value({role: {"devices": [0]} for role in ROLES}, "no device_mesh", overrides)


def _spec(root: Node | None, source: str, overrides: Sequence[str], problems: list[str]) -> MeshSpec:
    for override in overrides:
        root = _overridden(root, override, problems)
    roles = read_roles(root, source, problems) if root is not None else {}
    if len(problems) > _MOST_PROBLEMS:
        problems = [*problems[:_MOST_PROBLEMS], f"{source}: and {len(problems) - _MOST_PROBLEMS} problems more"]
    if problems:
        raise MeshError(*problems)
    assert root is not None
    return MeshSpec(roles, source, dict(_places(root, "", _DEEPEST_NAME)))


def _places(node: Node, name: str, levels: int) -> Iterator[tuple[str, str]]:
    """(dotted name, place) of everything that a mapping names."""
    if isinstance(node.value, dict) and levels:
        for key, entry in node.value.items():
            path = f"{name}.{key}".lstrip(".")
            yield path, entry.place
            yield from _places(entry, path, levels - 1)


def _overridden(root: Node | None, override: str, problems: list[str]) -> Node | None:
    """`root` with an override applied to copies of the mappings on its path: what an anchor shares stays as it is."""
    path, equals, text = override.lstrip("+").removeprefix("device_mesh.").partition("=")
    keys = path.split(".")
    if not equals or not all(keys):
        problems.append(f"{_COMMAND_LINE}: {shorten(override)}: write device_mesh.ROLE.KEY=VALUE")
        return root
    entry, faults = read(text, _COMMAND_LINE, numbered=False)
    problems.extend(f"{_COMMAND_LINE}: {shorten(path)}: {fault.removeprefix(_COMMAND_LINE + ': ')}" for fault in faults)
    if root is None or entry is None:
        return root
    spine: list[tuple[dict[str, Node], str]] = []  # the entries and the place of each mapping from the root down
    node = root
    for depth, key in enumerate(keys):
        entries = {} if node.value is None else node.value
        if not isinstance(entries, dict):
            above = shorten(".".join(keys[:depth])) or "the mesh"
            problems.append(f"{_COMMAND_LINE}: {shorten(path)}: {above} is {node}, which has no keys to set")
            return root
        spine.append((entries, node.place))
        node = entries.get(key, Node(None, _COMMAND_LINE))
    for (entries, place), key in zip(reversed(spine), reversed(keys), strict=True):
        entry = branch({**entries, key: entry}, place)
    return entry
