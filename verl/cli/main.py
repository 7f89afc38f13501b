"""The `verl` command. A subcommand is a module of this package; a line in COMMANDS is all that it takes to add one.

    add_parser(subparsers) -> None   adds its parser with help and arguments; the module imports nothing slow
    run(arguments) -> int            does it and returns the exit code; a UserError is printed once and gives 2

A parser that calls `set_defaults(rest=[])` finds in `arguments.rest`, in order, all that it does not know itself; with
`set_defaults(settings=[])` it finds setting=value in `arguments.settings`, and any other unknown argument is refused.
"""

from __future__ import annotations

import argparse
import difflib
import os
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any, NoReturn

from verl import __version__
from verl.cli import doctor, export, launch, mesh
from verl.errors import EXIT_CODE, UserError

COMMANDS: dict[str, ModuleType] = {
    "mesh": mesh,
    "export": export,
    "launch": launch,
    "doctor": doctor,
}


_EPILOG = """\
in the order of a first run:
  verl doctor --config my_run.yaml --device_mesh my_mesh.yaml      is this node fit for it?
  verl mesh check my_mesh.yaml --config my_run.yaml                does it fit, and into the memory?
  torchrun --standalone --nproc_per_node=8 train_ppo.py --config my_run.yaml --device_mesh my_mesh.yaml
  verl launch --config my_run.yaml --device_mesh my_mesh.yaml      the same on all nodes of the mesh
  verl export RUN_DIR/checkpoints/step_100 my_model                for transformers and vLLM

train_ppo.py --help lists the settings; docs/ has the rest.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command line (without the program's name; None: this process's) and returns the exit code."""
    try:
        arguments = _parser().parse_args(argv)
        code = COMMANDS[arguments.command].run(arguments)
        sys.stdout.flush()
        return code
    except UserError as error:
        print(error, file=sys.stderr)
        return EXIT_CODE
    except BrokenPipeError:  # the reader, such as `head`, has seen enough; Python would complain at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


class Parser(argparse.ArgumentParser):
    """An argument parser whose complaints are one line: what is wrong, what resembles it, where to read on."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{self.prog}: {message}; `{self.prog} --help` tells more")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        parsed, unknown = super().parse_known_args(args, namespace)
        if self.get_default("rest") is not None:
            parsed.rest = unknown
            return parsed, []
        if self.get_default("settings") is not None:
            parsed.settings = [argument for argument in unknown if "=" in argument and not argument.startswith("-")]
            unknown = [argument for argument in unknown if argument not in parsed.settings]
        if unknown:  # said by the innermost command, which knows best what was meant
            name = unknown[0].partition("=")[0]
            close = difflib.get_close_matches(name, list(self._option_string_actions), n=1)
            self.error(f"unknown argument {unknown[0]}" + (f", did you mean {close[0]}?" if close else ""))
        return parsed, []


def _parser() -> Parser:
    parser = Parser(
        prog="verl",
        description="What is needed around train_ppo.py, which does the training itself.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"verl {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for command in COMMANDS.values():
        command.add_parser(subparsers)
    return parser


if __name__ == "__main__":
    sys.exit(main())
