"""The pool of reward workers: real processes, real hangs, real kills."""

from __future__ import annotations

import ctypes
import logging
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from verl.rewards.pool import LOGGED_FAILURES, RewardPool
from verl.rewards.resolve import FunctionSpec
from verl.rewards.score import RewardError, Score, Status

START = 300.0
"""Seconds that a worker may take to start on a busy machine."""

USER_FILE = '''
import ctypes, os, signal, subprocess, sys, threading, time
from decimal import Decimal
from pathlib import Path

def compute_score(data_source, solution_str, ground_truth, extra_info=None, bonus=0.0):
    """Does what the response says."""
    what, _, argument = solution_str.partition(" ")
    match what:
        case "give":
            return float(argument) + bonus
        case "length":
            return float(len(solution_str))
        case "hang":
            time.sleep(1000)
        case "spin":
            while True:
                pass
        case "sleep":
            time.sleep(float(argument))
            return 1.0
        case "raise":
            raise KeyError(argument)
        case "sys.exit":
            sys.exit(3)
        case "exit":
            os._exit(int(argument))
        case "segfault":
            ctypes.string_at(0)
        case "oom":
            os.kill(os.getpid(), signal.SIGKILL)
        case "return":
            return eval(argument)
        case "print":
            print("x" * int(argument))
            os.write(1, b"y" * int(argument))
            subprocess.run([sys.executable, "-c", "print('z' * 10000)"], check=True)
            return 1.0
        case "pid":
            return float(os.getpid())
        case "modules":
            return float(any(name in sys.modules for name in argument.split(",")))
        case "signal":
            os.kill(os.getpid(), signal.Signals[argument])
            time.sleep(0.05)
            return 1.0
        case "child":  # leaves its process number behind, then waits for it
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
            Path(argument).write_text(str(child.pid))
            child.wait()
        case "family":  # children that few signals end: in its session, in another one, an orphan
            deaf = f"trap '' TERM INT HUP; echo $$ > {argument}/NAME.part; mv {argument}/NAME.part {argument}/NAME; "
            deaf += "while :; do sleep 1; done"
            subprocess.Popen(["sh", "-c", deaf.replace("NAME", "same")])
            subprocess.Popen(["sh", "-c", deaf.replace("NAME", "other")], start_new_session=True)
            subprocess.run(["sh", "-c", 'setsid sh -c "$0" &', deaf.replace("NAME", "orphan")], check=True)
            while not all(Path(argument, name).exists() for name in ("same", "other", "orphan")):
                time.sleep(0.02)
            return 1.0
        case "terminate":  # a child of the function can still be ended by a signal
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
            time.sleep(0.5)
            child.terminate()
            return float(child.wait(20) == -signal.SIGTERM)
        case "fork":  # and die; the fork still holds the socket
            if os.fork() == 0:
                time.sleep(1000)
            os._exit(7)
    raise AssertionError(what)

def echo(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": 1.0, "source": len(data_source), "text": len(solution_str), "truth": float(ground_truth["a"][0]),
            "info": extra_info["n"], "word": "left out", "nan": float("nan"), "flag": True}
'''


@pytest.fixture
def user_file(tmp_path: Path) -> Path:
    path = tmp_path / "user_reward.py"
    path.write_text(USER_FILE)
    return path


@pytest.fixture
def make_pool(user_file: Path) -> Iterator[Callable[..., RewardPool]]:
    pools: list[RewardPool] = []

    def make(name: str = "compute_score", kwargs: dict[str, Any] | None = None, **settings: Any) -> RewardPool:
        defaults = {"num_workers": 1, "timeout": 30.0, "failure_score": -5.0, "on_error": "count"}
        path = name if ":" in name else f"{user_file}:{name}"
        pools.append(RewardPool(FunctionSpec(path, kwargs or {}), **(defaults | settings)))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


def scores(pool: RewardPool, *texts: str) -> list[Score]:
    for row, text in enumerate(texts):
        pool.submit(row, "unit", text, "truth", {})
    return pool.collect(range(len(texts)))


def is_running(pid: int) -> bool:
    """A zombie, which a container without an init process keeps, has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_until(what: Callable[[], bool], limit: float = 100.0) -> None:
    deadline = time.monotonic() + limit
    while not what():
        assert time.monotonic() < deadline, "did not come about"
        time.sleep(0.02)


def test_scores_come_back_in_the_order_asked_for(make_pool: Callable[..., RewardPool]) -> None:
    pool = make_pool(num_workers=2)
    rows = list(range(1000))
    random.Random(0).shuffle(rows)
    for row in rows:
        pool.submit(row, "unit", f"give {row}", None, {})
    asked = rows[::-1]
    collected = pool.collect(asked[:300]) + pool.collect(asked[300:])
    assert [(score.row, score.score, score.status) for score in collected] == [(r, float(r), Status.ok) for r in asked]


def test_a_slow_sample_holds_up_no_other(make_pool: Callable[..., RewardPool]) -> None:
    pool = make_pool(num_workers=2, timeout=1000.0)
    pool.submit(0, "unit", "hang", None, {})
    for row in range(1, 20):
        pool.submit(row, "unit", f"give {row}", None, {})
    start = time.monotonic()
    assert [score.score for score in pool.collect(range(1, 20))] == list(range(1, 20))
    assert time.monotonic() - start < 500


def test_the_function_sees_what_was_submitted(make_pool: Callable[..., RewardPool]) -> None:
    pool = make_pool("echo")
    pool.submit(7, "four", "päper", {"a": [2.5, None]}, {"n": 3, "raw": b"\x00"})
    (score,) = pool.collect([7])
    extra = {"source": 4.0, "text": 5.0, "truth": 2.5, "info": 3.0, "flag": 1.0}  # finite numbers only
    assert score == Score(7, 1.0, extra, Status.ok)


def test_kwargs_reach_the_function(make_pool: Callable[..., RewardPool]) -> None:
    assert scores(make_pool(kwargs={"bonus": 0.5}), "give 1")[0].score == 1.5


def test_rows_may_be_used_again_after_they_are_collected(make_pool: Callable[..., RewardPool]) -> None:
    pool = make_pool()
    assert scores(pool, "give 1", "give 2")[1].score == 2.0
    assert scores(pool, "give 3", "give 4")[1].score == 4.0
    with pytest.raises(AssertionError, match="collected already"):
        pool.collect([0])


@pytest.mark.parametrize("text", ["hang", "spin"])
def test_a_hanging_sample_gets_the_failure_score_and_the_run_goes_on(
    make_pool: Callable[..., RewardPool], text: str, caplog: pytest.LogCaptureFixture
) -> None:
    pool = make_pool(timeout=2.0, on_error="raise")  # a time-out is counted even so
    pool.wait_ready(START)
    with caplog.at_level(logging.WARNING):
        before, hung, after = scores(pool, "give 1", text, "give 2")
    assert (hung.score, hung.extra, hung.status) == (-5.0, {}, Status.timeout)
    assert "reward.function.timeout=2.0 s" in hung.problem
    assert [before.status, before.score, after.status, after.score] == [Status.ok, 1.0, Status.ok, 2.0]
    assert f"sample of row 1 (data source 'unit', ground truth 'truth', response '{text}')" in caplog.text


def test_start_up_does_not_count_against_a_sample(tmp_path: Path, make_pool: Callable[..., RewardPool]) -> None:
    (tmp_path / "slow.py").write_text(
        "import time; time.sleep(2.5)\ndef f(data_source, solution_str, ground_truth, extra_info=None): return 1.0"
    )
    pool = make_pool(f"{tmp_path}/slow.py:f", timeout=2.0)
    assert [score.status for score in scores(pool, "a", "b")] == [Status.ok, Status.ok]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("exit 3", "its worker exited with code 3"),
        ("exit 0", "its worker exited with code 0"),
        ("segfault", "its worker was killed by SIGSEGV"),
        ("oom", r"its worker was killed by SIGKILL (out of memory?)"),
        ("fork", "its worker exited with code 7"),
    ],
)
def test_a_worker_that_dies_is_replaced(make_pool: Callable[..., RewardPool], text: str, problem: str) -> None:
    pool = make_pool()
    before, dead, after, other = scores(pool, "pid", text, "pid", "give 2")
    assert (dead.status, dead.score, dead.problem) == (Status.error, -5.0, problem)
    assert (before.status, after.status, other.score) == (Status.ok, Status.ok, 2.0)
    assert before.score != after.score


@pytest.mark.parametrize("killed", ["worker", "guard"])
def test_a_worker_that_dies_idle_costs_no_sample(make_pool: Callable[..., RewardPool], killed: str) -> None:
    pool = make_pool(on_error="raise")
    first = int(scores(pool, "pid")[0].score)
    os.kill({"worker": first, "guard": pool.pids[0]}[killed], signal.SIGKILL)
    wait_until(lambda: not is_running(first))
    second = scores(pool, "pid")[0]
    assert second.status is Status.ok
    assert second.score != first


def test_an_answer_that_is_there_counts_however_late_the_rank_looks(make_pool: Callable[..., RewardPool]) -> None:
    """A call that keeps Python's lock, on the rank's own thread, is not the sample's fault."""
    pool = make_pool(timeout=2.0)
    pool.wait_ready(START)
    pool.submit(0, "unit", "sleep 0.5", None, {})
    time.sleep(0.1)
    ctypes.PyDLL(None).sleep(3)  # PyDLL: without letting the lock go
    assert pool.collect([0])[0].status is Status.ok


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("raise nothing there", "KeyError: 'nothing there'"),
        ("sys.exit", "SystemExit: 3"),
        ("return float('nan')", "the function returned nan, which holds no finite number"),
        ("return float('-inf')", "the function returned -inf"),
        ("return None", "the function returned None"),
        ("return '1.0'", "the function returned '1.0'"),
        ("return 1j", "the function returned 1j"),
        ("return (1.0, {})", r"the function returned \(1.0, {}\)"),
        ("return {'acc': 1.0}", "a dict without 'score': {'acc': 1.0}"),
        ("return {'score': None}", "the function returned {'score': None}"),
        ("return 10 ** 400", "the function returned 1000"),
        ("return [0] * 10 ** 6", r"the function returned \[0, 0"),
    ],
)
def test_a_failing_function(make_pool: Callable[..., RewardPool], text: str, problem: str) -> None:
    pool = make_pool()
    before, failed, after = scores(pool, "pid", text, "pid")
    assert (failed.status, failed.score, failed.extra) == (Status.error, -5.0, {})
    with pytest.raises(AssertionError, match=f"(?s){problem}"):
        raise AssertionError(failed.problem)
    assert before.score == after.score  # the worker itself is none the worse
    assert len(failed.problem) < 2000


@pytest.mark.parametrize(
    ("text", "score"),
    [("return 1", 1.0), ("return True", 1.0), ("return Decimal('0.25')", 0.25), ("return {'score': 2}", 2.0)],
)
def test_numbers_of_other_types_are_scores(make_pool: Callable[..., RewardPool], text: str, score: float) -> None:
    assert scores(make_pool(on_error="raise"), text)[0].score == score


def test_on_error_raise_names_the_sample(make_pool: Callable[..., RewardPool], user_file: Path) -> None:
    pool = make_pool(on_error="raise", num_workers=2, timeout=1000.0)
    pool.submit(0, "unit", "hang", "truth", {})
    pool.submit(3, "my/data", "raise " + "x" * 1000, ["the", "truth"], {})
    start = time.monotonic()
    with pytest.raises(RewardError) as error:
        pool.collect([0, 3])
    assert time.monotonic() - start < 500  # at once, not after the other sample
    said = str(error.value)
    assert (
        "failed on the sample of row 3 (data source 'my/data', ground truth ['the', 'truth'], response 'raise xxx"
        in said
    )
    assert "x" * 150 in said.partition("Traceback")[0]
    assert "x" * 200 not in said.partition("Traceback")[0]
    assert f'File "{user_file}", line' in said
    assert "KeyError" in said
    assert "reward.function.on_error=count" in said
    with pytest.raises(RewardError):
        pool.submit(4, "unit", "give 1", None, {})


def test_a_death_obeys_on_error(make_pool: Callable[..., RewardPool]) -> None:
    pool = make_pool(on_error="raise")
    pool.submit(0, "unit", "exit 3", None, {})
    with pytest.raises(RewardError, match=r"row 0 .* exited with code 3"):
        pool.collect([0])


def test_counted_failures_are_logged_but_not_without_end(
    make_pool: Callable[..., RewardPool], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        scores(make_pool(), *(["raise x"] * (LOGGED_FAILURES + 10)))
    assert len(caplog.records) == LOGGED_FAILURES


def test_megabytes_and_the_submitting_thread_is_not_held_up(make_pool: Callable[..., RewardPool]) -> None:
    pool = make_pool(timeout=1000.0)
    pool.wait_ready(START)
    pool.submit(0, "unit", "hang", None, {})
    start = time.monotonic()
    for row in range(1, 20):  # no pipe's buffer takes that
        pool.submit(row, "unit", "length " + "\u00fc" * 1_000_000, "g" * 1_000_000, {"x": "y" * 1_000_000})
    assert time.monotonic() - start < 500
    os.kill(pool.pids[0], signal.SIGKILL)
    hung, *rest = pool.collect(range(20))
    assert hung.status is Status.error
    assert [score.score for score in rest] == [1_000_007.0] * 19


def test_output_of_the_function_does_not_reach_the_protocol(
    make_pool: Callable[..., RewardPool], capfd: pytest.CaptureFixture[str]
) -> None:
    assert [score.score for score in scores(make_pool(), "print 1000000", "give 3")] == [1.0, 3.0]
    out, err = capfd.readouterr()
    assert out == ""
    assert [err.count(letter) for letter in "xyz"] >= [1_000_000, 1_000_000, 10_000]


def test_a_worker_is_light(make_pool: Callable[..., RewardPool]) -> None:
    unwanted = "modules torch,numpy,transformers,pyarrow,multiprocessing,asyncio"
    assert [score.score for score in scores(make_pool(), unwanted, "modules json")] == [0.0, 1.0]


def test_a_worker_ignores_the_jobs_signals_but_its_children_do_not(make_pool: Callable[..., RewardPool]) -> None:
    texts = ("pid", "signal SIGTERM", "signal SIGINT", "terminate", "pid")
    first, term, interrupt, child, last = scores(make_pool(), *texts)
    assert [term.score, interrupt.score, child.score] == [1.0, 1.0, 1.0]
    assert first.score == last.score


def test_a_worker_is_not_in_the_ranks_process_group(make_pool: Callable[..., RewardPool]) -> None:
    pool = make_pool(num_workers=2)
    pool.wait_ready(START)
    assert os.getpgrp() not in {os.getpgid(pid) for pid in pool.pids}


def family_of(folder: Path) -> list[int]:
    """The process numbers that the function's "family" has left in a folder."""
    return [int((folder / name).read_text()) for name in ("same", "other", "orphan")]


@pytest.mark.parametrize(
    ("end", "problem"),
    [
        ("hang", "no score within reward.function.timeout=1.0 s"),
        ("exit 7", "its worker exited with code 7"),
        ("oom", "its worker was killed by SIGKILL (out of memory?)"),
    ],
)
def test_what_the_function_started_ends_with_its_worker(
    make_pool: Callable[..., RewardPool], tmp_path: Path, end: str, problem: str
) -> None:
    pool = make_pool(timeout=1000.0)
    assert scores(pool, f"family {tmp_path}", "give 2")[1].score == 2.0
    family = family_of(tmp_path)
    assert all(map(is_running, family))
    pool._timeout = 1.0  # only now: a busy machine takes its time for a family
    assert scores(pool, end)[0].problem == problem
    wait_until(lambda: not any(map(is_running, family)), limit=100.0)


def test_what_the_function_started_ends_with_the_pool(make_pool: Callable[..., RewardPool], tmp_path: Path) -> None:
    pool = make_pool(timeout=1000.0)
    scores(pool, f"family {tmp_path}")
    family = family_of(tmp_path)
    assert all(map(is_running, family))
    pool.close()
    assert not any(map(is_running, family))


def test_close_is_quick_whatever_the_workers_do(make_pool: Callable[..., RewardPool]) -> None:
    pool = make_pool(num_workers=2, timeout=1000.0)
    pool.wait_ready(START)
    for row in range(10):
        pool.submit(row, "unit", "spin" if row % 2 else "hang", None, {})
    pids = pool.pids
    assert len(pids) == 2 and all(map(is_running, pids))
    start = time.monotonic()
    pool.close()
    assert time.monotonic() - start < 100
    assert not any(map(is_running, pids))
    assert pool.pids == []
    pool.close()
    for use in (lambda: pool.submit(99, "unit", "x", None, {}), lambda: pool.collect([0]), lambda: pool.wait_ready(1)):
        with pytest.raises(RewardError, match="closed"):
            use()


def test_close_ends_a_collect_of_another_thread(make_pool: Callable[..., RewardPool]) -> None:
    pool = make_pool()
    pool.submit(0, "unit", "hang", None, {})
    raised: list[BaseException] = []

    def collect() -> None:
        try:
            pool.collect([0])
        except RewardError as error:
            raised.append(error)

    thread = threading.Thread(target=collect)
    thread.start()
    pool.close()
    thread.join(100)
    assert not thread.is_alive()
    assert [str(error) for error in raised] == ["The reward pool is closed"]


def test_close_during_the_start(tmp_path: Path, make_pool: Callable[..., RewardPool]) -> None:
    (tmp_path / "slow.py").write_text("import time; time.sleep(1000)")
    pool = make_pool(f"{tmp_path}/slow.py:f")
    wait_until(lambda: len(pool.pids) == 1)
    start = time.monotonic()
    pool.close()
    assert time.monotonic() - start < 100


def test_a_function_that_cannot_be_imported_is_reported_at_the_start(make_pool: Callable[..., RewardPool]) -> None:
    pool = make_pool("no_such_name", num_workers=2)
    with pytest.raises(RewardError, match="has no 'no_such_name'; its functions are compute_score, echo"):
        pool.wait_ready(START)


def test_a_worker_that_dies_while_it_starts(tmp_path: Path, make_pool: Callable[..., RewardPool]) -> None:
    (tmp_path / "dead.py").write_text("import os; os._exit(9)")
    with pytest.raises(RewardError, match=r"cannot run .*dead\.py:f: its worker exited with code 9"):
        make_pool(f"{tmp_path}/dead.py:f").wait_ready(START)


def test_an_import_that_takes_too_long(tmp_path: Path, make_pool: Callable[..., RewardPool]) -> None:
    (tmp_path / "slow.py").write_text("import time; time.sleep(1000)")
    with pytest.raises(RewardError, match=r"1 of 1 reward workers have not imported .* within 1 s"):
        make_pool(f"{tmp_path}/slow.py:f").wait_ready(1.0)
    with pytest.raises(RewardError, match="a worker has not imported it within 1 s"):
        make_pool(f"{tmp_path}/slow.py:f", start_timeout=1.0).wait_ready(START)


def test_a_module_of_the_ranks_own_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make_pool: Callable[..., RewardPool]
) -> None:
    (tmp_path / "only_on_this_path.py").write_text(USER_FILE)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    assert scores(make_pool("only_on_this_path:compute_score"), "give 2")[0].score == 2.0


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"num_workers": 0}, "num_workers=0 must be at least 1"),
        ({"timeout": 0.0}, "timeout=0.0 must be a positive number"),
        ({"timeout": float("inf")}, "timeout=inf"),
        ({"failure_score": float("nan")}, "failure_score=nan must be finite"),
        ({"on_error": "ignore"}, "on_error='ignore' must be one of raise, count"),
    ],
)
def test_settings_out_of_range(make_pool: Callable[..., RewardPool], settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        make_pool(**settings)


RANK = """
import sys, time
import psutil
from verl.rewards.pool import RewardPool
from verl.rewards.resolve import FunctionSpec

pool = RewardPool(FunctionSpec(sys.argv[1]), num_workers=3, timeout=1000, failure_score=0, on_error="count")
pool.wait_ready(300)
pool.submit(0, "unit", f"family {sys.argv[3]}", None, {})
pool.collect([0])
pool.submit(1, "unit", "spin", None, {})
pool.submit(2, "unit", "hang", None, {})
print(*(child.pid for child in psutil.Process().children(recursive=True)), flush=True)
if sys.argv[2] == "wait":
    time.sleep(1000)
"""


@pytest.mark.parametrize("end", ["SIGKILL", "SIGTERM", "return"])
def test_workers_and_what_they_started_die_with_their_rank(user_file: Path, tmp_path: Path, end: str) -> None:
    """Busy and idle ones, also where the rank has no time to close the pool."""
    then = "return" if end == "return" else "wait"
    command = [sys.executable, "-c", RANK, f"{user_file}:compute_score", then, str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as rank:
        assert rank.stdout is not None
        pids = [int(pid) for pid in rank.stdout.readline().split()]
        assert len(pids) >= 3 + 3 + 3  # guards, workers, and one's family
        if end != "return":
            assert all(map(is_running, pids))
            rank.send_signal(signal.Signals[end])
        rank.wait(100)
    wait_until(lambda: not any(map(is_running, [*pids, *family_of(tmp_path)])), limit=100.0)


def test_a_rank_that_the_terminal_interrupts_keeps_its_workers(user_file: Path) -> None:
    """SIGINT to the rank's whole process group: the rank decides, its workers score on."""
    script = """
import os, signal, sys
from verl.rewards.pool import RewardPool
from verl.rewards.resolve import FunctionSpec

signal.signal(signal.SIGINT, lambda *_: None)
with RewardPool(FunctionSpec(sys.argv[1]), num_workers=1, timeout=60, failure_score=0, on_error="raise") as pool:
    pool.wait_ready(300)
    pool.submit(0, "unit", "sleep 1", None, {})
    os.killpg(os.getpgrp(), signal.SIGINT)
    print(pool.collect([0])[0].score)
"""
    done = subprocess.run(
        [sys.executable, "-c", script, f"{user_file}:compute_score"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=100,
        start_new_session=True,
    )
    assert done.stdout == "1.0\n", done.stderr
