"""Layouts of training: what each costs in processor time, and what a pipeline is idle for.

    python -m scripts.bench.layouts [--layouts "TP 2" "PP 2"] [--model FOLDER]

Optimizer steps on PPO's clipped loss of the same packed rows, in float32, with one thread a rank. The base is the
plain loop of scripts/bench/training.py in one process. A CPU-second is a second of a core: user and system time of all
threads of all ranks, from the first step to the last. A rank that waits for a message sleeps in the kernel and costs
nothing, so that more ranks than cores can be compared; how long a step takes cannot. A bubble is the share of the time
of forward and backward passes in which a stage waits. It is measured where each rank has a core of its own, and held
against that of a pipeline whose stages are even and whose messages take no time: (p - 1) / (v m + p - 1).
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from scripts.bench.common import OUT, OtherPrograms, Table, at_least, by_turns, figure, parser, show
from scripts.bench.common import model_folder as given_model
from scripts.bench.ranks import on_ranks
from scripts.bench.training import LEARNING_RATE, Work, plain_step
from verl.config import OptimConfig
from verl.engine.train_engine import EngineSpec, TrainEngine
from verl.flow.job import start_job
from verl.flow.placement import Placement, make_groups
from verl.model.heads import Head, TokenOutputs
from verl.model.load import read_config
from verl.model.packing import Sequences, plan_micro_batches
from verl.parallel.support import unsupported

TIMEOUT = 900.0
LENGTHS = (32, 32)
"""Tokens of a prompt and of a response: all alike, so that micro-batches are even."""
ROWS_PER_MICRO_BATCH = 4
PLAIN = "plain loop"


@dataclass(frozen=True)
class Layout:
    name: str
    pp: int = 1
    dp: int = 1
    tp: int = 1
    virtual: int = 1
    """Parts of the model that each stage takes turns with."""
    num_micro_batches: int | None = None
    """Of an optimizer step; None: as many as ROWS_PER_MICRO_BATCH makes."""

    @property
    def ranks(self) -> int:
        return self.pp * self.dp * self.tp


LAYOUTS = (
    Layout("1 rank"),
    Layout("FSDP 2", dp=2),
    Layout("TP 2", tp=2),
    Layout("PP 2", pp=2),
    Layout("PP 2, 2 parts each", pp=2, virtual=2),
    Layout("FSDP 2 x TP 2", dp=2, tp=2),
    Layout("PP 2 x FSDP 2", pp=2, dp=2),
    Layout("PP 2 x TP 2", pp=2, tp=2),
    Layout("PP 2 x FSDP 2 x TP 2", pp=2, dp=2, tp=2),
)
BUBBLES = tuple(
    Layout(f"PP 2, {parts}, {count} micro-batches", pp=2, virtual=virtual, num_micro_batches=count)
    for virtual, parts in ((1, "1 part each"), (2, "2 parts each"))
    for count in (2, 4, 16)
)


@dataclass(frozen=True)
class Cost:
    cpu_seconds: float
    """Of all ranks, for a step."""
    idle: float | None
    """The bubble, over all stages; None without a pipeline."""
    num_micro_batches: int


def make_work(num_rows: int, vocab_size: int) -> Work:
    draws = torch.Generator().manual_seed(1)
    ids = torch.randint(vocab_size, (num_rows, sum(LENGTHS)), generator=draws)
    prompts, responses = ids.split(LENGTHS, dim=1)
    sequences = Sequences.responses(list(prompts), list(responses))
    normal = torch.randn(2, sequences.num_outputs, generator=draws)
    return Work(sequences, normal[0] - 10, normal[1], ROWS_PER_MICRO_BATCH * sum(LENGTHS))


def engine_cost(folder: Path, work: Work, layout: Layout, num_steps: int) -> Cost:
    """On each rank."""
    torch.set_num_threads(1)
    job = start_job(stage_timeout=TIMEOUT, check_program=False)
    place = Placement("actor", tuple(range(layout.ranks)), tp=layout.tp, pp=layout.pp)
    groups = make_groups([place], job.rank, "cpu", job.timeout)["actor"]
    rows = place.inputs.rows(job.rank, len(work.rows))
    budget = work.max_tokens
    if layout.num_micro_batches is not None:
        budget = len(rows) // layout.num_micro_batches * sum(LENGTHS)
    spec = EngineSpec(
        folder, Head.lm, True, torch.float32, seed=0, max_tokens_per_micro_batch=budget, virtual_stages=layout.virtual
    )
    engine = TrainEngine(spec, groups, job.device, job.board)
    engine.add_optimizer(OptimConfig(lr=LEARNING_RATE), total_steps=1_000_000)

    def loss(outputs: TokenOutputs, at: Tensor) -> Tensor:
        return work.loss(outputs.values, at)

    engine.train_step(work.sequences, rows, loss)
    job.everywhere(None)
    began, idle, total = time.process_time(), 0.0, 0.0
    for _ in range(num_steps):
        engine.train_step(work.sequences, rows, loss)
        if engine.idle is not None:
            idle, total = idle + engine.idle.idle, total + engine.idle.total
    said = job.everywhere((time.process_time() - began, idle, total))
    job.close()
    cpu, idle, total = (sum(column) for column in zip(*said, strict=True))
    count = len(plan_micro_batches(work.sequences.lengths, rows, budget, None, layout.tp))
    return Cost(cpu / num_steps, idle / total if total else None, count)


def plain_cost(folder: Path, work: Work, num_steps: int) -> Cost:
    torch.set_num_threads(1)
    step = plain_step(folder, torch.float32, work)
    step()
    began = time.process_time()
    for _ in range(num_steps):
        step()
    return Cost((time.process_time() - began) / num_steps, None, len(work.micro_batches()))


def measure(
    folder: Path, work: Work, layouts: Sequence[Layout], num_steps: int, repetitions: int
) -> dict[str, list[Cost]]:
    """Of each layout and the plain loop, by name."""
    costs: dict[str, list[Cost]] = {name: [] for name in (PLAIN, *(layout.name for layout in layouts))}

    def cost_of(layout: Layout | None) -> float:
        if layout is None:
            name, cost = PLAIN, on_ranks(1, plain_cost, folder, work, num_steps, timeout=TIMEOUT)
        else:
            name, cost = (
                layout.name,
                on_ranks(layout.ranks, engine_cost, folder, work, layout, num_steps, timeout=TIMEOUT),
            )
        costs[name].append(cost)
        return cost.cpu_seconds

    by_turns({PLAIN: lambda: cost_of(None)} | {x.name: lambda x=x: cost_of(x) for x in layouts}, repetitions, 0)
    return costs


def bubble(layout: Layout, num_micro_batches: int) -> float:
    """Of even stages and messages that take no time (Narayanan et al. 2021, section 2.2)."""
    return (layout.pp - 1) / (layout.virtual * num_micro_batches + layout.pp - 1)


def tables(work: Work, layouts: Sequence[Layout], costs: dict[str, list[Cost]]) -> list[Table]:
    speeds = Table(
        f"Layouts: {work.num_tokens} tokens a step", ("layout", "ranks", "tokens / CPU-second", "of the plain loop")
    )
    bubbles = Table("Bubbles", ("pipeline", "micro-batches", "idle", "formula"))
    cores = len(os.sched_getaffinity(0))
    rates = {
        name: work.num_tokens / statistics.median(cost.cpu_seconds for cost in found) for name, found in costs.items()
    }
    speeds.add(PLAIN, "1", figure(rates[PLAIN]), "1.00")
    for layout in layouts:
        found = costs[layout.name]
        if layout.num_micro_batches is None:
            share = rates[layout.name] / rates[PLAIN]
            speeds.add(layout.name, str(layout.ranks), figure(rates[layout.name]), f"{share:.2f}")
        if layout.pp > 1 and layout.ranks <= cores:
            count, idle = found[0].num_micro_batches, statistics.median(cost.idle or 0.0 for cost in found)
            bubbles.add(layout.name, str(count), f"{idle:.1%}", f"{bubble(layout, count):.1%}")
    return [speeds, bubbles] if bubbles.rows else [speeds]


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parser(__doc__)
    arguments.add_argument("--layouts", nargs="+", choices=[x.name for x in (*LAYOUTS, *BUBBLES)], metavar="NAME")
    arguments.add_argument("--rows", type=at_least(1), default=32, help="sequences of an optimizer step; default 32")
    arguments.add_argument("--steps", type=at_least(1), default=2, help="measured at a time; default 2")
    given = arguments.parse_args(argv)
    folder = given_model(given.model, False) if given.model else make_model(given.quick)
    config = read_config(folder, trust_remote_code=False)
    every = LAYOUTS if given.quick else (*LAYOUTS, *BUBBLES)
    layouts = [layout for layout in every if not given.layouts or layout.name in given.layouts]
    refused = {layout: problems for layout in layouts if (problems := unsupported(config, layout.tp, layout.pp))}
    work = make_work(16 if given.quick else given.rows, config.get_text_config().vocab_size)
    possible = [layout for layout in layouts if layout not in refused]
    steps, repetitions = (1, 1) if given.quick else (given.steps, 3)
    with OtherPrograms() as others:
        costs = measure(folder, work, possible, steps, given.repetitions or repetitions)
    made = tables(work, possible, costs)
    made[0].notes += [f"{layout.name} is refused: {problems[0]}" for layout, problems in refused.items()]
    for table in made:
        show(table, others)
    return 0


def make_model(quick: bool) -> Path:
    """22 million parameters, which all layouts can split."""
    from scripts.make_tiny_model import make_tiny_model

    if quick:
        return make_tiny_model(OUT / "tiny_layouts")
    return make_tiny_model(
        OUT / "layouts", hidden_size=512, num_layers=8, num_heads=8, num_kv_heads=4, head_dim=64, vocab_size=2048
    )


if __name__ == "__main__":
    sys.exit(main())
