"""From a command line to PPOConfig and MeshSpec. No other module knows Hydra.

Hydra composes files and overrides as plain values over the defaults of PPOConfig. They are checked here rather than by
Hydra, so that all mistakes are told at once, each with the file and line, or "command line", that it comes from.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import hydra
import yaml
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, OverrideParseException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from verl.checks import problems
from verl.cli.arguments import CFG, CONFIGS, HELP, MULTIRUN, SHOW, Arguments, sort_arguments
from verl.cli.help import help_text
from verl.cli.mesh_source import read_mesh
from verl.cli.places import COMMAND_LINE, Places, read_text, shown
from verl.cli.settings import fill, unknown
from verl.cli.whole_lines import write_whole_lines
from verl.config import PPOConfig, leaves
from verl.errors import EXIT_CODE, ConfigError, SharedError, UserError
from verl.flow.agent import agent_of_this_process
from verl.launch.plan import JOINT_OUTPUT
from verl.mesh.document import read
from verl.mesh.resolve import collapse, refuse_one_process
from verl.mesh.spec import MeshSpec

Train = Callable[[PPOConfig, MeshSpec], Any]

OTHERS_WAIT_SECONDS = 8.0
"""How long the further processes of a node leave it to the first to report a mistake."""

_PRIMARY = "train_ppo_command"  # names in Hydra's store, which no file should bear
_DEFAULTS = "train_ppo_defaults"


def run(train: Train, argv: Sequence[str]) -> int:
    """Does what a command line asks for, and returns the exit code.

    Args:
        train: called with settings and mesh; under --multirun once for each job.
        argv: the arguments, without the program's name.

    A UserError is printed without a traceback, once on each node, and gives EXIT_CODE. Others come out as they are.
    """
    agent_of_this_process()  # now, since torch takes long to import: an agent that ends meanwhile would not be seen
    write_whole_lines()
    try:
        _run(train, argv)
    except UserError as error:
        is_shared = isinstance(error, SharedError)
        if os.environ.get("LOCAL_RANK", "0") != "0" or (is_shared and _is_told_by_another_node()):
            # The first process of the node, or of the job, is about to say the same, and all others are ended as soon
            # as one ends. Only what that one does not find out, such as a device that is missing here alone, is said
            # by this one.
            time.sleep(OTHERS_WAIT_SECONDS)
            if is_shared:  # that one has it too; a busy torchrun may take longer than this wait
                return EXIT_CODE
        print(error, file=sys.stderr, flush=True)
        if not is_shared and os.environ.get("GROUP_WORLD_SIZE", "1") != "1":
            from verl.flow.meeting import refuse  # imports torch, which --help need not wait for

            refuse(error.problems, os.environ)
        return EXIT_CODE
    return 0


def _is_told_by_another_node() -> bool:
    """What all nodes know is said on the first alone, where who started them shows the output of all in one place."""
    return JOINT_OUTPUT in os.environ and os.environ.get("GROUP_RANK", "0") != "0"


def load(argv: Sequence[str]) -> tuple[PPOConfig, MeshSpec]:
    """The settings and the mesh of a command line, checked alone and against each other; Hydra's flags are ignored.

    Raises ConfigError or MeshError with every problem.
    """
    arguments = _one_run(sort_arguments(argv))
    loaded: list[tuple[PPOConfig, MeshSpec]] = []
    _compose(arguments, lambda settings: loaded.append(_checked(settings, arguments)))
    return loaded[0]


def read_settings(argv: Sequence[str]) -> PPOConfig:
    """The settings of a command line, of which required ones may be missing; nothing is held against anything.

    Raises ConfigError for names and types that are wrong.
    """
    found: list[PPOConfig] = []

    def take(settings: DictConfig) -> None:
        filled = _filled(settings, _places())
        for name in OmegaConf.missing_keys(filled):
            OmegaConf.update(filled, name, "")
        config = OmegaConf.to_object(filled)
        assert isinstance(config, PPOConfig)
        found.append(config)

    _compose(_one_run(sort_arguments(argv)), take)
    return found[0]


def _run(train: Train, argv: Sequence[str]) -> None:
    arguments = sort_arguments(argv)
    if arguments.has(HELP) or arguments.has(SHOW):
        if os.environ.get("RANK", "0") == "0":
            _show(arguments)
        return
    if arguments.has(MULTIRUN) and "RANK" in os.environ:
        raise ConfigError(
            f"{COMMAND_LINE}: --multirun: runs its jobs in one process, and this is one of torchrun's; loop in the "
            "shell instead: for lr in 1e-6 1e-5; do torchrun ... train_ppo.py ... actor.optim.lr=$lr "
            "trainer.experiment_name=lr-$lr; done"
        )

    def start(settings: DictConfig) -> Any:
        config, mesh = _checked(settings, arguments)
        if os.environ.get("WORLD_SIZE", "1") == "1":
            refuse_one_process(mesh, argv)
        return train(config, mesh)

    _compose(arguments, start)


def _show(arguments: Arguments) -> None:
    """--help, and Hydra's flags that print."""
    if arguments.has(HELP):
        print(help_text())
        return
    if arguments.has(CFG):  # what no run would take is not shown either
        _compose(_one_run(arguments), lambda settings: _filled(settings, _places()))
    _compose(arguments, lambda settings: None)


def _one_run(arguments: Arguments) -> Arguments:
    """The same settings with nothing shown and nothing swept."""
    return replace(arguments, flags=(), overrides=(*arguments.overrides, "hydra.mode=RUN"))


def _compose(arguments: Arguments, task: Callable[[DictConfig], Any]) -> None:
    """Calls `task` with the composed settings: once, or under --multirun for each job.

    Raises UserError for what cannot be composed, and what `task` raises.
    """
    mistakes: list[UserError] = []
    failures: list[Exception] = []

    def guarded(settings: DictConfig) -> Any:
        try:
            return task(settings)
        except UserError as mistake:  # passed around Hydra, which would print lines of its own
            job = f"job {HydraConfig.get().job.num}: " if _is_multirun() else ""
            mistakes.append(type(mistake)(*(job + problem for problem in mistake.problems)))
        except Exception as failure:
            failures.append(failure)
            raise

    try:
        _call_hydra(guarded, arguments)
    except UserError:
        raise
    except (HydraException, OmegaConfBaseException, yaml.YAMLError, OSError, ValueError, RecursionError) as error:
        if error in failures:  # then it is the task's own
            raise
        raise _explained(error) from None
    if len(mistakes) == 1:
        raise mistakes[0]
    if mistakes:
        raise UserError(*(problem for mistake in mistakes for problem in mistake.problems))


def _checked(settings: DictConfig, arguments: Arguments) -> tuple[PPOConfig, MeshSpec]:
    """Everything is checked here that needs no model, no data and no other process."""
    places = _places()
    filled = _filled(settings, places)
    plain = OmegaConf.to_container(filled)
    assert isinstance(plain, dict)
    filled.device_mesh, mesh = read_mesh(plain["device_mesh"], arguments, places)
    if _is_multirun():  # a folder for each job, named for what varies
        filled.trainer.run_dir = HydraConfig.get().runtime.output_dir
    missing = sorted(OmegaConf.missing_keys(filled))
    if missing:
        raise ConfigError(*(f"{name}: required; set {name}=VALUE" for name in missing))
    config = OmegaConf.to_object(filled)
    assert isinstance(config, PPOConfig)
    if config.debug.collapse_mesh:
        mesh = collapse(mesh)
    wrong = problems(config, {role: entry.data_parallel_size for role, entry in mesh.roles.items()})
    if wrong:
        raise ConfigError(
            *(f"{places(re.split('[=:,]', problem)[0])}: {problem}".removeprefix(": ") for problem in wrong)
        )
    return config, mesh


def _is_multirun() -> bool:
    return HydraConfig.get().mode is RunMode.MULTIRUN


def _filled(settings: DictConfig, places: Places) -> DictConfig:
    """The composed values as a structured PPOConfig; names and types are right, required ones may still be missing."""
    try:
        values = OmegaConf.to_container(settings, resolve=True)
    except OmegaConfBaseException as error:  # an interpolation
        name = error.full_key or ""
        raise ConfigError(places.tell(name, _first_line(error))) from None
    assert isinstance(values, dict)
    filled, wrong = fill({str(key): value for key, value in values.items()}, places)
    if wrong:
        raise ConfigError(*wrong)
    return filled


def _call_hydra(task: Callable[[DictConfig], Any], arguments: Arguments) -> None:
    """hydra.main on these arguments. Errors come out as they are: Hydra alone would print a part of them and exit."""
    config = arguments.config
    if config.suffix != ".yaml":
        raise ConfigError(f"{COMMAND_LINE}: --config {config}: Hydra reads files that end in .yaml; rename it")
    root, wrong = read(read_text(config, f"{COMMAND_LINE}: --config"), shown(config))
    if root is not None and not isinstance(root.value, dict | None):
        wrong.append(f"{root.place}: settings have names and values, and this is {root}")
    if wrong:
        raise ConfigError(*wrong)
    _store_primary(arguments)
    with _hydras_view([*arguments.overrides, *arguments.config_dir, *arguments.flags]) as restore_argv:

        def with_argv(settings: DictConfig) -> Any:
            restore_argv()
            return task(settings)

        hydra.main(config_path=str(config.parent.absolute()), config_name=_PRIMARY, version_base="1.3")(with_argv)()


def _store_primary(arguments: Arguments) -> None:
    """Puts into Hydra's store what it starts from: the defaults of PPOConfig, then the user's file, and Hydra's own
    settings such that it writes nothing, changes no folder, and under --multirun only makes the jobs' run folders."""
    multirun = arguments.has(MULTIRUN)
    fixed = [override.key_or_group for override in _parsed(arguments.overrides) if not override.is_sweep_override()]
    store = ConfigStore.instance()
    defaults = OmegaConf.create(OmegaConf.to_container(OmegaConf.structured(PPOConfig), enum_to_str=True))
    for name, value in leaves(PPOConfig()):
        if isinstance(value, dict):  # the keys are the user's
            OmegaConf.set_struct(OmegaConf.select(defaults, name), False)
    store.store(_DEFAULTS, defaults)
    primary = {
        "defaults": [
            _DEFAULTS,
            "_self_",
            arguments.config.stem,
            {"override hydra/job_logging": "none"},
            {"override hydra/hydra_logging": "default" if multirun else "none"},
        ],
        "hydra": {
            "searchpath": [f"file://{CONFIGS}"],
            "output_subdir": None,
            "run": {"dir": "."},
            "sweep": {"dir": "${trainer.run_dir}", "subdir": "${hydra.job.override_dirname}"},
            "job": {"name": "train_ppo", "chdir": False, "config": {"override_dirname": {"exclude_keys": fixed}}},
        },
    }
    store.store(_PRIMARY, primary)


def _parsed(overrides: Sequence[str]) -> list[Override]:
    try:
        return OverridesParser.create().parse_overrides(list(overrides))
    except OverrideParseException as error:
        raise ConfigError(
            f"{COMMAND_LINE}: {error.override}: {_first_line(error)}; close what is open, and quote the whole for the "
            "shell where it holds brackets, spaces or quotation marks: 'name=[a, b]'"
        ) from None


def _places() -> Places:
    """To be called while Hydra runs the task."""
    given = OmegaConf.to_container(HydraConfig.get().overrides.task, resolve=False)
    assert isinstance(given, list)
    overrides = [str(override) for override in given]
    loader = GlobalHydra.instance().config_loader()
    folders = [Path(source.path) for source in loader.get_sources() if source.scheme() == "file"]
    composed = loader.compute_defaults_list(_PRIMARY, overrides, RunMode.RUN).defaults
    files = [
        (file, default.package or "")
        for default in composed
        for folder in folders
        if (file := folder / f"{default.config_path}.yaml").is_file()
    ]
    keys = [override.key_or_group for override in _parsed(overrides)]
    return Places(keys, files)


def _explained(error: Exception) -> ConfigError:
    """What went wrong while Hydra composed, in a line."""
    cause = error.__cause__
    if isinstance(cause, ConfigKeyError | ConfigAttributeError) and cause.full_key:
        return ConfigError(f"{COMMAND_LINE}: {cause.full_key}: {unknown(cause.full_key)}")
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        return ConfigError(f"{shown(Path(mark.name))}:{mark.line + 1}: not valid YAML: {error.problem}")
    text = str(error).partition("\nConfig search path:")[0].replace(_PRIMARY, COMMAND_LINE)
    reason = f": {_first_line(cause)}" if isinstance(cause, OmegaConfBaseException) else ""
    return ConfigError(" ".join(text.split()) + reason)


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


@contextlib.contextmanager
def _hydras_view(arguments: Sequence[str]) -> Iterator[Callable[[], None]]:
    """sys.argv as Hydra is to see it, and its variable that lets exceptions through. Gives what restores sys.argv."""
    argv, full_error = sys.argv, os.environ.get("HYDRA_FULL_ERROR")

    def restore_argv() -> None:
        sys.argv = argv

    sys.argv, os.environ["HYDRA_FULL_ERROR"] = [argv[0], *arguments], "1"
    try:
        yield restore_argv
    finally:
        restore_argv()
        os.environ.pop("HYDRA_FULL_ERROR")
        if full_error is not None:
            os.environ["HYDRA_FULL_ERROR"] = full_error
