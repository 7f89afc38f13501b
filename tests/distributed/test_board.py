"""A rank that hangs, is stopped or dies ends the job in time, by its own name."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from tests.support.ranks import RankFailed, run_ranks
from tests.support.stalls import announce_hang, await_line, watch_for_hangs_alone
from verl.errors import ConfigError, UserError
from verl.flow import ending
from verl.flow.batch import Column, Record, Rows
from verl.flow.job import Job, start_job
from verl.flow.placement import Placement

pytestmark = pytest.mark.dist

LIMIT = 2.0
FOR_EVER = 1000.0


@dataclass(frozen=True)
class Scores(Record):
    scores: Column


def pass_on(job: Job, src: int, dst: int) -> None:
    """One hand-over from rank to rank, read at once."""
    source, target = Placement("actor", (src,)), Placement("critic", (dst,))
    rows = Rows.scalars([1.0], torch.float32) if job.rank == src else None
    record = Scores(Column.produced("scores", 1, source, job.rank, rows))
    record = job.hand_over(record, to=[SimpleNamespace(placement=target)])
    if job.rank == dst:
        record.scores.on(target)


def hung(
    world: int, fn: Callable[..., None], capfd: pytest.CaptureFixture[str], *args: object
) -> tuple[RankFailed, str]:
    """Runs what hangs; who failed how, and what was said on standard error."""
    with pytest.raises(RankFailed) as caught:
        run_ranks(world, fn, *args, grace=0.0)
    return caught.value, capfd.readouterr().err


def accused(said: str) -> set[int]:
    return {int(rank) for rank in re.findall(r"rank (\d+) has shown no sign of life", said)}


def start() -> Job:
    watch_for_hangs_alone()
    return start_job(LIMIT, check_program=False)


def hang(job: Job) -> None:
    job.board.timeout = FOR_EVER  # the others are to find it
    announce_hang(job.rank)
    time.sleep(FOR_EVER)


def hangs_in_a_stage(error_files: Path) -> None:
    os.environ["TORCHELASTIC_ERROR_FILE"] = str(error_files / os.environ["RANK"])
    job = start()
    job.board.at("compute values")
    if job.rank == 2:
        hang(job)
    job.board.at("update_actor")
    job.hand_over.agree("it", source=2)


def test_a_rank_that_hangs_in_a_stage_is_named_by_those_who_wait(
    capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    _, said = hung(3, hangs_in_a_stage, capfd, tmp_path)
    assert accused(said) == {2}
    assert re.search(r"rank [01] waits, and rank 2 has shown no sign of life for trainer.stage_timeout = 2 s", said)
    assert "  rank 0: update_actor: waits for an agreement from rank 1, 2 (for " in said
    assert "  rank 1: update_actor: waits for an agreement from rank 0, 2 (for " in said
    assert "  rank 2: compute values (for " in said
    # torchrun shows what is in this file
    messages = [json.loads(file.read_text())["message"]["message"] for file in tmp_path.iterdir()]
    assert messages and all("rank 2 has shown no sign of life" in message for message in messages)


def hangs_at_the_end_of_a_chain() -> None:
    job = start()
    if job.rank:
        job.board.timeout = FOR_EVER  # rank 0, which waits for 1 alone, is to find the cause
    if job.rank == 2:
        job.board.at("gen")
        hang(job)
    pass_on(job, 2, 1)
    pass_on(job, 1, 0)


def test_the_end_of_a_chain_of_waits_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    _, said = hung(3, hangs_at_the_end_of_a_chain, capfd)
    assert "verl: rank 0 waits, and rank 2 has shown no sign of life" in said
    assert "rank 0: start: waits for scores from rank 1" in said
    assert "rank 1: start: waits for scores from rank 2" in said
    assert "rank 2: gen (for " in said


def is_stopped(while_it_waits: bool) -> None:
    job = start()
    pids = job.everywhere(os.getpid())
    if while_it_waits:
        if job.rank == 0:
            await_line(1, "waits for scores")
            os.kill(pids[1], signal.SIGSTOP)
            announce_hang(1)
        pass_on(job, 0, 1)
    elif job.rank == 1:
        announce_hang(1)
        os.kill(os.getpid(), signal.SIGSTOP)
    pass_on(job, 1, 0)


@pytest.mark.parametrize("while_it_waits", [False, True])
def test_a_process_that_is_stopped_is_named(while_it_waits: bool, capfd: pytest.CaptureFixture[str]) -> None:
    failed, said = hung(2, is_stopped, capfd, while_it_waits)
    assert accused(said) == {1}
    assert failed.tracebacks[1] == "killed: it did not end in time"


def wait_for_each_other() -> None:
    job = start()
    announce_hang(0, 1)
    other = 1 - job.rank
    with job.board.waiting([other], "a message that nobody sends"):
        dist.recv(torch.empty(1), other, group=job.hand_over.group, tag=99)


def test_ranks_that_wait_for_each_other_are_named(capfd: pytest.CaptureFixture[str]) -> None:
    _, said = hung(2, wait_for_each_other, capfd)
    assert "ranks 0, 1 wait for each other, and none of them has moved for trainer.stage_timeout = 2 s" in said


SEEN = 5.0
"""The limit of a rank that beats: much more than it needs on a busy machine."""


def generate_slowly() -> float:
    job = start_job(SEEN, check_program=False)
    start = time.monotonic()
    if job.rank == 1:
        job.board.at("gen")
        while time.monotonic() - start < 1.2 * SEEN:
            time.sleep(0.25)
            job.board.beat()
    pass_on(job, 1, 0)
    pass_on(job, 0, 2)
    job.close()
    return time.monotonic() - start


def test_a_rank_that_goes_on_beating_may_take_its_time() -> None:
    """Rank 2 waits for rank 0, which waits for rank 1, for longer than the limit."""
    assert min(run_ranks(3, generate_slowly)) > SEEN


def is_killed() -> None:
    job = start_job(FOR_EVER, check_program=False)
    if job.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    job.hand_over.agree("it", source=1)


def test_a_rank_that_is_killed_ends_the_others() -> None:
    with pytest.raises(RankFailed) as failed:
        run_ranks(3, is_killed)
    ends = failed.value.tracebacks
    assert ends[1] == "exit status -9"
    assert "RuntimeError" in ends[0] and "RuntimeError" in ends[2]


def cleans_up_for_ever(raises: bool) -> None:
    job = start()
    job.board.on_stall.append(lambda: time.sleep(FOR_EVER))
    if raises:
        job.board.on_stall.insert(0, lambda: [][0])
    if job.rank == 1:
        announce_hang(1)
        time.sleep(FOR_EVER)
    job.hand_over.agree("it", source=1)


@pytest.mark.parametrize("raises", [False, True])
def test_a_clean_up_that_fails_or_hangs_does_not_hold_the_process(
    raises: bool, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ending, "EXIT_SECONDS", 0.5)
    failed, said = hung(2, cleans_up_for_ever, capfd, raises)
    assert "rank 1 has shown no sign of life" in said
    assert "exit status 1" in failed.tracebacks.values()


def start_with(problems: list[tuple[str, ...]]) -> str | int:
    job = start_job(FOR_EVER, check_program=False)

    def check() -> int:
        if problems[job.rank]:
            raise ConfigError(*problems[job.rank])
        return 10 * job.rank

    try:
        return job.together(check)
    except UserError as error:
        return str(error)
    finally:
        job.close()


def test_what_one_ranks_user_got_wrong_is_raised_on_all() -> None:
    assert run_ranks(3, start_with, [(), ("model.path: missing",), ()]) == ["model.path: missing"] * 3


def test_what_several_ranks_find_wrong_is_said_once() -> None:
    found = [("model.path: missing", "node 0 has no GPU"), (), ("model.path: missing", "node 1 has no GPU")]
    assert run_ranks(3, start_with, found) == ["model.path: missing\nnode 0 has no GPU\nnode 1 has no GPU"] * 3


def test_without_a_problem_each_rank_has_its_own_result() -> None:
    assert run_ranks(2, start_with, [(), ()]) == [0, 10]
