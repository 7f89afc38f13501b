"""The arguments of train_ppo.py, sorted: its own flags, settings, overrides of the mesh, and Hydra's flags. Pure."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from verl.cli.places import COMMAND_LINE
from verl.errors import ConfigError

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
DEFAULT_CONFIG = CONFIGS / "ppo_config.yaml"

HELP = ("--help", "-h")
MULTIRUN = ("--multirun", "-m")
CFG = ("--cfg", "-c")
SHOW = (*CFG, "--info", "-i", "--hydra-help", "--version", "--shell-completion", "-sc")
"""Hydra's flags that print something and start no run."""

_OWN = ("--config", "--device_mesh")
_WITH_VALUE = (*_OWN, *CFG, "--package", "-p", "--config-dir", "-cd")
_KNOWN = (*_WITH_VALUE, *HELP, *MULTIRUN, *SHOW, "--resolve", "--run", "-r")
_REPLACED = ("--config-path", "-cp", "--config-name", "-cn")
_INFO = ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath")
_NAME = re.compile(r"[A-Za-z_]\w*(\.\w+)+")
_MESH = re.compile(r"\+{0,2}device_mesh=")
_MESH_OVERRIDE = re.compile(r"\+{0,2}device_mesh\.")


@dataclass(frozen=True)
class Arguments:
    config: Path = DEFAULT_CONFIG
    device_mesh: Path | str | None = None
    """The file of --device_mesh; or the text of device_mesh=VALUE, which Hydra would take for the config group."""
    mesh_overrides: tuple[str, ...] = ()
    """device_mesh.role.key=value: they change a mesh whatever it comes from, so Hydra does not see them."""
    overrides: tuple[str, ...] = ()
    """The rest of the form key=value, for Hydra."""
    config_dir: tuple[str, ...] = ()
    """Hydra's flag for a further folder of configs, with its value; () if absent."""
    flags: tuple[str, ...] = ()
    """Hydra's other flags with their values."""

    def has(self, flags: Sequence[str]) -> bool:
        return not set(flags).isdisjoint(self.flags)


def sort_arguments(argv: Sequence[str]) -> Arguments:
    """Sorts a command line (without the program's name), in which everything may stand in any order.

    Raises ConfigError for what is neither a known flag nor an override.
    """
    values: dict[str, str] = {}
    overrides: list[str] = []
    flags: list[str] = []
    rest = list(argv)
    while rest:
        token = rest.pop(0)
        name, equals, value = token.partition("=")
        if not token.startswith("-"):
            if not equals and not token.startswith("~"):
                raise ConfigError(f"{COMMAND_LINE}: {token}: neither a flag nor setting=value{_meant(token)}")
            overrides.append(token)
        elif name in _WITH_VALUE:
            if not equals and not rest:
                raise ConfigError(f"{COMMAND_LINE}: {name}: needs a value")
            values[name] = value if equals else rest.pop(0)
        elif name in ("--info", "-i"):
            topic = value if equals else rest.pop(0) if rest and rest[0] in _INFO else "all"
            flags += [name, topic]
        elif token in _KNOWN:
            flags.append(token)
        else:
            raise ConfigError(f"{COMMAND_LINE}: {token}: {_remedy(name)}")
    for name in values.keys() - {*_OWN, "--config-dir", "-cd"}:
        flags += [name, values[name]]
    meshes = [Path(values["--device_mesh"])] if "--device_mesh" in values else []
    meshes += [_MESH.sub("", override) for override in overrides if _MESH.match(override)]
    if len(meshes) > 1:
        raise ConfigError(
            f"{COMMAND_LINE}: {len(meshes)} meshes by --device_mesh and device_mesh=VALUE; keep one of them"
        )
    changes = tuple(override for override in overrides if _MESH_OVERRIDE.match(override))
    return Arguments(
        config=Path(values.get("--config", DEFAULT_CONFIG)),
        device_mesh=meshes[0] if meshes else None,
        mesh_overrides=changes,
        overrides=tuple(item for item in overrides if item not in changes and not _MESH.match(item)),
        config_dir=tuple(part for name in ("--config-dir", "-cd") if name in values for part in (name, values[name])),
        flags=tuple(flags),
    )


def _meant(token: str) -> str:
    """What to write for a word that stands alone, where that is clear."""
    if token.endswith((".yaml", ".yml")):
        return f"; write --config {token} for settings, --device_mesh {token} for a mesh"
    return f"; write {token}=VALUE, without spaces" if _NAME.fullmatch(token) else ""


def _remedy(name: str) -> str:
    if name in _REPLACED:
        return "not used here; give the file's path with --config FILE"
    close = difflib.get_close_matches(name, _KNOWN, n=1, cutoff=0.7)
    return f"unknown flag; did you mean {close[0]}?" if close else "unknown flag; train_ppo.py --help lists all"
