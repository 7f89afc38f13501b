"""A rank without its agent ends itself, by name; a process that has lost some other parent does not."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from verl.flow.agent import find_agent, parent_of

ROOT = Path(__file__).parents[3]
START = 300.0
"""Seconds that a busy machine may need for anything."""
LOOKS = 2.0
"""Seconds in which a watch looks several times."""

RANK = """
import sys, time
from verl.flow.agent import AgentWatch, agent_of_this_process

watch = AgentWatch(agent_of_this_process(), rank=3)
watch.stops = [lambda: print("children stopped", flush=True)]
if "closed" in sys.argv:
    watch.close()
print("up", flush=True)
time.sleep(1000)
"""
AGENT = """
import os, subprocess, sys, threading, time

def start():
    rank = subprocess.Popen(sys.argv[2:], start_new_session=True, env={**os.environ, "TORCHELASTIC_RUN_ID": "job"})
    print(rank.pid, flush=True)

thread = threading.Thread(target=start)
thread.start() if sys.argv[1] == "thread" else start()
time.sleep(1000)
"""


@dataclass
class Started:
    agent: subprocess.Popen[str]
    rank: int

    def said(self) -> str:
        """What was printed when all that could print has ended, so that this also waits for the rank."""
        return self.agent.communicate(timeout=START)[0]

    def stays(self) -> bool:
        return stays_for(self.rank, LOOKS)


def stays_for(pid: int, seconds: float) -> bool:
    """Whether a process lives so long. A zombie, which a container without an init process keeps, does not."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return False
        except psutil.NoSuchProcess:
            return False
        time.sleep(0.05)
    return True


@pytest.fixture
def start() -> Iterator[Callable[..., Started]]:
    """Starts an agent, and by it a rank that is up."""
    running: list[Started] = []

    def make(*arguments: str, agent: str = "main", wrapper: tuple[str, ...] = ()) -> Started:
        rank = [*wrapper, sys.executable, "-c", RANK, *arguments]
        process = subprocess.Popen(
            [sys.executable, "-c", AGENT, agent, *rank],
            cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        assert process.stdout is not None
        lines = {process.stdout.readline().strip(), process.stdout.readline().strip()}  # in either order
        assert "up" in lines
        running.append(Started(process, int((lines - {"up"}).pop())))
        return running[-1]

    yield make
    for started in running:
        started.agent.kill()
        started.agent.wait()
        if psutil.pid_exists(started.rank):
            for process in [psutil.Process(started.rank), *psutil.Process(started.rank).children(recursive=True)]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
        assert started.agent.stdout is not None
        started.agent.stdout.close()


@pytest.mark.parametrize("agent", ["main", "thread"], ids=["", "starts its ranks on another thread"])
@pytest.mark.parametrize("wrapper", [(), ("sh", "-c", '"$@"; exit $?', "sh")], ids=["", "the rank has a wrapper"])
def test_a_rank_whose_agent_is_killed_says_so_and_ends(
    start: Callable[..., Started], agent: str, wrapper: tuple[str, ...]
) -> None:
    job = start(agent=agent, wrapper=wrapper)
    assert job.stays()  # with the agent, whether or not its thread is there
    job.agent.kill()
    said = job.said()
    assert f"verl: rank 3 ends: torchrun's agent (process {job.agent.pid}), which started it, is gone" in said
    assert "children stopped" in said


def test_an_agent_that_is_stopped_is_still_there(start: Callable[..., Started]) -> None:
    job = start()
    job.agent.send_signal(signal.SIGSTOP)
    assert job.stays()


def test_after_the_jobs_end_nobody_watches(start: Callable[..., Started]) -> None:
    job = start("closed")
    job.agent.kill()
    assert job.stays()


def test_a_reader_that_is_gone_too_does_not_keep_the_rank(start: Callable[..., Started]) -> None:
    """As when a terminal with all that it has started is closed: the rank cannot say any more why it ends."""
    job = start()
    assert job.agent.stdout is not None
    job.agent.stdout.close()
    job.agent.kill()
    assert not stays_for(job.rank, START)


def test_a_process_that_no_torchrun_has_started_outlives_the_shell_that_has(tmp_path: Path) -> None:
    """nohup, disown, a terminal that is closed."""
    log = tmp_path / "log"
    script = '"$0" -c "$1" > "$2" 2>&1 & echo $!'
    command = ["sh", "-c", script, sys.executable, RANK, str(log)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC")}
    shell = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    process = int(shell.stdout)
    try:
        assert stays_for(process, LOOKS + 2.0)  # the first seconds are for its start
        assert "rank 3 ends" not in log.read_text()
    finally:
        os.kill(process, signal.SIGKILL)


def test_who_is_watched() -> None:
    assert find_agent({}) is None
    agent = find_agent({"TORCHELASTIC_RUN_ID": "job"})
    leader = os.getsid(0)
    assert agent is None or (agent.child, agent.pid) == (leader, parent_of(leader))
    assert parent_of(os.getpid()) == os.getppid()
    assert parent_of(2**22 + 1) is None  # the kernel's own limit


@pytest.mark.skipif(
    subprocess.run(["unshare", "--pid", "--fork", "true"], capture_output=True, check=False).returncode != 0,
    reason="needs root and unshare",
)
@pytest.mark.parametrize("own", [True, False], ids=["a session of its own", "a session from outside"])
def test_an_agent_outside_the_ranks_pid_namespace_is_not_watched(own: bool) -> None:
    script = "import sys; from verl.flow.agent import find_agent; print(find_agent({'TORCHELASTIC_RUN_ID': 'job'}))"
    unshare = ["unshare", "--pid", "--fork", "--mount-proc", *(["setsid"] if own else [])]
    done = subprocess.run(
        [*unshare, sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout == "None\n", done.stderr
