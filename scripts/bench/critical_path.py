"""How long a step would take if its stages waited for nothing but each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from verl.monitor.stages import Span

NEEDS = {
    "gen": (),
    "old_log_prob": ("gen",),
    "ref": ("gen",),
    "values": ("gen",),
    "reward": ("gen",),
    "adv": ("old_log_prob", "ref", "values", "reward"),
    "update_critic": ("adv",),
    "update_actor": ("adv",),
    "reshard": ("update_actor",),
}
"""Stages of a PPO step (verl/ppo.py) and those whose rows or weights they read, on whatever rank."""

Timeline = Mapping[int, Sequence[Span]]
"""Each rank's spans of one step."""


def critical_path(timeline: Timeline) -> float:
    """Seconds of the longest chain of stages in which each follows one on its own rank, or one that it needs.

    What a span waited for the stages that it needs is no work of its own: it counts from the end of the last of them.
    """
    ends = {name: max((s.end for s in _spans(timeline, name)), default=0.0) for name in NEEDS}
    finish: dict[int, float] = dict.fromkeys(timeline, 0.0)  # of each rank's last stage, on the ideal clock
    done: dict[str, float] = {}  # the ideal end of each stage, over all ranks
    for span, rank in sorted(_known(timeline), key=lambda pair: _place(pair[0])):
        needed = NEEDS[span.name]
        work = span.end - max([span.start, *(ends[name] for name in needed)])
        begin = max([finish[rank], *(done.get(name, 0.0) for name in needed)])
        finish[rank] = begin + max(0.0, work)
        done[span.name] = max(done.get(span.name, 0.0), finish[rank])
    return max(finish.values(), default=0.0)


def _spans(timeline: Timeline, name: str) -> list[Span]:
    return [span for spans in timeline.values() for span in spans if span.name == name]


def _known(timeline: Timeline) -> list[tuple[Span, int]]:
    return [(span, rank) for rank, spans in timeline.items() for span in spans if span.name in NEEDS]


def _place(span: Span) -> tuple[int, float]:
    """In the order of the program: a stage after those that it needs, and a rank's stages in its own order.

    Ranks run the same program, so that its order of stages is each rank's order of time.
    """
    return list(NEEDS).index(span.name), span.start
