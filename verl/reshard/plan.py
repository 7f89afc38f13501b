"""Who copies which part of which weight into which memory: pure, so that nothing is negotiated."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from verl.reshard.layout import Box, Domain, Shards, intersect, volume


class Transfer(NamedTuple):
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

    The last two pairs of layouts are remembered with their plans: whoever asks again for the same gets the same tuple.
    """
    return _plan(_Layouts.of(shards, domains, itemsize))


@dataclass(frozen=True)
class _Layouts:
    """What a plan is made from; equal where the contents are."""

    contents: tuple[object, ...]
    shards: Shards = field(compare=False)
    domains: tuple[Domain, ...] = field(compare=False)
    itemsize: int

    @classmethod
    def of(cls, shards: Shards, domains: Sequence[Domain], itemsize: int) -> _Layouts:
        trained = tuple((rank, tuple(shards.boxes[rank].items())) for rank in sorted(shards.boxes))
        nodes = tuple(sorted(shards.node_of.items()))
        wanted = tuple((d.name, d.members, d.readers, tuple(d.boxes.items())) for d in domains)
        return cls((trained, nodes, wanted), shards, tuple(domains), itemsize)


@lru_cache(maxsize=2)
def _plan(layouts: _Layouts) -> tuple[Transfer, ...]:
    planner = _Planner(layouts.shards, layouts.domains, layouts.itemsize)
    with _without_collection():
        for name in dict.fromkeys(name for domain in layouts.domains for name in domain.boxes):
            planner.deliver(name)
    return tuple(planner.transfers)


@contextmanager
def _without_collection() -> Iterator[None]:
    """Python's collector would go through all objects of the process again and again while transfers are added, which
    takes four times as long as the planning; there are no cycles among them.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


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


class _Piece(NamedTuple):
    """Part of a parameter that the same ranks hold and the same domains want. Domains are given by their index."""

    box: Box
    size: int
    holders: tuple[int, ...]
    own: tuple[tuple[int, tuple[int, ...]], ...]
    """Domains with members that hold it, and those members."""
    near: tuple[tuple[tuple[_Provider, ...], tuple[int, ...]], ...]
    """The holders on a node, and the other domains there."""
    far: Mapping[str, tuple[int, ...]]
    """Domains on nodes that have no holder, by node."""


class _Provider(NamedTuple):
    rank: int
    origin: int | None
    """Index of the domain that it has it in; None: its shards."""
    round: int
    """Of the message that brought it there; -1 for shards."""


class _Planner:
    """Large models on many ranks have hundreds of thousands of transfers: what is the same for all layers of a model is
    worked out once, and what is left to do for each transfer is kept short.
    """

    def __init__(self, shards: Shards, domains: Sequence[Domain], itemsize: int) -> None:
        self.transfers: list[Transfer] = []
        self._domains, self._itemsize, self._node_of = domains, itemsize, shards.node_of
        self._holders = _holders(shards)
        self._home = [shards.node_of[domain.readers[0]] for domain in domains]
        for domain, node in zip(domains, self._home, strict=True):
            assert all(shards.node_of[rank] == node for rank in domain.members), f"{domain.name} is on several nodes"
        lag_of = lags(shards, domains)
        self._lag = [lag_of[domain.name] for domain in domains]
        trained = {shards.node_of[rank] for rank in shards.boxes}
        self._ring, self._chain = _ring_and_chain(trained, _nodes(shards, domains))
        self._patterns: dict[object, list[_Piece]] = {}
        self._copied = dict.fromkeys(shards.node_of, 0)
        self._sent = dict.fromkeys(shards.node_of, 0)
        self._received = dict.fromkeys(shards.node_of, 0)
        self._left = dict.fromkeys(shards.node_of.values(), 0)
        """Bytes that have left each node."""

    def deliver(self, name: str) -> None:
        holders = self._holders.get(name, {})
        wanted = tuple((i, domain.boxes[name]) for i, domain in enumerate(self._domains) if name in domain.boxes)
        # layers of a model are alike: what is held and wanted of one is worked out once
        pattern = (tuple((box, tuple(ranks)) for box, ranks in holders.items()), wanted)
        if pattern not in self._patterns:
            self._patterns[pattern] = [self._piece(*part) for part in _parts(name, holders, wanted)]
        for piece in self._patterns[pattern]:
            self._deliver_piece(name, piece)

    def _piece(self, box: Box, holders: tuple[int, ...], wanted_by: Sequence[int]) -> _Piece:
        own: list[tuple[int, tuple[int, ...]]] = []
        missing: dict[str, list[int]] = {}
        for index in wanted_by:
            owners = tuple(rank for rank in holders if rank in self._domains[index].members)
            if owners:
                own.append((index, owners))
            else:
                missing.setdefault(self._home[index], []).append(index)
        near, far = [], {}
        for node, indices in missing.items():
            providers = tuple(_Provider(rank, None, -1) for rank in holders if self._node_of[rank] == node)
            if providers:
                near.append((providers, tuple(indices)))
            else:
                far[node] = tuple(indices)
        return _Piece(box, volume(box) * self._itemsize, holders, tuple(own), tuple(near), far)

    def _deliver_piece(self, name: str, piece: _Piece) -> None:
        for index, owners in piece.own:
            rank = owners[0] if len(owners) == 1 else min(owners, key=lambda r: (self._copied[r], r))
            self._copied[rank] += piece.size
            self.transfers.append(Transfer(name, piece.box, rank, rank, self._domains[index].name, piece.size))
        for providers, indices in piece.near:
            self._within_node(name, piece, providers, indices)
        if piece.far:
            self._across_nodes(name, piece)

    def _within_node(self, name: str, piece: _Piece, providers: Sequence[_Provider], indices: Sequence[int]) -> None:
        """From who has it first; who that is differs from piece to piece, so that all get their share of the work."""
        if len(providers) == 1:
            for index in indices:
                self._send(name, piece, providers[0], index)
        else:
            for index in indices:
                self._send(name, piece, min(providers, key=lambda p: (self._sent[p.rank], p.rank)), index)

    def _across_nodes(self, name: str, piece: _Piece) -> None:
        """From node to node; on each of them the first domain takes it in, and the others have it from there."""
        start = piece.holders[0]
        if len(piece.holders) > 1:
            start = min(piece.holders, key=lambda r: (self._left[self._node_of[r]], self._sent[r], r))
        source = _Provider(start, None, -1)
        for node in self._route(self._node_of[start]):
            indices = piece.far.get(node)
            if indices:
                first = min(indices, key=self._least_sent)  # who passes it on; all of them receive the same
                self._left[self._node_of[source.rank]] += piece.size
                source = self._send(name, piece, source, first)
                self._within_node(name, piece, (source,), [i for i in indices if i != first])

    def _route(self, start: str) -> list[str]:
        """The ring from the node behind `start`, so that all links of it are used alike; then the chain."""
        at = self._ring.index(start) + 1 if start in self._ring else 0
        return [*self._ring[at:], *self._ring[:at], *self._chain]

    def _least_sent(self, index: int) -> int:
        """Of a domain's readers."""
        readers = self._domains[index].readers
        return self._sent[readers[0]] if len(readers) == 1 else min(self._sent[rank] for rank in readers)

    def _send(self, name: str, piece: _Piece, source: _Provider, index: int) -> _Provider:
        (src, origin, number), size = source, piece.size
        domain = self._domains[index]
        dst = domain.readers[0]
        if len(domain.readers) > 1:
            dst = min(domain.readers, key=lambda r: (self._received[r], r))
        self._sent[src] += size
        self._received[dst] += size
        same_lag = origin is not None and self._lag[origin] == self._lag[index]
        number = number + 1 if same_lag else 0
        come_by = None if origin is None else self._domains[origin].name
        self.transfers.append(Transfer(name, piece.box, src, dst, domain.name, size, come_by, number))
        return _Provider(dst, index, number)


def _holders(shards: Shards) -> dict[str, dict[Box, list[int]]]:
    holders: dict[str, dict[Box, list[int]]] = {}
    for rank in sorted(shards.boxes):
        for name, box in shards.boxes[rank].items():
            if volume(box):
                holders.setdefault(name, {}).setdefault(box, []).append(rank)
    return holders


def _parts(
    name: str, holders: Mapping[Box, Sequence[int]], wanted: Sequence[tuple[int, Box]]
) -> Iterator[tuple[Box, tuple[int, ...], tuple[int, ...]]]:
    """A parameter cut so that each part has one set of holders, and one of domains that want it: (box, both)."""
    for cell in _cells(list(dict.fromkeys(box for _, box in wanted))):
        by = tuple(index for index, box in wanted if intersect(cell, box) == cell)
        covered = 0
        for box, ranks in holders.items():
            part = intersect(cell, box)
            if part is not None:
                covered += volume(part)
                yield part, tuple(ranks), by
        assert covered == volume(cell), f"{name} is covered {covered} of {volume(cell)} in {cell}"


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
