"""What one rank does in each step of a load: pure, and in the same order on both ends of every message."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
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


class Place(NamedTuple):
    """A part of a tensor that this rank has, or can write into."""

    name: str
    domain: str | None
    """Whose memory the tensor is in; None: it is a training shard of this rank."""
    index: tuple[slice, ...]
    """What of the tensor it is; () for all of it."""


class Copy(NamedTuple):
    """What a rank writes itself."""

    transfer: Transfer
    source: Place
    target: Place


@dataclass(frozen=True, eq=False)
class Message:
    src: int
    dst: int
    domain: str
    transfers: tuple[Transfer, ...]
    """Packed behind each other."""
    alone: bool
    """There is one, and it can be received where it belongs."""
    direct: bool
    """Its sender writes it where it belongs, in memory that both ranks have."""
    told: bool
    """The receiver of this direct one hears when it is there: the last one of its pair in a load that is written early,
    and the last one that is not. Nobody waits for the others, as the plan has nothing of them passed on."""
    copies: tuple[Copy, ...]
    """What its sender writes, of a direct one; on the receiver none."""
    places: tuple[Place, ...]
    """Where the parts of another one are on this rank."""
    tag: int
    """Of its pair of ranks, it is the only message of a load with this one."""
    content: int | None
    """Equal for messages that this rank sends in one step and that carry the same; None: it receives this one, or
    writes it."""
    early: bool
    """It may be posted on this rank before the step begins: it needs nothing that comes, nor a slot that is read."""

    @property
    def numel(self) -> int:
        return sum(volume(t.box) for t in self.transfers)


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
        messages = [m for turn in self.rounds for m in turn if not m.direct]
        sent = {m.content: m.numel for m in messages if m.content is not None}
        received = [m for m in messages if m.content is None]
        return sum(sent.values()) + sum(m.numel for m in received if not (m.alone and received_in_place))


def make_steps(
    rank: int,
    transfers: Sequence[Transfer],
    shards: Shards,
    domains: Sequence[Domain],
    buckets: Buckets,
    lags: Mapping[str, int],
    opened: Collection[str],
) -> list[Step]:
    """Bucket b of a domain is filled in step b + lag. Only what the sender still has then is passed on: a domain with
    two slots keeps a bucket for the step after the one that fills it.

    `opened`: the domains in which other ranks of the node can write.
    """
    steps = [Step() for _ in range(len(buckets) + max(lags.values(), default=0))]
    for domain in domains:
        for bucket in range(len(buckets)):
            steps[bucket + lags[domain.name]].filled[domain.name] = bucket
    of, number_of = {domain.name: domain for domain in domains}, bucket_of(buckets)
    here = _Here(rank, shards, of, opened)
    packed: dict[tuple[int, int, int, int, str], list[Transfer]] = {}
    groups: list[_Group] = []
    for t in transfers:
        if rank not in (t.src, t.dst):
            continue
        number = number_of[t.name] + lags[t.domain]
        if t.src == t.dst:
            steps[number].copies.append(Copy(t, here.shard(t), here.memory(t, t.domain)))
            continue
        if t.origin is not None and of[t.origin].slots is not None:
            assert lags[t.domain] - lags[t.origin] in (0, 1), f"{t.origin} has overwritten what {t.domain} is to get"
        if not here.writes(t) and t.size >= ALONE_BYTES and contiguous(t.box, of[t.domain].boxes[t.name]):
            groups.append(_Group(number, t.round, True, [t]))
        else:
            packed.setdefault((number, t.round, t.src, t.dst, t.domain), []).append(t)
    groups += [_Group(number, turn, False, parts) for (number, turn, *_), parts in packed.items()]
    here.add_messages(steps, sorted(groups, key=lambda group: (group.step, group.round)))
    return steps


def from_neighbours(transfers: Sequence[Transfer], node_of: Mapping[int, str], domain: str) -> set[str]:
    """The parameters of a domain of which other ranks of its node have something."""
    return {t.name for t in transfers if t.domain == domain and t.src != t.dst and node_of[t.src] == node_of[t.dst]}


@dataclass(frozen=True)
class _Group:
    """What goes from one rank to another in one message."""

    step: int
    round: int
    alone: bool
    parts: list[Transfer]

    @property
    def pair(self) -> tuple[int, int]:
        return self.parts[0].src, self.parts[0].dst

    @property
    def of_shards(self) -> bool:
        """All of it is what its sender trains."""
        return all(t.origin is None for t in self.parts)


class _Here:
    """The schedule from one rank's end."""

    def __init__(self, rank: int, shards: Shards, domains: Mapping[str, Domain], opened: Collection[str]) -> None:
        self._rank, self._boxes, self._domains = rank, shards.boxes.get(rank, {}), domains
        self._node_of, self._opened = shards.node_of, opened

    def shard(self, t: Transfer) -> Place:
        return Place(t.name, None, within(t.box, self._boxes[t.name]))

    def memory(self, t: Transfer, domain: str) -> Place:
        return Place(t.name, domain, within(t.box, self._domains[domain].boxes[t.name]))

    def source(self, t: Transfer) -> Place:
        return self.shard(t) if t.origin is None else self.memory(t, t.origin)

    def writes(self, t: Transfer) -> bool:
        """The source's rank can write it where it belongs."""
        return t.domain in self._opened and self._node_of[t.src] == self._node_of[t.dst]

    def add_messages(self, steps: Sequence[Step], groups: Sequence[_Group]) -> None:
        """`groups`: ascending by step and round."""
        tags: Counter[tuple[int, int]] = Counter()
        contents: dict[object, int] = {}
        last = {(group.pair, group.of_shards): group for group in groups if self.writes(group.parts[0])}
        for group in groups:
            (src, dst), parts, rounds = group.pair, group.parts, steps[group.step].rounds
            rounds += [[] for _ in range(group.round + 1 - len(rounds))]
            domain, direct = parts[0].domain, self.writes(parts[0])
            tag = FIRST_TAG + tags[group.pair]
            tags[group.pair] += 1
            told = direct and last[group.pair, group.of_shards] is group
            copies, places, content = (), (), None
            if dst == self._rank:
                places = tuple(self.memory(t, domain) for t in parts)
                early = group.round == 0 and self._domains[domain].slots is None
            else:
                early = group.of_shards
                if direct:
                    copies = tuple(Copy(t, self.source(t), self.memory(t, domain)) for t in parts)
                else:
                    places = tuple(self.source(t) for t in parts)
                    carried = group.step, tuple((t.name, t.box, t.origin) for t in parts)
                    content = contents.setdefault(carried, len(contents))
            rounds[group.round].append(
                Message(src, dst, domain, tuple(parts), group.alone, direct, told, copies, places, tag, content, early)
            )
