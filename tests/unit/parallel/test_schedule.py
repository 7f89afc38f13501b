"""The pipeline's schedule, run through a simulator of its own: each rank does its list in order, with any costs."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl.parallel.schedule import Action, Kind, after, forward_schedule, schedule, timeline

Cost = dict[tuple[Kind, int], int]
"""(kind, part of the model) -> ticks"""


@dataclass(frozen=True)
class Pipe:
    stages: int
    batches: int
    virtual: int = 1

    @property
    def parts(self) -> int:
        return self.stages * self.virtual

    def part(self, stage: int, action: Action) -> int:
        return action.chunk * self.stages + stage

    def of(self, stage: int) -> list[Action]:
        return schedule(stage, self.stages, self.batches, self.virtual)


@st.composite
def pipes(draw: st.DrawFn) -> Pipe:
    stages, virtual = draw(st.integers(1, 6)), draw(st.integers(1, 3))
    batches = draw(st.integers(1, 12)) if virtual == 1 else stages * draw(st.integers(1, 3))
    return Pipe(stages, batches, virtual)


def simulate(pipe: Pipe, cost: Cost) -> tuple[int, list[int]]:
    """(when the last action ends, how long each stage worked). Raises where stages wait for each other."""
    ends: dict[tuple[Kind, int, int], int] = {}
    ahead = {stage: pipe.of(stage) for stage in range(pipe.stages)}
    free, worked = [0] * pipe.stages, [0] * pipe.stages
    while any(ahead.values()):
        moved = False
        for stage, actions in ahead.items():
            while actions:
                action, part = actions[0], pipe.part(stage, actions[0])
                needs = {
                    Kind.forward: [(Kind.forward, part - 1)] if part else [],
                    Kind.backward: [(Kind.forward, part)]
                    + ([(Kind.backward, part + 1)] if part + 1 < pipe.parts else []),
                }[action.kind]
                keys = [(kind, action.micro_batch, at) for kind, at in needs]
                if any(key not in ends for key in keys):
                    break
                length = cost[action.kind, part]
                free[stage] = max([free[stage], *(ends[key] for key in keys)]) + length
                worked[stage] += length
                ends[action.kind, action.micro_batch, part] = free[stage]
                actions.pop(0)
                moved = True
        assert moved, f"the stages wait for each other: {ahead}"
    return max(free), worked


def even(pipe: Pipe, forward: int = 1, backward: int = 1) -> Cost:
    return {
        (kind, part): length
        for part in range(pipe.parts)
        for kind, length in zip(Kind, (forward, backward), strict=True)
    }


@given(pipes())
def test_every_stage_does_every_micro_batch_once_forward_and_then_once_backward(pipe: Pipe) -> None:
    everything = {(m, c) for m in range(pipe.batches) for c in range(pipe.virtual)}
    for stage in range(pipe.stages):
        actions = pipe.of(stage)
        for kind in Kind:
            assert Counter((a.micro_batch, a.chunk) for a in actions if a.kind is kind) == Counter(everything)
        place = {action: number for number, action in enumerate(actions)}
        for m, c in everything:
            assert place[Action(Kind.forward, m, c)] < place[Action(Kind.backward, m, c)]


@given(pipes(), st.data())
def test_no_costs_make_stages_wait_for_each_other(pipe: Pipe, data: st.DataObject) -> None:
    cost = {(kind, part): data.draw(st.integers(0, 5)) for part in range(pipe.parts) for kind in Kind}
    simulate(pipe, cost)


@given(pipes())
def test_few_micro_batches_are_in_flight(pipe: Pipe) -> None:
    """As many as there are stages from here to the end; interleaved, twice that and a round for each further part."""
    for stage in range(pipe.stages):
        later = pipe.stages - stage - 1
        bound = later + 1 if pipe.virtual == 1 else 2 * later + (pipe.virtual - 1) * pipe.stages + 1
        flying = most = 0
        for action in pipe.of(stage):
            flying += 1 if action.kind is Kind.forward else -1
            most = max(most, flying)
        assert most == min(bound, pipe.batches * pipe.virtual)


@given(pipes(), st.integers(1, 4), st.integers(1, 4))
def test_the_bubble_for_equal_costs(pipe: Pipe, forward: int, backward: int) -> None:
    """(p - 1) / (v m + p - 1), Narayanan et al. 2021: they give it over the ideal time, v m of those units."""
    end, worked = simulate(pipe, even(pipe, forward, backward))
    for busy in worked:
        assert Fraction(end - busy, end) == Fraction(pipe.stages - 1, pipe.virtual * pipe.batches + pipe.stages - 1)


@given(pipes(), st.booleans())
def test_the_timeline_is_the_schedules_side_by_side_with_everything_made_in_time(pipe: Pipe, training: bool) -> None:
    ticks = timeline(pipe.stages, pipe.batches, pipe.virtual, training)
    made: set[tuple[int, Action]] = {(0, Action(Kind.forward, m, 0)) for m in range(pipe.batches)}
    for tick in ticks:
        doing = [(stage, action) for stage, action in enumerate(tick) if action is not None]
        assert doing and set(doing) <= made
        for stage, action in doing:
            following = after(action, stage, pipe.stages, pipe.virtual)
            if following is not None:
                made.add(following)
    for stage in range(pipe.stages):
        done = [tick[stage] for tick in ticks if tick[stage] is not None]
        assert done == (pipe.of(stage) if training else forward_schedule(pipe.stages, pipe.batches, pipe.virtual))


@given(pipes())
def test_what_is_made_goes_through_all_parts_and_back(pipe: Pipe) -> None:
    stage, action, parts = 0, Action(Kind.forward, 7, 0), []
    while True:
        parts.append((action.kind, pipe.part(stage, action)))
        following = after(action, stage, pipe.stages, pipe.virtual)
        if following is None:
            break
        stage, action = following
        assert action.micro_batch == 7
    ahead = list(range(pipe.parts))
    assert parts == [(Kind.forward, p) for p in ahead] + [(Kind.backward, p) for p in reversed(ahead)]


def test_the_schedule_of_the_paper() -> None:
    """Figure 4 of Narayanan et al. 2021: four stages, eight micro-batches."""

    def short(stage: int) -> str:
        return " ".join(f"{'F' if a.kind is Kind.forward else 'B'}{a.micro_batch + 1}" for a in schedule(stage, 4, 8))

    assert short(0) == "F1 F2 F3 F4 B1 F5 B2 F6 B3 F7 B4 F8 B5 B6 B7 B8"
    assert short(3) == "F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 B7 F8 B8"


def test_interleaved_stages_need_whole_rounds() -> None:
    with pytest.raises(AssertionError):
        schedule(0, 4, 6, 2)
