from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
import torch

from tests.support.ranks import RankFailed, run_ranks
from verl.flow.batch import Column, Experience, Responses, Rows
from verl.flow.job import Job, start_job
from verl.flow.placement import Placement

pytestmark = pytest.mark.dist

SIZE = 24

PLACES = {
    "single": (1, {"rollout": ((0,), 1, 1), "actor": ((0,), 1, 1), "critic": ((0,), 1, 1)}),
    "colocated": (2, {"rollout": ((0, 1), 1, 1), "actor": ((0, 1), 1, 1), "critic": ((0, 1), 1, 1)}),
    "disjoint": (4, {"rollout": ((3,), 1, 1), "actor": ((1, 0), 1, 1), "critic": ((2,), 1, 1)}),
    "overlapping": (4, {"rollout": ((2, 3), 2, 1), "actor": ((0, 1, 2, 3), 2, 1), "critic": ((3, 1, 2), 1, 1)}),
    "pipeline": (6, {"rollout": ((1, 2), 1, 1), "actor": ((5, 4, 3, 2), 1, 2), "critic": ((0,), 1, 1)}),
}


def served(*placements: Placement) -> list[SimpleNamespace]:
    """Stand-ins for roles, of which a hand-over asks only where they are."""
    return [SimpleNamespace(placement=placement) for placement in placements]


def tokens(row: int) -> list[int]:
    """Row r holds r % 4 tokens: some rows are empty."""
    return [100 * row + i for i in range(row % 4)]


def places(name: str) -> dict[str, Placement]:
    return {
        role: Placement(role, ranks, tp, pp, leaders_only=role == "rollout")
        for role, (ranks, tp, pp) in PLACES[name][1].items()
    }


def respond(job: Job, place: Placement) -> Responses:
    def column(name: str, make: object) -> Column:
        rows = None
        if job.rank in place.outputs.ranks:
            rows = make(place.outputs.rows(job.rank, SIZE))  # type: ignore[operator]
        return Column.produced(name, SIZE, place, job.rank, rows)

    return Responses(
        prompt_ids=column("prompt_ids", lambda r: Rows.ragged([[i] for i in r], torch.int64)),
        response_ids=column("response_ids", lambda r: Rows.ragged([tokens(i) for i in r], torch.int64)),
        rollout_logprobs=column(
            "rollout_logprobs", lambda r: Rows.ragged([[-t / 7 for t in tokens(i)] for i in r], torch.float32)
        ),
        ended=column("ended", lambda r: Rows.scalars([i % 2 == 0 for i in r], torch.bool)),
        weight=column("weight", lambda r: Rows.scalars([1.0 for _ in r], torch.float32)),
        version=column("version", lambda r: Rows.scalars(list(r), torch.int64)),
    )


def step(job: Job, at: dict[str, Placement]) -> None:
    responses = job.hand_over(respond(job, at["rollout"]), to=served(at["actor"], at["critic"]))
    logprobs = scores = None
    for role in ("actor", "critic"):
        place = at[role]
        if job.rank in place.inputs.ranks:
            wanted = place.inputs.rows(job.rank, SIZE)
            rows = responses.response_ids.on(place)
            assert [r.tolist() for r in rows.split()] == [tokens(i) for i in wanted]
            assert responses.weight.on(place).scalar().tolist() == [1.0] * len(wanted)
        if job.rank in place.outputs.ranks:
            wanted = place.outputs.rows(job.rank, SIZE)
            assert responses.version.on(place).scalar().tolist() == list(wanted)
            assert responses.ended.on(place).scalar().tolist() == [i % 2 == 0 for i in wanted]
            ids = responses.response_ids.on(place)
            if role == "actor":
                logprobs = ids.like(ids.values.float())
            else:
                scores = Rows.scalars([float(i) for i in place.outputs.rows(job.rank, SIZE)], torch.float32)
    experience = Experience(
        responses,
        old_logprobs=Column.produced("old_logprobs", SIZE, at["actor"], job.rank, logprobs),
        scores=Column.produced("scores", SIZE, at["critic"], job.rank, scores),
    )
    experience = job.hand_over(experience, to=served(at["actor"], at["critic"]))
    for place in (at["actor"], at["critic"]):
        if job.rank in place.outputs.ranks:
            wanted = place.outputs.rows(job.rank, SIZE)
            assert experience.scores.on(place).scalar().tolist() == [float(i) for i in wanted]
            assert [r.tolist() for r in experience.old_logprobs.on(place).split()] == [
                [float(t) for t in tokens(i)] for i in wanted
            ]
        elif job.rank in place.inputs.ranks:
            # what a model's outputs are compared with does not go to stages that have none
            for column in (experience.scores, experience.old_logprobs, responses.version):
                with pytest.raises(RuntimeError, match="it lives on"):
                    column.on(place)


def program(name: str) -> list[list[bytes] | None]:
    job = start_job(stage_timeout=300, check_program=True)
    reports = []
    for number in range(3):
        step(job, places(name))
        assert job.hand_over.agree({"step": number, "rank": job.rank}, source=0) == {"step": number, "rank": 0}
        reports.append(job.hand_over.settle(f"{number} of rank {job.rank}".encode()))
    job.close()
    return reports


@pytest.mark.parametrize("name", PLACES)
def test_every_role_reads_its_own_rows(name: str) -> None:
    world = PLACES[name][0]
    main, *others = run_ranks(world, program, name)
    assert main == [[f"{number} of rank {rank}".encode() for rank in range(world)] for number in range(3)]
    assert all(reports == [None, None, None] for reports in others)


def unread(elements: int) -> float:
    job = start_job(stage_timeout=300, check_program=False)
    src, dst = Placement("actor", (0,)), Placement("critic", (1,))
    rows = Rows.ragged([[1] * elements] * 4, torch.int64) if job.rank == 0 else None
    column = Column.produced("scores", 4, src, job.rank, rows)
    start = time.monotonic()
    job.hand_over(Experience(*[column] * 3), to=served(dst))  # type: ignore[arg-type]
    job.hand_over.settle(b"")
    took = time.monotonic() - start
    job.close()
    return took


@pytest.mark.parametrize("elements", [1, 300_000])
def test_rows_that_nobody_reads_hold_nobody(elements: int) -> None:
    assert max(run_ranks(2, unread, elements)) < 100


def one_column_under_two_names() -> list[list[float]]:
    job = start_job(stage_timeout=300, check_program=False)
    src, dst = Placement("actor", (0,)), Placement("critic", (1,))
    rows = Rows.scalars([3.0, 4.0], torch.float32) if job.rank == 0 else None
    column = Column.produced("scores", 2, src, job.rank, rows)
    record = job.hand_over(Experience(*[column] * 3), to=served(dst))  # type: ignore[arg-type]
    read = [c.on(dst).values.tolist() for c in (record.scores, record.old_logprobs)] if job.rank == 1 else []
    job.hand_over.settle(b"")
    job.close()
    return read


def test_one_column_arrives_under_each_of_its_names() -> None:
    assert run_ranks(2, one_column_under_two_names) == [[], [[3.0, 4.0], [3.0, 4.0]]]


def absent() -> list[str]:
    job = start_job(stage_timeout=300, check_program=False)
    place = Placement("actor", (0,))
    column = Column.produced(
        "scores", 1, place, job.rank, Rows.scalars([1.0], torch.float32) if job.rank == 0 else None
    )
    messages = []
    for ask in (bool, len, lambda c: c.on(Placement("critic", (1,)))):
        try:
            ask(column)
        except RuntimeError as error:
            messages.append(str(error))
    job.close()
    return messages


def test_asking_a_column_that_lives_elsewhere_says_where_it_lives() -> None:
    for rank, messages in enumerate(run_ranks(2, absent)):
        assert len(messages) == 3
        assert all(f"rank {rank}" in m and "actor ranks (0,)" in m for m in messages)


def different_programs() -> None:
    job = start_job(stage_timeout=300, check_program=True)
    place = Placement("actor", (0, 1))
    column = Column.produced("scores", 2, place, job.rank, Rows.scalars([1.0], torch.float32))
    if job.rank == 1:
        job.hand_over(Experience(*[column] * 3), to=served(Placement("critic", (0, 1))))  # type: ignore[arg-type]
    job.hand_over.settle(b"")


def test_ranks_that_run_different_programs_are_told_where_they_part() -> None:
    with pytest.raises(RankFailed, match=r"rank 0: \(nothing\)\n\s+rank 1: \['old_logprobs'"):
        run_ranks(2, different_programs)
