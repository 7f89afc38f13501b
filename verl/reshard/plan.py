"""Who copies which part of which weight into which memory: pure, so that nothing is negotiated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from verl.reshard.layout import Box, Domain, Shards, intersect, volume


@dataclass(frozen=True)
class Transfer:
    name: str
    box: Box
    src: int
    dst: int
    """The rank that writes it: `src` itself where it is a member of the domain."""
    domain: str
    size: int
    """Bytes."""


def plan(shards: Shards, domains: Sequence[Domain], itemsize: int) -> tuple[Transfer, ...]:
    """Every domain gets every byte exactly once: from a member that holds it, else from a rank of the receiver's node,
    else from another; of equals, from the one with the fewest bytes so far.
    """
    transfers: list[Transfer] = []
    load: dict[int, int] = {}
    holders = _holders(shards)
    for domain in domains:
        for name, wanted in domain.boxes.items():
            covered = 0
            for box, ranks in holders[name].items():
                part = intersect(wanted, box)
                if part is None:
                    continue
                src = _source(ranks, domain, shards.node_of, load)
                size = volume(part) * itemsize
                load[src] = load.get(src, 0) + size
                covered += volume(part)
                transfers.append(
                    Transfer(name, part, src, src if src in domain.members else domain.receiver, domain.name, size)
                )
            assert covered == volume(wanted), f"{domain.name}: {name} is covered {covered} of {volume(wanted)}"
    return tuple(transfers)


def _holders(shards: Shards) -> dict[str, dict[Box, list[int]]]:
    holders: dict[str, dict[Box, list[int]]] = {}
    for rank in sorted(shards.boxes):
        for name, box in shards.boxes[rank].items():
            if volume(box):
                holders.setdefault(name, {}).setdefault(box, []).append(rank)
    return holders


def _source(ranks: list[int], domain: Domain, node_of: Mapping[int, str], load: Mapping[int, int]) -> int:
    def distance(rank: int) -> tuple[int, int, int]:
        near = 0 if rank in domain.members else 1 if node_of[rank] == node_of[domain.receiver] else 2
        return near, load.get(rank, 0), rank

    return min(ranks, key=distance)


def buckets(transfers: Sequence[Transfer], limit: int) -> list[list[list[Transfer]]]:
    """Messages by round: `[round][message]`. A round has one message a (src, dst, domain), of at most `limit` bytes or
    one transfer.
    """
    pairs: dict[tuple[int, int, str], list[list[Transfer]]] = {}
    for t in transfers:
        if t.src == t.dst:
            continue
        cut = pairs.setdefault((t.src, t.dst, t.domain), [])
        if cut and sum(x.size for x in cut[-1]) + t.size <= limit:
            cut[-1].append(t)
        else:
            cut.append([t])
    rounds = max((len(cut) for cut in pairs.values()), default=0)
    return [[cut[number] for cut in pairs.values() if number < len(cut)] for number in range(rounds)]
