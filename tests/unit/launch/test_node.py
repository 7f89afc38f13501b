"""A node's end of a launch, with real processes: what it is told runs, and nothing of it stays."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.support.jobs import MARK, _bears, wait_until
from verl.launch.node import GREETING
from verl.launch.plan import Order

START = 300.0
"""Seconds; it only catches a hang."""
SILENCE = 3.0
SHORT = f"""
from verl.launch import node
node.SILENCE_SECONDS, node.GRACE_SECONDS = {SILENCE}, 1.5
node.ORPHAN_SECONDS = 0.5
raise SystemExit(node.main())
"""
STUBBORN = "trap '' TERM INT HUP; echo up; while :; do sleep 0.1; done"
SAYS_WHEN_TOLD = "trap 'echo told; exit 7' TERM; echo up; while :; do sleep 0.1; done"


class Keeper:
    """`python -m verl.launch.node` and what belongs to it."""

    def __init__(self, folder: Path, short: bool) -> None:
        self.mark = uuid.uuid4().hex
        self.folder = folder
        command = ["-c", SHORT] if short else ["-m", "verl.launch.node"]
        self.process = subprocess.Popen(
            [sys.executable, "-P", *command, "--greet"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
        assert self.line() == GREETING

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().decode().rstrip("\n")

    def order(self, script: str, workdir: str | None = None) -> None:
        order = Order(("sh", "-c", script), {MARK: self.mark, "GREETED": "yes we are"}, workdir or str(self.folder))
        self.send(order.to_line())

    def send(self, line: bytes) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line)
        self.process.stdin.flush()

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()

    def job(self) -> list[psutil.Process]:
        return [process for process in psutil.process_iter() if _bears(process, self.mark)]

    def wait(self, seconds: float = START) -> int:
        return self.process.wait(seconds)

    def rest(self) -> tuple[str, str]:
        assert self.process.stdout is not None and self.process.stderr is not None
        return self.process.stdout.read().decode(), self.process.stderr.read().decode()


@pytest.fixture(params=[False])
def keeper(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Keeper]:
    made = Keeper(tmp_path, short=request.param)
    try:
        yield made
        wait_until(lambda: not made.job(), START, lambda: f"left: {made.job()}")
    finally:
        for process in made.job():
            process.kill()
        made.process.kill()
        made.process.wait()
        for pipe in (made.process.stdin, made.process.stdout, made.process.stderr):
            assert pipe is not None
            pipe.close() if pipe is not made.process.stdin or not pipe.closed else None


short = pytest.mark.parametrize("keeper", [True], indirect=True)


@pytest.mark.parametrize(("script", "code"), [("exit 0", 0), ("exit 3", 3), ("kill -KILL $$", 137)])
def test_the_exit_code_is_the_jobs(keeper: Keeper, script: str, code: int) -> None:
    keeper.order(script)
    assert keeper.wait() == code


def test_folder_environment_and_both_streams_are_the_jobs(keeper: Keeper) -> None:
    keeper.order('pwd; echo "$GREETED"; echo wrong >&2; cat')
    assert keeper.wait() == 0
    assert keeper.rest() == (f"{keeper.folder}\nyes we are\n", "wrong\n")


@pytest.mark.parametrize("what", ["workdir", "program"])
def test_what_cannot_run_is_the_users_mistake(keeper: Keeper, what: str) -> None:
    missing = str(keeper.folder / "missing")
    if what == "workdir":
        keeper.order("exit 0", workdir=missing)
    else:
        keeper.send(Order((missing,), {}, str(keeper.folder)).to_line())
    assert keeper.wait() == 2
    assert f"No such file or directory: {missing}" in keeper.rest()[1]


def test_stop_is_sigterm_and_the_job_decides_how_it_ends(keeper: Keeper) -> None:
    keeper.order(SAYS_WHEN_TOLD)
    assert keeper.line() == "up"
    keeper.send(b"stop\n")
    assert keeper.wait() == 7
    assert keeper.rest()[0] == "told\n"


def test_sigterm_to_the_keeper_is_a_stop(keeper: Keeper) -> None:
    keeper.order(SAYS_WHEN_TOLD)
    assert keeper.line() == "up"
    keeper.process.send_signal(signal.SIGTERM)
    assert keeper.wait() == 7


def test_kill_does_not_ask(keeper: Keeper) -> None:
    keeper.order(STUBBORN)
    assert keeper.line() == "up"
    keeper.send(b"kill\n")
    assert keeper.wait() == 137


@short
def test_a_job_that_does_not_stop_is_killed(keeper: Keeper) -> None:
    keeper.order(STUBBORN)
    assert keeper.line() == "up"
    keeper.send(b"stop\n")
    assert keeper.wait() == 137


def test_the_job_is_stopped_where_the_launcher_is_gone(keeper: Keeper) -> None:
    keeper.order(SAYS_WHEN_TOLD)
    assert keeper.line() == "up"
    keeper.close()
    assert keeper.wait() == 7
    out, err = keeper.rest()
    assert out == "told\n" and "the launcher or the connection to it is gone" in err


def test_a_launcher_that_goes_before_it_has_given_an_order(keeper: Keeper) -> None:
    keeper.close()
    assert keeper.wait() == 143


@short
def test_the_job_is_stopped_where_nothing_is_heard_of_the_launcher(keeper: Keeper) -> None:
    """As when the network breaks: no end of the input is seen."""
    keeper.order(SAYS_WHEN_TOLD)
    assert keeper.line() == "up"
    begin = time.monotonic()
    while time.monotonic() - begin < 1.2 * SILENCE:
        time.sleep(0.2)
        keeper.send(b"\n")
    assert keeper.process.poll() is None, "it was heard of"
    assert keeper.wait() == 7


FAMILY = """
setsid sh -c "trap '' TERM; sleep 1000 & sleep 1000" &
(setsid sh -c 'setsid sleep 1000 &' &)
echo up
"""


def _sleeps_long(process: psutil.Process) -> bool:
    try:
        return process.cmdline() == ["sleep", "1000"]
    except psutil.NoSuchProcess:
        return False


@short
@pytest.mark.parametrize("end", ["exit 0", "kill -KILL $$"])
def test_nothing_that_the_job_has_started_outlives_it(keeper: Keeper, end: str) -> None:
    """In sessions of their own, orphaned, deaf to SIGTERM."""
    keeper.order(FAMILY + "until [ -e seen ]; do sleep 0.05; done; " + end)
    assert keeper.line() == "up"
    wait_until(lambda: sum(_sleeps_long(p) for p in keeper.job()) == 3, START, lambda: str(keeper.job()))
    (keeper.folder / "seen").touch()
    keeper.wait()
    assert keeper.job() == []


def test_the_job_gets_sigterm_even_where_the_keeper_is_killed(keeper: Keeper) -> None:
    keeper.order(SAYS_WHEN_TOLD)
    assert keeper.line() == "up"
    keeper.process.kill()
    wait_until(lambda: not keeper.job(), START, lambda: f"left: {keeper.job()}")
    assert keeper.rest()[0] == "told\n"


def test_the_keeper_leaves_a_terminals_signals_to_the_launcher(keeper: Keeper) -> None:
    keeper.order(SAYS_WHEN_TOLD)
    assert keeper.line() == "up"
    keeper.process.send_signal(signal.SIGINT)
    keeper.process.send_signal(signal.SIGHUP)
    time.sleep(0.5)
    assert keeper.process.poll() is None
    keeper.send(b"stop\n")
    assert keeper.wait() == 7
