"""On a real pseudo-terminal, read back through a small terminal emulator; and on pipes."""

import io
import os
import pty
import re
import subprocess
import sys
import termios
from contextlib import suppress

import pytest
from rich.console import Console

from verl.monitor.progress import Progress

METRICS = {
    "critic/score/mean": 0.5,
    "actor/ppo_kl": 0.00312,
    "response_length/mean": 203.4,
    "response_length/max": 512.0,
    "perf/tokens_per_s": 1834.2,
    "timing_s/gen": 3.14,
    "timing_s/step": 9.8,
    "timing_s/update_actor": 5.2,
}
PLAIN = (
    "reward 0.500 | kl 0.00312 | response 203 tokens (max 512) | 1,834 tokens/s"
    " | step 9.8 s, update_actor 5.2 s, gen 3.1 s"
)

PROGRAM = f"""
import os, sys, warnings
from verl.monitor.progress import Progress
metrics = {METRICS}
long = "l" + "o" * 300 + "ng [bold]kept[/bold] :smile:"
with Progress(4) as progress:
    progress.stage("gen")
    warnings.warn(long)
    print("printed", long)
    progress.update(1, metrics)
    progress.note("validation [reward] 0.5")
    os.write(2, b"from another rank\\nand more\\n")
    progress.update(2, metrics)
    progress.stage("update_actor")
    print("in stages", end=" ", flush=False)
    print("joined")
    if sys.argv[1:] == ["raise"]:
        raise RuntimeError("boom " + long)
    if sys.argv[1:] == ["exit"]:
        os._exit(3)
print("after")
"""
LONG = "l" + "o" * 300 + "ng [bold]kept[/bold] :smile:"


def in_terminal(*args: str, stderr=None) -> tuple[int, str, bool]:
    """Exit status, raw output, and whether the terminal's modes are as before."""
    master, slave = pty.openpty()
    before = termios.tcgetattr(master)
    env = os.environ | {"TERM": "xterm-256color", "COLUMNS": "100", "PYTHONIOENCODING": "utf-8"}
    child = subprocess.Popen([sys.executable, "-c", PROGRAM, *args], stdout=slave, stderr=stderr or slave, env=env)
    os.close(slave)
    raw = b""
    # the read fails once nobody holds the other end
    with suppress(OSError):
        while chunk := os.read(master, 65536):
            raw += chunk
    same = termios.tcgetattr(master) == before
    os.close(master)
    return child.wait(100), raw.decode(), same


def screen(raw: str) -> list[str]:
    """What a terminal shows, for a program that only returns the carriage, feeds lines and erases the line."""
    lines, column = [""], 0
    for token in re.findall(r"\x1b\[[?0-9;]*[A-Za-z]|\r|\n|[^\x1b\r\n]+", raw):
        if token == "\r":
            column = 0
        elif token == "\n":
            lines.append("")
        elif token == "\x1b[2K":
            lines[-1] = ""
        elif token.startswith("\x1b"):
            assert token.endswith("m") or token in ("\x1b[?25l", "\x1b[?25h"), f"moves about the screen: {token!r}"
        else:
            lines[-1] = lines[-1][:column].ljust(column) + token + lines[-1][column + len(token) :]
            column += len(token)
    return lines


def test_a_terminal_shows_everything_and_one_live_line():
    status, raw, same = in_terminal()
    shown = screen(raw)
    assert status == 0 and same
    assert any(line.endswith(f"UserWarning: {LONG}") for line in shown)
    assert f"printed {LONG}" in shown
    assert "validation [reward] 0.5" in shown
    assert "in stages joined" in shown
    (foreign,) = [line for line in shown if line.endswith("from another rank")]
    assert re.match(r"━{5}─{15} 1/4 \| eta [\d:]+ \| gen", foreign) and shown[shown.index(foreign) + 1] == "and more"
    live = [line for line in shown if re.match("━*─* [0-9]/4", line) and "another" not in line]
    assert len(live) == 1 and re.fullmatch(r"━{10}─{10} 2/4 \| eta [\d:]+ \| update_actor *", live[0])
    assert [line[:8] for line in shown if line[9:].startswith(f" | {PLAIN}"[1:])] == ["step 1/4", "step 2/4"]
    assert shown[shown.index(live[0]) + 1] == "after"


def test_an_exception_finds_the_terminal_as_it_was():
    status, raw, same = in_terminal("raise")
    assert status == 1 and same
    assert raw.rindex("\x1b[?25h") > raw.rindex("\x1b[?25l")
    shown = screen(raw)
    assert f"RuntimeError: boom {LONG}" in shown and "Traceback (most recent call last):" in shown


def test_a_process_that_leaves_by_force_leaves_the_cursor_visible():
    status, raw, same = in_terminal("exit")
    assert status == 3 and same
    assert raw.rindex("\x1b[?25h") > raw.rindex("\x1b[?25l")


def test_warnings_reach_the_file_that_stderr_is(tmp_path):
    with (tmp_path / "stderr").open("wb") as file:
        _, raw, _ = in_terminal(stderr=file)
    errors = (tmp_path / "stderr").read_text()
    assert f"UserWarning: {LONG}" in errors and "from another rank\nand more\n" in errors
    assert "UserWarning" not in raw and f"printed {LONG}" in screen(raw)


@pytest.mark.parametrize("env", [{}, {"FORCE_COLOR": "1", "TERM": "xterm"}, {"PYTHONIOENCODING": "ascii"}])
def test_a_pipe_gets_one_plain_line_a_step(env):
    env = os.environ | env
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=300, env=env)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.split("\n")
    assert lines[0] == f"printed {LONG}"
    assert re.fullmatch(re.escape(f"step 1/4 | {PLAIN} | eta ") + r"[\d:]+", lines[1])
    assert lines[2] == "validation [reward] 0.5"
    assert lines[3].startswith(f"step 2/4 | {PLAIN}")
    assert lines[4:] == ["in stages joined", "after", ""]
    assert f"UserWarning: {LONG}" in done.stderr


def test_other_ranks_say_nothing():
    out = io.StringIO()
    console = Console(file=out, force_terminal=True)
    with Progress(2, enabled=False, console=console) as progress:
        progress.stage("gen")
        progress.update(1, METRICS)
        progress.note("note")
    assert out.getvalue() == ""


def test_eta_is_the_mean_of_the_last_steps():
    """Steps of 10 s, then of 2 s: after 20 of the latter the former are forgotten."""
    now = [0.0]
    out = io.StringIO()
    console = Console(file=out, force_interactive=False, width=200)
    with Progress(100, done=10, console=console, clock=lambda: now[0]) as progress:
        for step in range(11, 41):
            now[0] += 10.0 if step <= 20 else 2.0
            progress.update(step, {})
    lines = out.getvalue().splitlines()
    assert lines[0] == "step 11/100 | eta 0:14:50"  # 89 steps of 10 s
    assert lines[10] == f"step 21/100 | eta 0:12:{round((100 + 2) / 11 * 79) - 720:02d}"
    assert lines[-1] == "step 40/100 | eta 0:02:00"  # 60 steps of 2 s


def test_a_terminal_without_unicode_gets_ascii():
    class Ascii(io.StringIO):
        encoding = "ascii"

    out = Ascii()
    console = Console(file=out, force_terminal=True, width=60)
    with Progress(2, console=console) as progress:
        progress.update(1, METRICS)
    assert out.getvalue().isascii() and "##########" in out.getvalue()
