"""What `verl mesh` prints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from verl.advise.budget import ITEMSIZE
from verl.advise.fit import gib
from verl.advise.job import Job
from verl.advise.model import ModelShape
from verl.advise.report import Report
from verl.advise.traffic import Message, WeightLoad, between_nodes, hand_overs, weight_load
from verl.config import PPOConfig

_MOST_MESSAGES = 4


def heading(job: Job) -> Iterator[str]:
    count, nodes = len(job.processes), job.nodes
    where = f"{len(nodes)} nodes" if len(nodes) > 1 else "1 node"
    yield f"{job.mesh.source}: {count} device{'' if count == 1 else 's'} on {where}"


def summary(
    job: Job, models: Mapping[str, ModelShape], config: PPOConfig, report: Report, device_memory: int | None
) -> Iterator[str]:
    """`verl mesh check`: what was looked at, and what each device would hold."""
    yield from heading(job)
    if report.budgets:
        yield from memory(job, models, config, report, device_memory)
    if not models:
        yield "held against no model: name one with --model FOLDER, config.json or hub id"
    elif device_memory is None and not report.problems:
        yield "held against no memory: name a device's with --device-memory GIB"
    yield "not usable, as follows" if report.problems else "ok"


def memory(
    job: Job, models: Mapping[str, ModelShape], config: PPOConfig, report: Report, device_memory: int | None
) -> Iterator[str]:
    names = ", ".join(dict.fromkeys(model.name for model in models.values()))
    limit = "" if device_memory is None else f" of {gib(device_memory)}"
    yield (
        f"memory of each device in GiB{limit}, an estimate for {names}; a step is {config.data.train_batch_size} "
        f"prompts x {config.rollout.n}, of at most {config.data.max_prompt_length} + "
        f"{config.data.max_response_length} tokens"
    )
    for budget in report.budgets:
        yield f"  {job.devices(budget.ranks)}: {gib(budget.peak)}, when the {budget.worker} works"
        for role, need in budget.needs.items():
            terms = {"": need.stays, "at work ": need.at_work, "in the node's memory ": need.on_host}
            parts = [f"{when}{_terms(sizes)}" for when, sizes in terms.items() if _terms(sizes)]
            yield f"    {role:<10}{'; '.join(parts)}"
        yield f"    {'other':<10}CUDA and NCCL {gib(budget.overhead)}"


def _terms(terms: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {gib(size)}" for name, size in terms.items() if size)


def rows(job: Job, config: PPOConfig) -> Iterator[str]:
    """Who sends rows to whom in a step."""
    prompts, n = config.data.train_batch_size, config.rollout.n
    yield (
        f"rows of a step: {prompts} prompts x {n}, at most {config.data.max_prompt_length} + "
        f"{config.data.max_response_length} tokens each"
    )
    try:
        steps = hand_overs(job, config)
    except ValueError as error:  # rows that do not split
        yield f"  {error}; set data.train_batch_size to a multiple"
        return
    for step in steps:
        what = f"  {step.source} -> {', '.join(step.targets)}: {', '.join(step.columns)}"
        if not step.messages:
            yield f"{what}: nothing is sent, they are there"
            continue
        yield what
        yield from _messages(job, step.messages)


def weights(job: Job, models: Mapping[str, ModelShape], config: PPOConfig, report: Report) -> Iterator[str]:
    """Who sends weights to whom after an update."""
    if "actor" not in models:
        yield "weights: name the model with --model to see who sends how much to whom"
        return
    if not report.budgets:
        yield "weights: the model cannot be split so; see below"
        return
    dtype = job.spec("rollout").dtype
    load = weight_load(job, models["actor"], config, ITEMSIZE[dtype])
    total = sum(m.size for m in [*load.sent, *load.written])
    memories = len(load.domains)
    yield (
        f"weights after an update: {size(total)} of {dtype or 'bfloat16'} into "
        f"{'1 memory' if memories == 1 else f'{memories} memories'} that engines read"
    )
    for domain in load.domains:
        yield f"  on {job.node_of[domain.readers[0]]}, read by {job.devices(domain.readers)}"
    if load.written:
        each = max(m.size for m in load.written)
        ranks = tuple(m.src for m in load.written)
        yield f"  written in place by {job.devices(ranks)}, at most {size(each)} each"
    if load.sent:
        yield "  sent"
        yield from _messages(job, load.sent)
    else:
        yield "  nothing is sent"
    yield from _extra(load)


def _extra(load: WeightLoad) -> Iterator[str]:
    """Memory that there is for a load alone."""
    if any(domain.slots is not None for domain in load.domains):
        yield f"  bucket by bucket: {size(load.two_buckets)} for the two that each memory has room for"
    if load.sent:
        yield (
            f"  and up to {size(load.two_buckets)} where messages are sent or received by a socket, as they are not "
            "within a node of CPUs"
        )


def as_json(job: Job, report: Report) -> dict[str, Any]:
    """`verl mesh check --json`. Sizes are bytes."""
    return {
        "mesh": job.mesh.source,
        "ok": not report.problems,
        "problems": list(report.problems),
        "warnings": list(report.warnings),
        "nodes": {node: len(ranks) for node, ranks in job.nodes.items()},
        "roles": {
            role: {
                "devices": [job.device(rank) for rank in placement.ranks],
                "pp": placement.pp,
                "dp": placement.dp,
                "cp": placement.cp,
                "copies": placement.copies,
                "tp": placement.tp,
            }
            for role, placement in job.placements.items()
        },
        "memory": [
            {
                "devices": [job.device(rank) for rank in budget.ranks],
                "peak": budget.peak,
                "stays": budget.stays,
                "roles": {
                    role: {"stays": dict(need.stays), "at_work": dict(need.at_work), "on_host": dict(need.on_host)}
                    for role, need in budget.needs.items()
                },
                "cuda_and_nccl": budget.overhead,
            }
            for budget in report.budgets
        ],
    }


def size(count: int) -> str:
    """Bytes as a person reads them."""
    amount, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if amount < 1024:
            break
        amount, unit = amount / 1024, larger
    return f"{count} B" if unit == "B" else f"{amount:.1f} {unit}"


def _messages(job: Job, messages: Sequence[Message]) -> Iterator[str]:
    """The largest of them one by one, and their sum."""
    largest = sorted(messages, key=lambda m: (-m.size, m.src, m.dst))[:_MOST_MESSAGES]
    for m in sorted(largest, key=lambda m: (m.src, m.dst)):
        rows = f"{m.rows} rows, " if m.rows else ""
        yield f"    {job.device(m.src)} -> {job.device(m.dst)}: {rows}{size(m.size)}"
    rest = len(messages) - len(largest)
    if rest:
        yield f"    and {rest} smaller or equal"
    total, far = sum(m.size for m in messages), between_nodes(job, messages)
    yield f"    in all {size(total)}" + (f", {size(far)} of it between nodes" if len(job.nodes) > 1 else "")
