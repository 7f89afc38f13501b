"""Plain values from files and the command line -> PPOConfig's types. Every misfit is collected with its place."""

from __future__ import annotations

import difflib
import types
from dataclasses import is_dataclass
from enum import Enum
from typing import Any, Union, get_args, get_origin, get_type_hints

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException, ValidationError

from verl.cli.places import Places
from verl.config import PPOConfig, leaves
from verl.mesh.document import shorten

_NAMES = tuple(name for name, _ in leaves(PPOConfig()))
_EXPECTED = {bool: "true or false", int: "a whole number", float: "a number", str: "text", types.NoneType: "null"}


def fill(values: dict[str, Any], places: Places) -> tuple[DictConfig, list[str]]:
    """The settings with `values` put in, and what could not be.

    Args:
        values: nested settings, interpolations resolved.
        places: where settings are written.
    Returns:
        A structured PPOConfig, in which required settings may still be missing; and the problems.
    """
    settings = OmegaConf.structured(PPOConfig)
    problems: list[str] = []
    _fill(settings, PPOConfig, values, "", places, problems)
    return settings, problems


def unknown(name: str) -> str:
    """What to say of a setting that does not exist: the names that resemble it."""
    section, dot, key = name.rpartition(".")
    siblings = {
        known.removeprefix(section + dot).partition(".")[0] for known in _NAMES if known.startswith(section + dot)
    }
    close = [known for known in _NAMES if known.rpartition(".")[2] == key]
    close = close or [section + dot + match for match in difflib.get_close_matches(shorten(key), sorted(siblings), n=1)]
    close = close or difflib.get_close_matches(shorten(name), _NAMES, n=2)
    remedy = f"did you mean {', '.join(close)}?" if close else "train_ppo.py --help lists all"
    return f"unknown setting; {remedy}"


def _fill(
    section: DictConfig, cls: type, values: dict[str, Any], prefix: str, places: Places, problems: list[str]
) -> None:
    hints = get_type_hints(cls)
    for key, value in values.items():
        name = f"{prefix}{key}"
        if key not in hints:
            problems.append(places.tell(name, unknown(name)))
        elif is_dataclass(hints[key]):
            if isinstance(value, dict):
                _fill(section[key], hints[key], value, f"{name}.", places, problems)
            else:
                problems.append(places.tell(name, f"holds settings ({name}.KEY=VALUE), got {_show(value)}"))
        else:
            try:
                if hints[key] is bool and isinstance(value, int | float) and not isinstance(value, bool):
                    raise ValidationError("OmegaConf would take every number but 0 for true")
                section[key] = value
            except OmegaConfBaseException:
                remedy = f"; write [{shorten(value)}]" if hints[key] == list[str] and isinstance(value, str) else ""
                problems.append(places.tell(name, f"needs {_expected(hints[key])}, got {_show(value)}{remedy}"))


def _expected(hint: Any) -> str:
    """A type in the user's words."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return " or ".join(_expected(member) for member in inner)
    if origin is list:
        example = {int: "[1, 2]", float: "[0.9, 0.999]"}.get(inner[0], "[a, b]")
        return f"a list, for example {example}"
    if origin is dict:
        return "keys and values, for example {a: 1}"
    if issubclass(hint, Enum):
        return "one of " + ", ".join(hint.__members__)
    return _EXPECTED[hint]


def _show(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return f'"{shorten(value)}"' if isinstance(value, str) else shorten(str(value))
