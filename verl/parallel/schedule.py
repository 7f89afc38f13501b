"""When each pipeline stage runs which micro-batch forward or backward: pure, so that all stages plan alike."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache


class Kind(StrEnum):
    forward = "forward"
    backward = "backward"


@dataclass(frozen=True)
class Action:
    kind: Kind
    micro_batch: int
    chunk: int
    """Which of the rank's parts of the model: chunk c of stage s is part c * num_stages + s of the whole."""

    def __str__(self) -> str:
        """For people, who count from one."""
        part = f" through part {self.chunk + 1} of its stage" if self.chunk else ""
        return f"{self.kind}{part} of micro-batch {self.micro_batch + 1}"


Timeline = tuple[tuple[Action | None, ...], ...]
"""[tick][stage] -> what the stage does then; None: it has nothing to do, or waits."""


def schedule(stage: int, num_stages: int, num_micro_batches: int, virtual_stages: int = 1) -> list[Action]:
    """One forward, one backward (Narayanan et al. 2021, arXiv:2104.04473, section 2.2), interleaved where a stage has
    several parts of the model.

    A stage begins with as many forwards as it takes until the first gradient is back, then takes turns, so that it
    never holds the activations of more micro-batches than that. For equal costs it is idle for (p - 1) / (v m + p - 1)
    of the time, where p is `num_stages`, v `virtual_stages` and m `num_micro_batches`. With v > 1, m must be a multiple
    of p: the parts take turns every p micro-batches.
    """
    forwards = forward_schedule(num_stages, num_micro_batches, virtual_stages)
    backwards = [Action(Kind.backward, a.micro_batch, virtual_stages - 1 - a.chunk) for a in forwards]
    later_stages = num_stages - 1 - stage
    warm_up = later_stages if virtual_stages == 1 else 2 * later_stages + (virtual_stages - 1) * num_stages
    warm_up = min(warm_up, len(forwards))
    turns = [action for turn in zip(forwards[warm_up:], backwards, strict=False) for action in turn]
    return forwards[:warm_up] + turns + backwards[len(forwards) - warm_up :]


def forward_schedule(num_stages: int, num_micro_batches: int, virtual_stages: int = 1) -> list[Action]:
    """Forwards alone, the same for every stage."""
    assert virtual_stages == 1 or num_micro_batches % num_stages == 0, (num_stages, num_micro_batches)
    return [
        Action(Kind.forward, micro_batch, chunk)
        for start in range(0, num_micro_batches, num_stages)
        for chunk in range(virtual_stages)
        for micro_batch in range(start, min(start + num_stages, num_micro_batches))
    ]


def after(action: Action, stage: int, num_stages: int, virtual_stages: int) -> tuple[int, Action] | None:
    """Who goes on with what `stage` makes in `action`, and how: (stage, action); None after a first part's backward.

    Forward through the parts, from the last one's forward to its own backward, and back through the parts.
    """
    part, last = action.chunk * num_stages + stage, num_stages * virtual_stages - 1
    if action.kind is Kind.forward and part == last:
        return stage, Action(Kind.backward, action.micro_batch, action.chunk)
    following = part + 1 if action.kind is Kind.forward else part - 1
    if following < 0:
        return None
    return following % num_stages, Action(action.kind, action.micro_batch, following // num_stages)


@lru_cache(maxsize=64)
def timeline(num_stages: int, num_micro_batches: int, virtual_stages: int, training: bool) -> Timeline:
    """All stages side by side, where each action takes one tick and what it makes is there at the next.

    It gives messages an order that is the same on both ends: those of a tick before those of the next.
    """
    ahead = [
        deque(
            schedule(stage, num_stages, num_micro_batches, virtual_stages)
            if training
            else forward_schedule(num_stages, num_micro_batches, virtual_stages)
        )
        for stage in range(num_stages)
    ]
    ready = {(0, Action(Kind.forward, micro_batch, 0)) for micro_batch in range(num_micro_batches)}
    ticks: list[tuple[Action | None, ...]] = []
    while any(ahead):
        tick = tuple(
            actions[0] if actions and (stage, actions[0]) in ready else None for stage, actions in enumerate(ahead)
        )
        assert any(tick), f"stages wait for each other: {[actions and actions[0] for actions in ahead]}"
        for stage, action in enumerate(tick):
            if action is not None:
                ahead[stage].popleft()
                following = after(action, stage, num_stages, virtual_stages)
                if following is not None:
                    ready.add(following)
        ticks.append(tick)
    return tuple(ticks)
