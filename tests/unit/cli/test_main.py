"""The `verl` command as a whole: exit codes, and that a mistake is told in one line without a traceback."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from verl import __version__
from verl.cli.main import COMMANDS, main

ROOT = Path(__file__).parents[3]


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(arguments) == 2
    said = capsys.readouterr()
    assert said.out == ""
    return said.err.rstrip("\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "verl: the following arguments are required: COMMAND; `verl --help` tells more"),
        (("--verson",), "verl: the following arguments are required: COMMAND; `verl --help` tells more"),
        (("mesh",), "verl mesh: the following arguments are required: ACTION; `verl mesh --help` tells more"),
        (
            ("mesh", "check"),
            "verl mesh check: the following arguments are required: FILE; `verl mesh check --help` tells more",
        ),
        (
            ("mesh", "check", "m.yaml", "--modle", "x"),
            "verl mesh check: unknown argument --modle, did you mean --model?; `verl mesh check --help` tells more",
        ),
        (
            ("mesh", "show", "m.yaml", "--device-memory"),
            "verl mesh show: argument --device-memory: expected one argument; `verl mesh show --help` tells more",
        ),
        (
            ("mesh", "check", "m.yaml", "n.yaml"),
            "verl mesh check: unknown argument n.yaml; `verl mesh check --help` tells more",
        ),
        (
            ("export", "a", "b", "--rol", "critic"),
            "verl export: unknown argument --rol, did you mean --role?; `verl export --help` tells more",
        ),
    ],
)
def test_a_command_line_that_is_wrong(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    assert refused(capsys, *arguments) == message


def test_an_unknown_command_is_answered_with_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(capsys, "mehs")
    assert said.startswith("verl: argument COMMAND: invalid choice: 'mehs'")
    assert all(f"'{name}'" in said for name in COMMANDS)


@pytest.mark.parametrize("arguments", [["--help"], ["mesh", "--help"], *([name, "--help"] for name in COMMANDS)])
def test_help(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith("usage: verl")


def test_python_m_verl_is_the_same_and_does_not_wait_for_torch() -> None:
    code = (
        "import sys, runpy; sys.argv[1:] = ['--version']\n"
        "try: runpy.run_module('verl', run_name='__main__')\n"
        "finally: print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=300)
    assert (done.returncode, done.stdout.split("\n")[:2]) == (0, [f"verl {__version__}", "False"]), done.stderr


def test_a_reader_that_has_seen_enough_is_no_error() -> None:
    code = (
        "import sys; from verl.cli import main, mesh; mesh.run = lambda _: print('x' * 100_000) or 0\n"
        "sys.exit(main.main(['mesh', 'show', 'mesh.yaml']))"
    )
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run([sys.executable, "-c", code], stdout=write, stderr=subprocess.PIPE, cwd=ROOT, timeout=300)
    os.close(write)
    assert (done.returncode, done.stderr) == (1, b"")
