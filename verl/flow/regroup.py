"""Generation on the actor's own ranks, in smaller replicas than training has: where each rank stands. Pure.

Sheng et al. 2025, HybridFlow (arXiv:2409.19256), section 5.3. Training runs on p x t x d ranks, generation on the same
ranks as pg x tg with p * t / (pg * tg) times as many replicas. Generation peers are t / tg tensor-parallel ranks and
p / pg stages apart; those between them are the micro data-parallel group, whose training shards together are each one's
generation shard. So every rank's own training shard is part of what it generates with.
"""

from __future__ import annotations

from dataclasses import dataclass

from verl.flow.placement import Coordinate, Placement


@dataclass(frozen=True)
class GenerationPlace:
    """Where a training rank stands in generation."""

    pp: int
    tp: int
    replica: int
    """Of those that its training replica becomes: its number in its micro data-parallel group."""
    training_replica: int


def generation_place(at: Coordinate, stages: int, parts: int) -> GenerationPlace:
    """`stages` = p / pg and `parts` = t / tg: the training ranks on each axis whose shards one generation shard has."""
    return GenerationPlace(at.pp // stages, at.tp // parts, at.pp % stages * parts + at.tp % parts, at.dp)


def generation_order(actor: Placement, tp: int) -> tuple[int, ...]:
    """The actor's ranks so that neighbours are the `tp` peers of a replica that generates on one stage.

    Their listed order where `tp` does not divide the actor's.
    """
    if actor.tp % tp:
        return actor.ranks
    at = {rank: actor.coordinate(rank) for rank in actor.ranks}
    places = {rank: generation_place(at[rank], actor.pp, actor.tp // tp) for rank in actor.ranks}
    return tuple(sorted(places, key=lambda r: (places[r].training_replica, at[r].cp, places[r].replica, places[r].tp)))
