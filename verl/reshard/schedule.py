"""What one rank does in each step of a load: pure, and in the same order on both ends of every message."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from verl.reshard.buckets import Buckets, bucket_of
from verl.reshard.layout import Domain, contiguous
from verl.reshard.plan import Transfer

ALONE_BYTES = 1 << 16
"""From this size on a part that is one stretch of its target's memory is a message of its own: it saves a copy."""


@dataclass(frozen=True, eq=False)
class Message:
    src: int
    dst: int
    domain: str
    transfers: tuple[Transfer, ...]
    """Packed behind each other. One that stands alone may be sent and received where it lies."""

    @cached_property
    def content(self) -> tuple[object, ...]:
        """Equal for messages of one sender and step that carry the same."""
        return tuple((t.name, t.box, t.origin) for t in self.transfers)


@dataclass
class Step:
    """Part of a load. What a domain takes in lies one bucket further with each step."""

    filled: dict[str, int] = field(default_factory=dict)
    """Domain -> the bucket of it that is whole after this step. The same on all ranks."""
    copies: list[Transfer] = field(default_factory=list)
    """What this rank writes of its own shards."""
    rounds: list[list[Message]] = field(default_factory=list)
    """Messages that this rank sends or receives. Those of a round wait for none of the same round."""


def make_steps(
    rank: int, transfers: Sequence[Transfer], domains: Sequence[Domain], buckets: Buckets, lags: Mapping[str, int]
) -> list[Step]:
    """Bucket b of a domain is filled in step b + lag. Only what the sender still has then is passed on: a domain with
    two slots keeps a bucket for the step after the one that fills it.
    """
    steps = [Step() for _ in range(len(buckets) + max(lags.values(), default=0))]
    for domain in domains:
        for bucket in range(len(buckets)):
            steps[bucket + lags[domain.name]].filled[domain.name] = bucket
    of, number_of = {domain.name: domain for domain in domains}, bucket_of(buckets)
    packed: dict[tuple[int, int, int, int, str], list[Transfer]] = {}
    for t in transfers:
        if rank not in (t.src, t.dst):
            continue
        number = number_of[t.name] + lags[t.domain]
        if t.src == t.dst:
            steps[number].copies.append(t)
            continue
        if t.origin is not None and of[t.origin].slots is not None:
            assert lags[t.domain] - lags[t.origin] in (0, 1), f"{t.origin} has overwritten what {t.domain} is to get"
        if t.size >= ALONE_BYTES and contiguous(t.box, of[t.domain].boxes[t.name]):
            _add(steps[number], t.round, Message(t.src, t.dst, t.domain, (t,)))
        else:
            packed.setdefault((number, t.round, t.src, t.dst, t.domain), []).append(t)
    for (number, turn, src, dst, domain), parts in packed.items():
        _add(steps[number], turn, Message(src, dst, domain, tuple(parts)))
    return steps


def _add(step: Step, turn: int, message: Message) -> None:
    step.rounds += [[] for _ in range(turn + 1 - len(step.rounds))]
    step.rounds[turn].append(message)
