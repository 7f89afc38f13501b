"""`verl mesh`: a mesh checked against nodes, a model and memory, and shown, without a GPU."""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from verl.cli.places import COMMAND_LINE, read_text, shown
from verl.config import PPOConfig
from verl.errors import EXIT_CODE, ConfigError, UserError
from verl.mesh.document import shorten

if TYPE_CHECKING:  # they import torch, for which --help need not wait
    from verl.advise.job import Job
    from verl.advise.model import ModelShape
    from verl.advise.report import Report

Found = TypeVar("Found")

_GIB = 1 << 30
_EXAMPLES = """\
examples:
  verl mesh {action} configs/device_mesh/two_nodes_8.yaml
  verl mesh {action} my_mesh.yaml --model meta-llama/Llama-2-7b-hf --device-memory 80
  verl mesh {action} my_mesh.yaml --nodes node1:8,node2:8 --config my_run.yaml rollout.n=8
"""


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "mesh",
        help="check and show a device mesh, without a GPU",
        description="Holds a device mesh against nodes, a model and memory before any of them is used.",
        allow_abbrev=False,
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    check = _add_action(actions, "check", "say everything that is wrong with a mesh, with file, line and remedy")
    check.add_argument("--json", action="store_true", help="a JSON object instead of text")
    show = _add_action(actions, "show", "draw a mesh, and list who sends rows and weights to whom")
    show.add_argument("--svg", metavar="FILE", type=Path, help="write the picture there, too")


def _add_action(actions: Any, name: str, what: str) -> Any:
    parser = actions.add_parser(
        name,
        help=what,
        description=f"{what[0].upper()}{what[1:]}. Exit code: 0, or 2 where something is wrong.",
        epilog=_EXAMPLES.format(action=name),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage=f"verl mesh {name} FILE [options] [setting=value ...]",
        allow_abbrev=False,
    )
    parser.set_defaults(settings=[])
    parser.add_argument("mesh", metavar="FILE", type=Path, help="the device mesh")
    parser.add_argument("--nodes", help="the job's nodes with their devices, node1:8,node2:8, or 8 for one node")
    parser.add_argument("--model", help="the actor's model: a folder, a config.json, or a hub id")
    parser.add_argument("--device-memory", metavar="GIB", help="memory of a device, such as 80")
    parser.add_argument("--config", metavar="FILE", help="settings for batch sizes, lengths and models")
    return parser


def run(arguments: argparse.Namespace) -> int:
    return _check(arguments) if arguments.action == "check" else _show(arguments)


def _check(arguments: argparse.Namespace) -> int:
    from verl.cli import mesh_text

    try:
        job, models, config, report, memory = _examined(arguments)
    except UserError as error:
        if not arguments.json:
            raise
        nothing_known = {"warnings": [], "nodes": {}, "roles": {}, "memory": []}
        wrong = {"mesh": str(arguments.mesh), "ok": False, "problems": error.problems}
        print(json.dumps(wrong | nothing_known, indent=1))
        return EXIT_CODE
    if arguments.json:
        print(json.dumps(mesh_text.as_json(job, report), indent=1))
    else:
        print("\n".join(mesh_text.summary(job, models, config, report, memory)))
    return _told(report, quiet=arguments.json)


def _show(arguments: argparse.Namespace) -> int:
    from verl.advise.picture import as_text, draw
    from verl.advise.svg import as_svg
    from verl.cli import mesh_text

    job, models, config, report, memory = _examined(arguments)
    picture = draw(job)
    width = shutil.get_terminal_size().columns
    print("\n".join(mesh_text.heading(job)), end="\n\n")
    print("\n".join(as_text(picture, width)), end="\n\n")
    print("\n".join(mesh_text.rows(job, config)), end="\n\n")
    print("\n".join(mesh_text.weights(job, models, config, report)))
    if report.budgets:
        print()
        print("\n".join(mesh_text.memory(job, models, config, report, memory)))
    if arguments.svg is not None:
        _write(arguments.svg, as_svg(picture, job.mesh.source))
        print(f"\nwritten: {arguments.svg}")
    return _told(report, quiet=False)


def _told(report: Report, quiet: bool) -> int:
    if not quiet:
        sys.stdout.flush()
        for warning in report.warnings:
            print(f"warning: {warning}", file=sys.stderr)
        for problem in report.problems:
            print(problem, file=sys.stderr)
    return EXIT_CODE if report.problems else 0


def _examined(
    arguments: argparse.Namespace,
) -> tuple[Job, dict[str, ModelShape], PPOConfig, Report, int | None]:
    """Everything that a command line names, read and held against each other. Raises UserError with all mistakes."""
    from verl.advise.job import imagine, nodes_of, read_nodes
    from verl.advise.report import examine
    from verl.mesh.parse import parse

    problems: list[str] = []

    def tried(read: Callable[[], Found]) -> Found | None:
        try:
            return read()
        except UserError as error:
            problems.extend(error.problems)
            return None

    changes = [text for text in arguments.settings if text.lstrip("+").startswith("device_mesh.")]
    for text in arguments.settings:
        if text.lstrip("+").startswith("device_mesh="):
            problems.append(f"{COMMAND_LINE}: {shorten(text)}: the mesh is {arguments.mesh}; name another in its place")
    settings = [text for text in arguments.settings if text not in changes]
    memory = tried(lambda: _bytes(arguments.device_memory))
    config = tried(lambda: _settings(arguments.config, settings))
    text = tried(lambda: read_text(arguments.mesh, COMMAND_LINE))
    mesh = None if text is None else tried(lambda: parse(text, shown(arguments.mesh), changes))
    nodes = None if arguments.nodes is None else tried(lambda: read_nodes(arguments.nodes))
    given = config is not None and (arguments.config is not None or any("path" in name for name in settings))
    models = tried(lambda: _models(arguments.model, config, given)) if config is not None else None
    if mesh is not None and arguments.nodes is None:
        nodes = tried(lambda: nodes_of(mesh))
    job = None
    if mesh is not None and nodes is not None:
        job = tried(lambda: imagine(mesh, nodes, config or PPOConfig()))
    if problems:
        raise UserError(*problems)
    assert job is not None and config is not None and models is not None
    models = {role: model for role, model in models.items() if role in job.placements}
    report = examine(job, models, config, memory, settings=bool(settings or arguments.config))
    return job, models, config, report, memory


def _bytes(text: str | None) -> int | None:
    """--device-memory, in bytes."""
    if text is None:
        return None
    try:
        gib = float(text.lower().removesuffix("gib").removesuffix("gb").removesuffix("g"))
    except ValueError:
        gib = math.nan
    if not 0 < gib < 1e6:
        raise UserError(f"--device-memory: {text} is no size; write a number of GiB, such as 80")
    return int(gib * _GIB)


def _settings(config: str | None, settings: Sequence[str]) -> PPOConfig:
    """Without a file and settings the defaults, for which Hydra need not be loaded."""
    if config is None and not settings:
        return PPOConfig()
    from verl.checks import value_problems
    from verl.cli.command_line import read_settings

    found = read_settings([*(["--config", config] if config is not None else []), *settings])
    wrong = list(value_problems(found))
    if wrong:
        raise ConfigError(*wrong)
    return found


def _models(named: str | None, config: PPOConfig, given: bool) -> dict[str, ModelShape]:
    """The model of each role: --model, or what the settings name where the user gave any. Raises UserError."""
    from functools import cache

    from verl.advise.model import find_config, shape_of
    from verl.model.heads import Head

    actor = (
        named if named is not None else config.model.path if given and config.model.path not in ("", "???") else None
    )
    paths = {
        "actor": (actor, Head.lm),
        "rollout": (actor, Head.lm),
        "reference": (config.reference.path or actor, Head.lm),
        "critic": (config.critic.path or actor, Head.token_value),
        "reward": (config.reward.model.path, Head.score),
    }

    @cache
    def shape(path: str, head: Head) -> ModelShape:
        return shape_of(find_config(path), path, head)

    problems: dict[str, None] = {}
    models: dict[str, ModelShape] = {}
    for role, (path, head) in paths.items():
        if path is not None:
            try:
                models[role] = shape(path, head)
            except UserError as error:
                problems |= dict.fromkeys(error.problems)
    if problems:
        raise UserError(*(f"--model: {problem}" if named is not None else problem for problem in problems))
    return models


def _write(file: Path, text: str) -> None:
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"--svg: {file}: {error.strerror}") from None
