"""Which rank sends which rows to whom: a pure function of the placements, so every rank derives the same plan."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from verl.flow.placement import Home


@dataclass(frozen=True)
class Move:
    src: int
    dst: int
    rows: range


@lru_cache(maxsize=256)
def plan(source: Home, targets: tuple[Home, ...], size: int) -> tuple[Move, ...]:
    """The moves that give every rank of `targets` its rows, each row once, in ascending order for each reader.

    A rank keeps what it holds; other rows come from that rank of the group holding them that has sent the fewest.
    """
    moves = []
    sent = dict.fromkeys(source.ranks, 0)
    for reader in sorted({rank for home in targets for rank in home.ranks}):
        for wanted in _union([home.rows(reader, size) for home in targets if reader in home.ranks]):
            for index, group in enumerate(source.groups):
                held = source.share(index, size)
                both = range(max(wanted.start, held.start), min(wanted.stop, held.stop))
                if not both:
                    continue
                src = reader if reader in group else min(group, key=sent.__getitem__)
                if src != reader:
                    sent[src] += len(both)
                moves.append(Move(src, reader, both))
    return tuple(moves)


def _union(ranges: list[range]) -> list[range]:
    """Overlapping and adjacent ranges as one, ascending."""
    union: list[range] = []
    for one in sorted(ranges, key=lambda r: r.start):
        if union and one.start <= union[-1].stop:
            union[-1] = range(union[-1].start, max(union[-1].stop, one.stop))
        else:
            union.append(one)
    return union
