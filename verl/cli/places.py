"""Where a setting was written, for messages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from verl.errors import ConfigError
from verl.mesh.document import Node, read, shorten

COMMAND_LINE = "command line"


def shown(path: Path) -> str:
    """A path as a message gives it: relative where it lies below the working directory."""
    absolute = path.absolute()
    return str(absolute.relative_to(Path.cwd())) if absolute.is_relative_to(Path.cwd()) else str(absolute)


def read_text(path: Path, named_by: str) -> str:
    """The text of a file that the user named. Raises ConfigError that starts with `named_by`."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text; save it as UTF-8"
        raise ConfigError(f"{named_by}: {path}: {reason} (working directory: {Path.cwd()})") from None


@dataclass(frozen=True)
class Places:
    """The sources that a run's settings were composed of."""

    keys: Sequence[str]
    """Dotted names that the command line sets."""
    files: Sequence[tuple[Path, str]]
    """Each YAML file with the dotted name that its contents stand under ("" for the top); later ones win."""

    def __call__(self, name: str) -> str:
        """ "file:line" or "command line", of the source that won; "" for a setting that no source has."""
        if any(name == key or name.startswith(f"{key}.") for key in self.keys):
            return COMMAND_LINE
        depth, place = 0, ""
        for root, package in self._roots:
            found = _find(root, package, name)
            if found[0] >= max(depth, 1):
                depth, place = found
        below = depth <= name.count(".") and any(key.startswith(f"{name}.") for key in self.keys)
        return COMMAND_LINE if below else place

    def tell(self, name: str, what: str) -> str:
        """A message about a setting, with its place in front if it has one."""
        place = self(name)
        return f"{place}: {shorten(name)}: {what}".removeprefix(": ")

    @cached_property
    def _roots(self) -> list[tuple[Node, str]]:
        """Only read for a message."""
        roots = [(read(file.read_text(encoding="utf-8"), shown(file))[0], package) for file, package in self.files]
        return [(root, package) for root, package in roots if root is not None]


def _find(node: Node, package: str, name: str) -> tuple[int, str]:
    """How many keys of a dotted name a file has, and the place of the last of them."""
    above, keys = package.split(".") if package else [], name.split(".")
    if keys[: len(above)] != above:
        return 0, ""
    depth = len(above)
    while depth < len(keys) and isinstance(node.value, dict) and keys[depth] in node.value:
        node = node.value[keys[depth]]
        depth += 1
    return depth, node.place
