"""The launcher with nodes that are all this machine: real processes, no ssh."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.jobs import Job, started_command, wait_until
from verl.errors import UserError
from verl.launch.plan import NodePlan, Order
from verl.launch.run import exit_code, launch

START = 300.0
"""Seconds; it only catches a hang."""
DRIVER = """
import json, os, sys
from verl.launch import run
from verl.launch.plan import NodePlan, Order
run.LINGER_SECONDS = 0.5
scripts = json.loads(sys.argv[1])
plans = [NodePlan(name, True, 1, Order(("sh", "-c", script), {}, os.getcwd())) for name, script in scripts.items()]
sys.exit(run.launch(plans, sys.executable, None))
"""
UP_TO_SIGTERM = "trap 'echo told; exit 1' TERM; echo up; while :; do sleep 0.1; done"
STUBBORN = "trap '' TERM INT HUP; echo up; while :; do sleep 0.1; done"


@contextmanager
def launched(folder: Path, **scripts: str) -> Iterator[Job]:
    with started_command(["-c", DRIVER, json.dumps(scripts)], folder) as job:
        yield job


def wait_for(job: Job, text: str, times: int) -> None:
    wait_until(lambda: job.stdout.count(text) == times or job.process.poll() is not None, START, lambda: job.stderr)
    assert job.stdout.count(text) == times, job.stdout + job.stderr


def test_every_line_has_its_node_in_front_on_the_stream_it_came_on(tmp_path: Path) -> None:
    count = "for i in $(seq 300); do echo out $i; echo err $i >&2; done; printf 'no end'"
    with launched(tmp_path, a=count, b=count) as job:
        assert job.wait(START) == 0
        for text, word, rest in ((job.stdout, "out", ["no end"]), (job.stderr, "err", [])):
            lines = text.splitlines()
            for node in "ab":
                mine = [line.removeprefix(f"{node} | ") for line in lines if line.startswith(f"{node} | ")]
                assert mine == [f"{word} {i}" for i in range(1, 301)] + rest
            assert len(lines) == 2 * (300 + len(rest))


@pytest.mark.parametrize(
    ("codes", "code"),
    [([0, 0], 0), ([0, 3], 1), ([1, 2], 2), ([2, 0], 2), ([143, 1], 1), ([255, 2], 2), ([137], 1)],
)
def test_a_mistake_explains_all_other_ends(codes: list[int], code: int) -> None:
    assert exit_code(codes) == code


def test_where_a_node_fails_the_others_are_stopped_and_it_is_named(tmp_path: Path) -> None:
    up = "trap 'echo told; exit 1' TERM; echo up; touch NAME; while :; do sleep 0.1; done"
    fails = "until [ -e a ] && [ -e c ]; do sleep 0.05; done; exit 5"
    with launched(tmp_path, a=up.replace("NAME", "a"), b=fails, c=up.replace("NAME", "c")) as job:
        assert job.wait(START) == 1
        assert "verl launch: b ended with code 5; a, c will be stopped" in job.stderr
        assert sorted(job.stdout.splitlines()) == ["a | told", "a | up", "c | told", "c | up"]
        job.assert_nothing_left()


def test_a_mistake_of_the_users_gives_2_and_no_more_words(tmp_path: Path) -> None:
    with launched(tmp_path, a="echo 'm.yaml: wrong' >&2; exit 2", b=UP_TO_SIGTERM) as job:
        assert job.wait(START) == 2
        assert job.stderr == "a | m.yaml: wrong\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_stops_the_job_in_order(number: signal.Signals, tmp_path: Path) -> None:
    with launched(tmp_path, a=UP_TO_SIGTERM, b=UP_TO_SIGTERM) as job:
        wait_for(job, "up", 2)
        job.process.send_signal(number)
        assert job.wait(START) == 128 + number
        assert job.stdout.count("told") == 2
        assert f"verl launch: {number.name}: stopping the job" in job.stderr
        job.assert_nothing_left()


def test_a_terminals_ctrl_c_reaches_the_job_once_and_through_the_launcher(tmp_path: Path) -> None:
    """A terminal signals all processes of its foreground group."""
    script = "trap 'echo int' INT; " + UP_TO_SIGTERM
    with launched(tmp_path, a=script, b=script) as job:
        wait_for(job, "up", 2)
        os.killpg(job.process.pid, signal.SIGINT)
        assert job.wait(START) == 130
        assert job.stdout.count("told") == 2 and "int" not in job.stdout


def test_a_second_signal_kills(tmp_path: Path) -> None:
    with launched(tmp_path, a=STUBBORN, b=STUBBORN) as job:
        wait_for(job, "up", 2)
        job.process.send_signal(signal.SIGINT)
        job.wait_for_line("SIGINT: stopping the job", START)
        job.process.send_signal(signal.SIGINT)
        assert job.wait(START) == 130
        job.assert_nothing_left()


def test_nothing_is_left_of_a_launcher_that_is_killed(tmp_path: Path) -> None:
    with launched(tmp_path, a=UP_TO_SIGTERM, b="setsid sleep 1000 & " + UP_TO_SIGTERM) as job:
        wait_for(job, "up", 2)
        job.process.kill()
        job.wait(START)
        job.assert_nothing_left()


def test_one_node_here_writes_to_the_terminal_itself(tmp_path: Path) -> None:
    with launched(tmp_path, a=UP_TO_SIGTERM) as job:
        job.wait_for_line("up", START)
        job.process.send_signal(signal.SIGINT)
        assert job.wait(START) == 130
        assert job.stdout == "up\ntold\n"
        job.assert_nothing_left()
    with launched(tmp_path, a="exit 2") as job:
        assert job.wait(START) == 2 and job.stderr == ""


def test_a_reader_that_has_seen_enough_ends_the_job(tmp_path: Path) -> None:
    ours, theirs = os.pipe()
    scripts = dict.fromkeys("ab", "while :; do echo line; sleep 0.05; done")
    with subprocess.Popen(
        [sys.executable, "-c", DRIVER, json.dumps(scripts)], stdout=theirs, cwd=tmp_path, start_new_session=True
    ) as process:
        os.close(theirs)
        assert b" | line\n" in os.read(ours, 100)
        os.close(ours)
        assert process.wait(START) == 128 + signal.SIGPIPE


def test_a_python_that_does_not_start_is_told_and_nothing_runs(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 'No module named verl' >&2\nexit 1\n")
    python.chmod(0o755)
    plans = [NodePlan(name, True, 1, Order(("touch", "ran"), {}, str(tmp_path))) for name in "ab"]
    with pytest.raises(UserError) as caught:
        launch(plans, str(python), None)
    assert str(caught.value).count("No module named verl") == 2
    assert not (tmp_path / "ran").exists()
