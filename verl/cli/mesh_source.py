"""Where a run's mesh comes from: a file, a value on the command line, the settings, or nowhere."""

from __future__ import annotations

from pathlib import Path

from verl.cli.arguments import Arguments
from verl.cli.places import COMMAND_LINE, Places, read_text, shown
from verl.errors import MeshError
from verl.mesh.document import read
from verl.mesh.parse import parse, parse_value, single_device
from verl.mesh.spec import MeshSpec


def read_mesh(setting: object, arguments: Arguments, places: Places) -> tuple[object, MeshSpec]:
    """The mesh of a run.

    Args:
        setting: device_mesh as the files have it, plain: a path, the mesh itself, or None.
        arguments: what they say of the mesh wins over `setting`.
        places: where settings are written.
    Returns:
        The path, mapping or None that was used, and the mesh with the overrides of the command line.
    """
    value, source = setting, places("device_mesh") or "device_mesh"
    if arguments.device_mesh is not None:
        value, source = _given(arguments.device_mesh), COMMAND_LINE
    if value is None:
        return None, single_device(arguments.mesh_overrides)
    if isinstance(value, str):
        path = Path(value)
        return value, parse(read_text(path, f"{source}: device_mesh"), shown(path), arguments.mesh_overrides)

    def place(path: str) -> str:
        return source if source == COMMAND_LINE else places(f"device_mesh.{path}".rstrip(".")) or source

    return value, parse_value(value, source, arguments.mesh_overrides, place=place)


def _given(mesh: Path | str) -> object:
    """--device_mesh FILE, or the value of device_mesh=VALUE."""
    if isinstance(mesh, Path):
        return str(mesh)
    node, wrong = read(mesh, f"{COMMAND_LINE}: device_mesh", numbered=False)
    if node is None or wrong:
        raise MeshError(*wrong)
    return node.plain()
