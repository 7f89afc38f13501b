"""The command line of train_ppo.py: its two flags, Hydra's flags, and settings. No other module knows Hydra.

    train_ppo.py [--config FILE] [--device_mesh FILE] [setting=value ...] [Hydra's flags]

The two flags and the overrides of the mesh are taken out before Hydra sees the rest. Hydra composes the files and the
overrides as plain values, over the defaults of PPOConfig; they are checked here, all at once, with the place of each.
"""

from __future__ import annotations

import contextlib
import difflib
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, OverrideParseException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from verl.cli.help import help_text
from verl.cli.places import COMMAND_LINE, Places, shown
from verl.cli.settings import fill, unknown
from verl.config import PPOConfig, problems
from verl.errors import EXIT_CODE, ConfigError, MeshError, UserError
from verl.mesh.parse import parse, parse_value, single_device
from verl.mesh.resolve import collapse, refuse_one_process
from verl.mesh.spec import MeshSpec
from verl.mesh.unsupported import refuse_unsupported

Train = Callable[[PPOConfig, MeshSpec], Any]

CONFIGS = Path(__file__).parents[2] / "configs"
DEFAULT_CONFIG = CONFIGS / "ppo_config.yaml"

_PRIMARY = "train_ppo_command"  # names in Hydra's store, which no file should bear
_DEFAULTS = "train_ppo_defaults"
_OWN_FLAGS = ("--config", "--device_mesh")
_HYDRA_FLAGS = {  # flag -> whether it takes a value
    **dict.fromkeys(("--cfg", "-c", "--package", "-p", "--config-dir", "-cd"), True),
    **dict.fromkeys(("--help", "-h", "--hydra-help", "--version", "--resolve", "--run", "-r"), False),
    **dict.fromkeys(("--multirun", "-m", "--shell-completion", "-sc", "--info", "-i"), False),
}
_INFO_TOPICS = ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath")
_SHOW_FLAGS = ("--cfg", "-c", "--info", "-i", "--hydra-help", "--version", "--shell-completion", "-sc")
_REPLACED_FLAGS = ("--config-path", "-cp", "--config-name", "-cn")
_MESH_OVERRIDE = re.compile(r"\+{0,2}device_mesh\.")


@dataclass(frozen=True)
class Arguments:
    """The command line, sorted."""

    config: Path = DEFAULT_CONFIG
    device_mesh: Path | None = None
    mesh_overrides: tuple[str, ...] = ()
    overrides: tuple[str, ...] = ()
    """Everything else of the form key=value, for Hydra."""
    flags: tuple[str, ...] = ()
    """Hydra's flags with their values."""


def run(train: Train, argv: Sequence[str]) -> int:
    """Does what a command line asks for and returns the exit code.

    Args:
        train: called with the settings and the mesh; under --multirun once for each job.
        argv: the arguments without the program's name.
    A mistake of the user's is printed once on each node, without a traceback, and gives EXIT_CODE.
    """
    try:
        return _run(train, argv)
    except UserError as error:
        if os.environ.get("LOCAL_RANK", "0") == "0":  # a file may be missing on a node that rank 0 is not on
            print(error, file=sys.stderr)
        return EXIT_CODE


def load(argv: Sequence[str]) -> tuple[PPOConfig, MeshSpec]:
    """The settings and the mesh of a command line, checked against each other.

    Raises UserError (ConfigError, MeshError) with every problem.
    """
    loaded: list[tuple[PPOConfig, MeshSpec]] = []
    _with_hydra(split(argv), lambda config, mesh: loaded.append((config, mesh)))
    return loaded[-1]


def split(argv: Sequence[str]) -> Arguments:
    """Sorts a command line, in which flags and overrides may stand in any order."""
    own: dict[str, Path] = {}
    overrides: list[str] = []
    flags: list[str] = []
    rest = list(argv)
    while rest:
        token = rest.pop(0)
        name, equals, value = token.partition("=")
        if not token.startswith("-"):
            overrides.append(token)
        elif name in _OWN_FLAGS or _HYDRA_FLAGS.get(name, False):
            if not equals and not rest:
                raise ConfigError(f"{COMMAND_LINE}: {name} needs a value")
            value = value if equals else rest.pop(0)
            if name in _OWN_FLAGS:
                own[name] = Path(value)
            else:
                flags += [name, value]
        elif token in _HYDRA_FLAGS or name == "--info":
            flags.append(token)
            if token in ("--info", "-i") and rest and rest[0] in _INFO_TOPICS:
                flags.append(rest.pop(0))
        else:
            raise ConfigError(f"{COMMAND_LINE}: {token}: {_flag_remedy(name)}")
    for override in overrides:
        if "=" not in override and not override.startswith("~"):
            raise ConfigError(f"{COMMAND_LINE}: {override}: neither a flag nor setting=value")
    mesh = tuple(override for override in overrides if _MESH_OVERRIDE.match(override))
    return Arguments(
        config=own.get("--config", DEFAULT_CONFIG),
        device_mesh=own.get("--device_mesh"),
        mesh_overrides=mesh,
        overrides=tuple(override for override in overrides if override not in mesh),
        flags=tuple(flags),
    )


def _flag_remedy(name: str) -> str:
    if name in _REPLACED_FLAGS:
        return "not used here; give the whole path with --config FILE"
    close = difflib.get_close_matches(name, (*_OWN_FLAGS, *_HYDRA_FLAGS), n=1)
    return "unknown flag; " + (f"did you mean {close[0]}?" if close else "train_ppo.py --help lists them")


def _run(train: Train, argv: Sequence[str]) -> int:
    arguments = split(argv)
    flags = set(arguments.flags)
    torchrun = "RANK" in os.environ
    if flags & {"--help", "-h"}:
        if _is_rank_0():
            print(help_text())
        return 0
    if flags & set(_SHOW_FLAGS):
        if _is_rank_0():
            if flags & {"--cfg", "-c"}:  # what is shown is what would run
                _with_hydra(Arguments(**(vars(arguments) | {"flags": ()})), lambda config, mesh: None)
            _call_hydra(lambda settings: None, arguments)
        return 0
    if torchrun and flags & {"--multirun", "-m"}:
        raise ConfigError(
            f"{COMMAND_LINE}: --multirun runs in one process, and this is torchrun; loop in the shell instead: "
            "for lr in 1e-6 1e-5; do torchrun ... train_ppo.py actor.optim.lr=$lr trainer.experiment_name=lr-$lr; done"
        )

    def start(config: PPOConfig, mesh: MeshSpec) -> Any:
        if os.environ.get("WORLD_SIZE", "1") == "1":
            refuse_one_process(mesh, argv)
        return train(config, mesh)

    _with_hydra(arguments, start)
    return 0


def _is_rank_0() -> bool:
    return os.environ.get("RANK", "0") == "0"


def _with_hydra(arguments: Arguments, use: Train) -> None:
    """Composes, checks and calls `use`: once, or under --multirun for each job."""
    started = False
    errors: list[UserError] = []

    def task(settings: DictConfig) -> Any:
        nonlocal started
        started = True  # what goes wrong from here on does not come from the composition
        try:
            return use(*_finish(settings, arguments))
        except UserError as error:  # passed around Hydra, which would print it too
            errors.append(error)
            return None

    try:
        _call_hydra(task, arguments)
    except (HydraException, OmegaConfBaseException) as error:
        if started:
            raise
        raise _explained(error) from None
    if errors:
        raise errors[0] if len(errors) == 1 else UserError(*(text for error in errors for text in error.problems))


def _call_hydra(task: Callable[[DictConfig], Any], arguments: Arguments) -> None:
    """hydra.main on these arguments. Errors come out whole: Hydra would shorten the traceback and exit."""
    if not arguments.config.is_file():
        raise ConfigError(f"{COMMAND_LINE}: --config {arguments.config}: no such file in {Path.cwd()}")
    if arguments.config.suffix != ".yaml":
        raise ConfigError(f"{COMMAND_LINE}: --config {arguments.config}: Hydra reads files named *.yaml; rename it")
    _store_primary(arguments)
    command = [sys.argv[0], *arguments.overrides, *arguments.flags]
    with _replaced(sys.argv, command), _environment({"HYDRA_FULL_ERROR": "1"}):
        hydra.main(config_path=str(arguments.config.parent.absolute()), config_name=_PRIMARY, version_base="1.3")(task)()
