"""What one rank does in each step of a load: pure, and in the same order on both ends of every message."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from verl.reshard.buckets import Buckets, bucket_of
from verl.reshard.layout import Domain, Shards, contiguous, volume, within
from verl.reshard.plan import Transfer

ALONE_BYTES = 1 << 20
"""From this size on a part that is one stretch of its target's memory is a message of its own: it saves a copy. Below
it a message costs more than the copy."""
FIRST_TAG = 8
"""Of weights; `verl.reshard.signals` has the tags below."""
TAKEN_TAGS = 1 << 24
"""Added to a message's tag: the tag of the answer that it has been read."""


class Place(NamedTuple):
    """A part of a tensor that this rank has."""

    name: str
    domain: str | None
    """Whose memory the tensor is in; None: it is a training shard of this rank."""
    index: tuple[slice, ...]
    """What of the tensor it is; () for all of it."""


@dataclass(frozen=True, eq=False)
class Message:
    src: int
    dst: int
    domain: str
    transfers: tuple[Transfer, ...]
    """Packed behind each other."""
    alone: bool
    """There is one, and it can be received where it belongs."""
    shared: bool
    """Both ranks are on one node: the one reads what the other has packed, and no byte goes through a socket."""
    places: tuple[Place, ...]
    """Where they are on this rank."""
    tag: int
    """Of its pair of ranks, it is the only message of a load with this one."""
    content: int | None
    """Equal for messages that this rank sends in one step and that carry the same; None: it receives this one."""
    early: bool
    """It may be posted on this rank before the step begins: it needs nothing that comes, nor a slot that is read."""

    @property
    def numel(self) -> int:
        return sum(volume(t.box) for t in self.transfers)


class Copy(NamedTuple):
    """What a rank writes of its own shards."""

    transfer: Transfer
    source: Place
    target: Place


@dataclass
class Step:
    """Part of a load. What a domain takes in lies one bucket further with each step."""

    filled: dict[str, int] = field(default_factory=dict)
    """Domain -> the bucket of it that is whole after this step. The same on all ranks."""
    copies: list[Copy] = field(default_factory=list)
    rounds: list[list[Message]] = field(default_factory=list)
    """Messages that this rank sends or receives. Those of a round wait for none of the same round."""

    def staged(self, received_in_place: bool) -> int:
        """Elements of memory, at most, for messages that are not sent and received where their tensors lie.

        `received_in_place`: those that may be are, as their tensors are in host memory.
        """
        messages = [m for turn in self.rounds for m in turn]
        sent = {m.content: m.numel for m in messages if m.content is not None}
        received = [m for m in messages if m.content is None and not m.shared]
        return sum(sent.values()) + sum(m.numel for m in received if not (m.alone and received_in_place))


def make_steps(
    rank: int,
    transfers: Sequence[Transfer],
    shards: Shards,
    domains: Sequence[Domain],
    buckets: Buckets,
    lags: Mapping[str, int],
) -> list[Step]:
    """Bucket b of a domain is filled in step b + lag. Only what the sender still has then is passed on: a domain with
    two slots keeps a bucket for the step after the one that fills it.
    """
    steps = [Step() for _ in range(len(buckets) + max(lags.values(), default=0))]
    for domain in domains:
        for bucket in range(len(buckets)):
            steps[bucket + lags[domain.name]].filled[domain.name] = bucket
    of, number_of = {domain.name: domain for domain in domains}, bucket_of(buckets)
    here = _Here(rank, shards, of)
    packed: dict[tuple[int, int, int, int, str], list[Transfer]] = {}
    groups: list[tuple[int, int, bool, list[Transfer]]] = []
    for t in transfers:
        if rank not in (t.src, t.dst):
            continue
        number = number_of[t.name] + lags[t.domain]
        if t.src == t.dst:
            steps[number].copies.append(Copy(t, here.shard(t), here.memory(t, t.domain)))
            continue
        if t.origin is not None and of[t.origin].slots is not None:
            assert lags[t.domain] - lags[t.origin] in (0, 1), f"{t.origin} has overwritten what {t.domain} is to get"
        near = shards.node_of[t.src] == shards.node_of[t.dst]
        if not near and t.size >= ALONE_BYTES and contiguous(t.box, of[t.domain].boxes[t.name]):
            groups.append((number, t.round, True, [t]))
        else:
            packed.setdefault((number, t.round, t.src, t.dst, t.domain), []).append(t)
    groups += [(number, turn, False, parts) for (number, turn, *_), parts in packed.items()]
    here.add_messages(steps, sorted(groups, key=lambda group: group[:2]))
    return steps


class _Here:
    """The schedule from one rank's end."""

    def __init__(self, rank: int, shards: Shards, domains: Mapping[str, Domain]) -> None:
        self._rank, self._boxes, self._domains = rank, shards.boxes.get(rank, {}), domains
        self._node_of = shards.node_of

    def shard(self, t: Transfer) -> Place:
        return Place(t.name, None, within(t.box, self._boxes[t.name]))

    def memory(self, t: Transfer, domain: str) -> Place:
        return Place(t.name, domain, within(t.box, self._domains[domain].boxes[t.name]))

    def add_messages(self, steps: Sequence[Step], groups: Sequence[tuple[int, int, bool, list[Transfer]]]) -> None:
        """`groups`: step, round, whether it is one alone, and what is packed together; ascending."""
        tags: Counter[tuple[int, int]] = Counter()
        contents: dict[object, int] = {}
        for number, turn, alone, parts in groups:
            (src, dst, domain), rounds = (parts[0].src, parts[0].dst, parts[0].domain), steps[number].rounds
            rounds += [[] for _ in range(turn + 1 - len(rounds))]
            tag, shared = FIRST_TAG + tags[src, dst], self._node_of[src] == self._node_of[dst]
            tags[src, dst] += 1
            if dst == self._rank:
                places, content = [self.memory(t, domain) for t in parts], None
                early = turn == 0 and self._domains[domain].slots is None
            else:
                places = [self.shard(t) if t.origin is None else self.memory(t, t.origin) for t in parts]
                carried = number, tuple((t.name, t.box, t.origin) for t in parts)
                content = contents.setdefault(carried, len(contents))
                early = all(t.origin is None for t in parts)
            rounds[turn].append(
                Message(src, dst, domain, tuple(parts), alone, shared, tuple(places), tag, content, early)
            )
