"""The text of train_ppo.py --help: every setting with its default and its docstring, taken from verl/config.py."""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any, get_args, get_type_hints

from verl import config

_USAGE = """\
usage: train_ppo.py [--config FILE] [--device_mesh FILE] [setting=value ...] [Hydra's flags]

PPO post-training of language models. One process: python train_ppo.py ...
One process a device: torchrun --standalone --nproc_per_node=N train_ppo.py ...

  --config FILE        settings that differ from the defaults below (configs/ppo_config.yaml)
  --device_mesh FILE   which role runs where and how it is split (examples: configs/device_mesh/)
  setting=value        overrides the files; also device_mesh.ROLE.KEY=value
  --help, -h           this text
  --cfg job            print the settings of a run instead of starting it (also: hydra, all; --resolve)
  --info               how Hydra composed them (also: config, defaults, defaults-tree, plugins, searchpath)
  --multirun, -m       one run after the other, in one process, for setting=value1,value2
  --config-dir DIR     a further folder for the defaults lists of config files
  --hydra-help, --version, --shell-completion, --package, --run   as in any Hydra program

Settings, each with its default:
"""
_WIDTH = 110


def help_text() -> str:
    docs = _docs(ast.parse(Path(config.__file__).read_text(encoding="utf-8")))
    return _USAGE + "\n".join(_section(config.PPOConfig(), "", docs))


def _docs(module: ast.Module) -> dict[tuple[str, str], str]:
    """(class, field) -> the docstring under it."""
    docs: dict[tuple[str, str], str] = {}
    for cls in module.body:
        if isinstance(cls, ast.ClassDef):
            for entry, below in zip(cls.body, cls.body[1:], strict=False):
                if isinstance(entry, ast.AnnAssign) and isinstance(entry.target, ast.Name):
                    match below:
                        case ast.Expr(value=ast.Constant(value=str(text))):
                            docs[cls.name, entry.target.id] = text
    return docs


def _section(section: Any, prefix: str, docs: dict[tuple[str, str], str]) -> Iterator[str]:
    hints = get_type_hints(type(section))
    for entry in fields(section):
        owner = next(cls for cls in type(section).__mro__ if entry.name in vars(cls).get("__annotations__", {}))
        doc = docs[owner.__name__, entry.name]
        value = vars(section)[entry.name]
        if is_dataclass(value):
            yield "\n" + textwrap.fill(f"{prefix}{entry.name}: {doc}", _WIDTH)
            yield from _section(value, f"{prefix}{entry.name}.", docs)
        else:
            choices = [
                member.name for kind in (hints[entry.name], *get_args(hints[entry.name])) for member in _members(kind)
            ]
            yield f"  {prefix}{entry.name}={_shown(value)}" + (f"   ({' | '.join(choices)})" if choices else "")
            yield textwrap.fill(doc, _WIDTH, initial_indent=" " * 6, subsequent_indent=" " * 6)


def _members(kind: Any) -> list[Enum]:
    return list(kind) if isinstance(kind, type) and issubclass(kind, Enum) else []


def _shown(value: Any) -> str:
    """A default as it would be written on the command line."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list):
        return f"[{','.join(_shown(item) for item in value)}]"
    return str(value)
