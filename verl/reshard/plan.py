"""Who copies which part of which weight into which memory: pure, so that nothing is negotiated."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from verl.reshard.layout import Box, Domain, Shards, intersect, volume


@dataclass(frozen=True, slots=True)
class Transfer:
    name: str
    box: Box
    src: int
    dst: int
    """The rank that writes it: `src` itself where it is a member of the domain."""
    domain: str
    size: int
    """Bytes."""
    origin: str | None = None
    """The domain that `src` has received it into and passes it on from; None: it is in `src`'s training shards."""
    round: int = 0
    """Messages of one bucket between domains of one lag follow each other in rounds: 0 waits for no other message."""


def plan(shards: Shards, domains: Sequence[Domain], itemsize: int) -> tuple[Transfer, ...]:
    """Every domain gets every byte exactly once, and every node takes in and gives out each byte at most once.

    A domain takes from a member that holds the byte, else from within its node, else from another node. A byte that
    several other nodes lack is relayed from one to the next: first round the nodes that train, each of which starts
    with something, then along those that do not, always in the same order (`lags`). Of equal sources it is the one with
    the fewest bytes so far. A transfer comes after the one that it passes on.
    """
    planner = _Planner(shards, domains, itemsize)
    for name in dict.fromkeys(name for domain in domains for name in domain.boxes):
        planner.deliver(name)
    return tuple(planner.transfers)


def lags(shards: Shards, domains: Sequence[Domain]) -> dict[str, int]:
    """How many buckets each domain is behind the sources. Domains on nodes that train are not, and give to each other
    within a bucket; the other nodes make a chain, in which each passes on the bucket that it took a step before.
    """
    trained = {shards.node_of[rank] for rank in shards.boxes}
    ring, chain = _ring_and_chain(trained, _nodes(shards, domains))
    first = 1 if ring else 0
    lag_of = dict.fromkeys(ring, 0) | {node: first + i for i, node in enumerate(chain)}
    return {domain.name: lag_of[shards.node_of[domain.readers[0]]] for domain in domains}


def _nodes(shards: Shards, domains: Sequence[Domain]) -> list[str]:
    """The domains' nodes, in their order."""
    return list(dict.fromkeys(shards.node_of[domain.readers[0]] for domain in domains))


def _ring_and_chain(trained: set[str], nodes: Sequence[str]) -> tuple[list[str], list[str]]:
    return [node for node in nodes if node in trained], [node for node in nodes if node not in trained]


@dataclass(frozen=True, slots=True)
class _Piece:
    """Part of a parameter that the same ranks hold and the same domains want."""

    box: Box
    size: int
    holders: tuple[int, ...]
    wanted_by: tuple[int, ...]
    """Indices of domains."""


@dataclass(frozen=True, slots=True)
class _Provider:
    rank: int
    origin: int | None
    """Index of the domain that it has it in; None: its shards."""
    round: int
    """Of the message that brought it there; -1 for shards."""


class _Planner:
    def __init__(self, shards: Shards, domains: Sequence[Domain], itemsize: int) -> None:
        self.transfers: list[Transfer] = []
        self._domains, self._itemsize, self._node_of = domains, itemsize, shards.node_of
        self._holders = _holders(shards)
        self._home = [shards.node_of[domain.readers[0]] for domain in domains]
        for domain, node in zip(domains, self._home, strict=True):
            assert all(shards.node_of[rank] == node for rank in domain.members), f"{domain.name} is on several nodes"
        lag_of = lags(shards, domains)
        self._lag = [lag_of[domain.name] for domain in domains]
        nodes = _nodes(shards, domains)
        trained = {shards.node_of[rank] for rank in shards.boxes}
        self._ring, self._chain = _ring_and_chain(trained, nodes)
        self._patterns: dict[object, list[_Piece]] = {}
        self._copied: dict[int, int] = defaultdict(int)
        self._sent: dict[int, int] = defaultdict(int)
        self._received: dict[int, int] = defaultdict(int)
        self._left: dict[str, int] = defaultdict(int)
        """Bytes that have left each node."""

    def deliver(self, name: str) -> None:
        holders = self._holders.get(name, {})
        wanted = tuple((i, domain.boxes[name]) for i, domain in enumerate(self._domains) if name in domain.boxes)
        # layers of a model are alike: what is held and wanted of one is worked out once
        pattern = (tuple((box, tuple(ranks)) for box, ranks in holders.items()), wanted)
        if pattern not in self._patterns:
            self._patterns[pattern] = _pieces(name, holders, wanted, self._itemsize)
        for piece in self._patterns[pattern]:
            self._deliver_piece(name, piece)

    def _deliver_piece(self, name: str, piece: _Piece) -> None:
        missing: dict[str, list[int]] = {}
        for index in piece.wanted_by:
            owners = [rank for rank in piece.holders if rank in self._domains[index].members]
            if owners:
                rank = min(owners, key=lambda r: (self._copied[r], r))
                self._copied[rank] += piece.size
                self.transfers.append(Transfer(name, piece.box, rank, rank, self._domains[index].name, piece.size))
            else:
                missing.setdefault(self._home[index], []).append(index)
        far: dict[str, list[int]] = {}
        for node, indices in missing.items():
            near = [_Provider(rank, None, -1) for rank in piece.holders if self._node_of[rank] == node]
            if near:
                self._within_node(name, piece, near, indices)
            else:
                far[node] = indices
        if far:
            self._across_nodes(name, piece, far)

    def _within_node(self, name: str, piece: _Piece, providers: list[_Provider], indices: Sequence[int]) -> None:
        """From who has it first; who that is differs from piece to piece, so that all get their share of the work."""
        for index in indices:
            self._send(name, piece, min(providers, key=lambda p: (self._sent[p.rank], p.rank)), index)

    def _across_nodes(self, name: str, piece: _Piece, far: Mapping[str, list[int]]) -> None:
        """From node to node; on each of them the first domain takes it in, and the others have it from there."""
        start = min(piece.holders, key=lambda r: (self._left[self._node_of[r]], self._sent[r], r))
        source = _Provider(start, None, -1)
        for node in self._route(self._node_of[start]):
            if node in far:
                # who passes it on; all of them receive the same
                first = min(far[node], key=lambda i: min(self._sent[r] for r in self._domains[i].readers))
                self._left[self._node_of[source.rank]] += piece.size
                source = self._send(name, piece, source, first)
                self._within_node(name, piece, [source], [i for i in far[node] if i != first])

    def _route(self, start: str) -> list[str]:
        """The ring from the node behind `start`, so that all links of it are used alike; then the chain."""
        at = self._ring.index(start) + 1 if start in self._ring else 0
        return [*self._ring[at:], *self._ring[:at], *self._chain]

    def _send(self, name: str, piece: _Piece, source: _Provider, index: int) -> _Provider:
        domain = self._domains[index]
        dst = min(domain.readers, key=lambda r: (self._received[r], r))
        self._sent[source.rank] += piece.size
        self._received[dst] += piece.size
        same_lag = source.origin is not None and self._lag[source.origin] == self._lag[index]
        number = source.round + 1 if same_lag else 0
        origin = None if source.origin is None else self._domains[source.origin].name
        self.transfers.append(Transfer(name, piece.box, source.rank, dst, domain.name, piece.size, origin, number))
        return _Provider(dst, index, number)


def _holders(shards: Shards) -> dict[str, dict[Box, list[int]]]:
    holders: dict[str, dict[Box, list[int]]] = {}
    for rank in sorted(shards.boxes):
        for name, box in shards.boxes[rank].items():
            if volume(box):
                holders.setdefault(name, {}).setdefault(box, []).append(rank)
    return holders


def _pieces(
    name: str, holders: Mapping[Box, Sequence[int]], wanted: Sequence[tuple[int, Box]], itemsize: int
) -> list[_Piece]:
    pieces = []
    for cell in _cells(list(dict.fromkeys(box for _, box in wanted))):
        by = tuple(index for index, box in wanted if intersect(cell, box) == cell)
        covered = 0
        for box, ranks in holders.items():
            part = intersect(cell, box)
            if part is not None:
                covered += volume(part)
                pieces.append(_Piece(part, volume(part) * itemsize, tuple(ranks), by))
        assert covered == volume(cell), f"{name} is covered {covered} of {volume(cell)} in {cell}"
    return pieces


def _cells(boxes: list[Box]) -> list[Box]:
    """The boxes themselves where no two of them overlap, as those of one engine's layout; else their common grid."""
    boxes = [box for box in boxes if volume(box)]
    if all(intersect(a, b) is None for i, a in enumerate(boxes) for b in boxes[:i]):
        return boxes
    cells: list[Box] = [()]
    for dim in range(len(boxes[0])):
        edges = sorted({edge for box in boxes for edge in box[dim]})
        cells = [(*cell, side) for cell in cells for side in pairwise(edges)]
    return [cell for cell in cells if any(intersect(cell, box) == cell for box in boxes)]


@dataclass(frozen=True)
class PlannedBytes:
    """What one load moves."""

    wire: int
    """From rank to rank."""
    local: int
    """Written by the rank that trains them."""
    sent: Mapping[int, int]
    """By rank."""
    received: Mapping[int, int]
    """By rank, over the wire."""
    left: Mapping[str, int]
    """Over the wire out of each node."""
    entered: Mapping[str, int]
    """Over the wire into each node."""


def planned_bytes(transfers: Sequence[Transfer], node_of: Mapping[int, str]) -> PlannedBytes:
    """The bytes of a plan, for the ranks and nodes of `node_of`."""
    sent, received = dict.fromkeys(node_of, 0), dict.fromkeys(node_of, 0)
    left, entered = dict.fromkeys(node_of.values(), 0), dict.fromkeys(node_of.values(), 0)
    local = 0
    for t in transfers:
        if t.src == t.dst:
            local += t.size
            continue
        sent[t.src] += t.size
        received[t.dst] += t.size
        if node_of[t.src] != node_of[t.dst]:
            left[node_of[t.src]] += t.size
            entered[node_of[t.dst]] += t.size
    return PlannedBytes(sum(sent.values()), local, sent, received, left, entered)
