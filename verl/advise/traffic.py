"""What a step sends: rows between roles, and weights to the engines. Planned by the run's own planners."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from verl.advise.job import Job
from verl.advise.model import ModelShape
from verl.config import PPOConfig
from verl.flow import wire
from verl.flow.placement import Home
from verl.flow.plan import plan as plan_rows
from verl.mesh.spec import RolloutSpec
from verl.reshard.boxes import device_domains, generation_domains, node_domains, sender_of, training_boxes
from verl.reshard.buckets import SLOTS, cut_buckets, largest_bucket
from verl.reshard.layout import Domain, Shards
from verl.reshard.plan import plan as plan_weights

_LENGTH = 8
"""Bytes by which a column says how long a row is."""


@dataclass(frozen=True)
class Message:
    """Between two ranks; `src` == `dst`: it stays where it is."""

    src: int
    dst: int
    size: int
    """Bytes."""
    rows: int = 0


@dataclass(frozen=True)
class HandOver:
    """Columns that leave one role for others at one line of the step."""

    columns: tuple[str, ...]
    source: str
    targets: tuple[str, ...]
    messages: tuple[Message, ...]


@dataclass(frozen=True)
class WeightLoad:
    """One load of the actor's weights into all engines."""

    sent: tuple[Message, ...]
    """Between ranks."""
    written: tuple[Message, ...]
    """By the rank that trains them, into memory that an engine reads."""
    domains: tuple[Domain, ...]
    """The memories; what is sent to one of their readers is written there."""
    two_buckets: int
    """Bytes of a memory that engines read bucket by bucket, and the most that a rank keeps for messages."""


def hand_overs(job: Job, config: PPOConfig) -> list[HandOver]:
    """The hand-overs of `verl.ppo.ppo_step` in its order, with rows of the greatest length, which is an upper bound."""
    places = job.placements
    present = [role for role in ("actor", "critic", "reference", "reward") if role in places]
    judge = "critic" if "critic" in places else "actor"
    step = _Step(job, config)
    step.made("rollout", "prompt_ids", "response_ids", "rollout_logprobs", "ended", "weight", "version")
    step.hand_over(present)
    if config.algorithm.recompute_old_logprobs:  # else they are the rollout's, which all have by now
        step.made("actor", "old_logprobs")
    if "reference" in places:
        step.made("reference", "ref_logprobs")
    if "critic" in places:
        step.made("critic", "values")
    step.made("reward", "scores")
    step.hand_over([judge])
    step.made(judge, "advantages")
    if config.needs_critic:
        step.made(judge, "returns")
    step.hand_over([role for role in ("actor", "critic") if role in places])
    return step.hand_overs


def weight_load(job: Job, model: ModelShape, config: PPOConfig, itemsize: int) -> WeightLoad:
    """Who sends which bytes of the actor's weights to whom. `itemsize`: of the rollout's dtype."""
    actor = job.placements["actor"]
    split = model.split(job.spec("actor"), actor.spread)
    shards = Shards(training_boxes(model.shapes, split, actor.ranks), job.node_of)
    domains = _domains(job, model, config.rollout.weight_transfer)
    sizes: dict[tuple[int, int], int] = {}
    for transfer in plan_weights(shards, domains, itemsize):
        way = transfer.src, transfer.dst
        sizes[way] = sizes.get(way, 0) + transfer.size
    messages = [Message(src, dst, size) for (src, dst), size in sorted(sizes.items())]
    buckets = cut_buckets(model.shapes, itemsize, config.rollout.reshard_bucket_mib << 20)
    return WeightLoad(
        tuple(m for m in messages if m.src != m.dst),
        tuple(m for m in messages if m.src == m.dst),
        tuple(domains),
        2 * largest_bucket(buckets, model.shapes, itemsize),
    )


def _domains(job: Job, model: ModelShape, transfer: str) -> list[Domain]:
    """`transfer`: rollout.weight_transfer."""
    actor, rollout = job.placements["actor"], job.placements["rollout"]
    spec = job.spec("rollout")
    if isinstance(spec, RolloutSpec) and spec.backend == "torch":
        return generation_domains(model.shapes, model.config, rollout)
    sender = sender_of(rollout, actor)
    if transfer == "ipc":
        return device_domains(model.shapes, rollout.ranks, slots=SLOTS)
    if transfer == "nccl" and sender is not None:  # else a run refuses it
        return device_domains(model.shapes, [sender], slots=SLOTS)
    return node_domains(model.shapes, rollout.leaders, job.node_of, slots=SLOTS)


def between_nodes(job: Job, messages: Sequence[Message]) -> int:
    """Bytes that leave a node."""
    return sum(m.size for m in messages if job.node_of[m.src] != job.node_of[m.dst])


class _Step:
    """Which columns live where, as a step goes on."""

    def __init__(self, job: Job, config: PPOConfig) -> None:
        self.hand_overs: list[HandOver] = []
        self._job, self._size = job, config.data.train_batch_size * config.rollout.n
        self._homes: dict[str, dict[str, Home]] = {}
        self._row_bytes = _row_bytes(config.data.max_prompt_length, config.data.max_response_length)

    def made(self, role: str, *columns: str) -> None:
        self._homes |= {column: {role: self._job.placements[role].outputs} for column in columns}

    def hand_over(self, roles: Sequence[str]) -> None:
        """As `verl.flow.exchange` does it: what a role lacks comes from the role that made it."""
        wanted = {role: self._job.placements[role].inputs for role in roles}
        ways: dict[tuple[str, tuple[str, ...]], list[str]] = {}
        for column, homes in self._homes.items():
            missing = tuple(role for role, home in wanted.items() if homes.get(role) != home)
            if missing:
                ways.setdefault((next(iter(homes)), missing), []).append(column)
        for (source, targets), columns in ways.items():
            messages = tuple(self._messages(source, targets, columns))
            self.hand_overs.append(HandOver(tuple(columns), source, targets, messages))
            for column in columns:
                self._homes[column] |= {role: wanted[role] for role in targets}

    def _messages(self, source: str, targets: Sequence[str], columns: Sequence[str]) -> Iterator[Message]:
        home = next(iter(self._homes[columns[0]].values()))
        inputs = tuple(self._job.placements[role].inputs for role in targets)
        each = sum(self._row_bytes[column] + _LENGTH for column in columns)
        for move in plan_rows(home, inputs, self._size):
            if move.src != move.dst:
                fixed = wire.HEAD.size + len(columns) * wire.COLUMN.size
                yield Message(move.src, move.dst, fixed + len(move.rows) * each, len(move.rows))


def _row_bytes(prompt: int, response: int) -> Mapping[str, int]:
    """Bytes of a row's values by column, at the greatest lengths."""
    per_token = dict.fromkeys(
        ("rollout_logprobs", "old_logprobs", "ref_logprobs", "values", "advantages", "returns"), 4 * response
    )
    return {
        "prompt_ids": 8 * prompt,
        "response_ids": 8 * response,
        "ended": 1,
        "weight": 4,
        "version": 8,
        "scores": 4,
        **per_token,
    }
