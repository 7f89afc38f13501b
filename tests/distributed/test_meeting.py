"""Ranks that speak through the store alone, before they have a process group."""

from __future__ import annotations

import os
import time

import pytest

from tests.support.ranks import run_ranks
from verl.errors import SharedError
from verl.flow import meeting
from verl.flow.job import start_job
from verl.flow.meeting import AbsentError, Meeting, refuse

pytestmark = pytest.mark.dist


def meet() -> tuple[list[str], str, int]:
    told: list[str] = []
    said: list[str] = []

    def admit(here: Meeting) -> list[str]:
        time.sleep(0.3 if here.rank == 1 else 0.0)
        told.extend(here.gather("facts", f"of rank {here.rank}"))
        said.append(here.announce("verdict", f"rank {here.rank}'s"))
        return [f"node{rank}" for rank in range(here.world)]

    job = start_job(stage_timeout=300, check_program=True, admit=admit)
    total = sum(job.everywhere(job.rank))
    job.close()
    return told, said[0], total


def test_rank_0_hears_all_and_all_hear_rank_0() -> None:
    assert run_ranks(3, meet) == [
        (["of rank 0", "of rank 1", "of rank 2"], "rank 0's", 3),
        ([], "rank 0's", 3),
        ([], "rank 0's", 3),
    ]


def refused() -> str:
    meeting.REFUSAL_SECONDS = meeting.PART_SECONDS = 100.0  # a busy machine may take longer than a node has
    if os.environ["RANK"] == "1":
        time.sleep(0.5)
        refuse(["a setting is wrong", "and another"], os.environ | {"VERL_NODE_NAME": "node2"})
        return "left"

    def admit(here: Meeting) -> list[str]:
        here.gather("facts", "")
        here.announce("verdict", "all is well")
        return []

    try:
        start_job(stage_timeout=300, check_program=False, admit=admit)
    except SharedError as error:
        return str(error)
    return "nothing was said"


def test_a_rank_that_leaves_before_tells_all_others_why() -> None:
    message = "on node2: a setting is wrong\non node2: and another"
    assert run_ranks(3, refused) == [message, "left", message]


def abandoned() -> str:
    if os.environ["RANK"] == "1":
        return "never came"

    def admit(here: Meeting) -> list[str]:
        Meeting(here.rank, here.world, here.store, patience=1.0).gather("facts", "")
        raise AssertionError("it was not missed")

    try:
        start_job(stage_timeout=300, check_program=False, admit=admit)
    except AbsentError as error:
        return str(error)
    return "nothing was said"


def test_a_rank_that_does_not_come_is_named() -> None:
    said, _ = run_ranks(2, abandoned)
    assert said.startswith("rank 0 has waited 1 s for facts from rank 1: see what its node says")


def test_nobody_is_told_where_there_is_nobody() -> None:
    refuse(["a setting is wrong"], {})
    refuse(["a setting is wrong"], {"WORLD_SIZE": "2"})
