"""What each rank holds to generate on the actor's own ranks: HybridFlow's 3D-HybridEngine (`verl.flow.regroup`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from verl.flow.placement import Coordinate
from verl.flow.regroup import GenerationPlace, generation_place
from verl.reshard.boxes import Split, boxes_at, coordinate, own_domains
from verl.reshard.layout import Box, Domain, Shapes


@dataclass(frozen=True)
class Hybrid:
    """Training split and generation sizes on the same ranks."""

    split: Split
    pg: int
    """Pipeline stages in generation."""
    tg: int
    """Tensor-parallel ranks in generation."""

    def __post_init__(self) -> None:
        if self.split.tp % self.tg or self.split.pp % self.pg:
            raise ValueError(
                f"generation on {self.pg} stages x {self.tg} tensor-parallel ranks does not fit into training on "
                f"{self.split.pp} x {self.split.tp}: each must divide the training's"
            )

    def place(self, at: Coordinate) -> GenerationPlace:
        """`verl.flow.regroup` has the rule."""
        return generation_place(at, self.split.pp // self.pg, self.split.tp // self.tg)

    def boxes(self, shapes: Shapes, at: Coordinate) -> dict[str, Box]:
        """What the rank holds to generate."""
        place, stages = self.place(at), self.split.pp // self.pg
        split = Split(
            pp=self.pg,
            tp=self.tg,
            tp_dims=self.split.tp_dims,
            stages={name: tuple(s // stages for s in held) for name, held in self.split.stages.items()},
            fsdp=False,
        )
        return boxes_at(shapes, split, Coordinate(place.pp, 0, place.tp))

    def domains(self, shapes: Shapes, ranks: Sequence[int]) -> list[Domain]:
        """For the planner: every rank's own parameters, of the training's ranks in their listed order."""
        return own_domains({r: self.boxes(shapes, coordinate(self.split, i)) for i, r in enumerate(ranks)})

    def micro_groups(self, ranks: Sequence[int]) -> list[tuple[int, ...]]:
        """Ranks whose training shards together are each one's generation shard; they are in different replicas."""
        return self._groups(ranks, lambda place: (place.training_replica, place.pp, place.tp))

    def tensor_parallel_groups(self, ranks: Sequence[int]) -> list[tuple[int, ...]]:
        """Ranks that generate together on one stage."""
        return self._groups(ranks, lambda place: (place.training_replica, place.replica, place.pp))

    def _groups(self, ranks: Sequence[int], key: Callable[[GenerationPlace], object]) -> list[tuple[int, ...]]:
        groups: dict[object, list[int]] = {}
        for i, rank in enumerate(ranks):
            groups.setdefault(key(self.place(coordinate(self.split, i))), []).append(rank)
        return [tuple(group) for group in groups.values()]
