"""Checkpoints: what a save costs the step, blocking and in the background.

    python -m scripts.bench.checkpoint [--ranks 2] [--model FOLDER]

One trained role over FSDP ranks on this machine: float32 parameters and AdamW's state, synced to the disk. Blocking:
the step waits until the checkpoint is published. In the background (trainer.async_save) it waits for the copy of its
shards alone; what the steps lose in which the copy is written is measured too, against undisturbed steps of the same
run. The slowest rank counts, and the first save of each kind does not: it makes room for the copies.
"""

from __future__ import annotations

import shutil
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from scripts.bench.common import OUT, OtherPrograms, Table, at_least, figure, model_folder, parser, seconds, show
from scripts.bench.ranks import on_ranks
from scripts.bench.training import LEARNING_RATE, Work
from verl.config import OptimConfig
from verl.engine.background import Background
from verl.engine.checkpoint import Checkpoints
from verl.engine.manifest import step_folder
from verl.engine.train_engine import EngineSpec, TrainEngine
from verl.flow.job import Job, start_job
from verl.flow.placement import Placement, make_groups
from verl.model.heads import Head, TokenOutputs
from verl.model.load import read_config

TARGET = 0.1
"""Of a blocking save that one in the background may cost the step."""
TIMEOUT = 600.0
FOLDER = OUT / "checkpoint"


@dataclass
class Figures:
    """Seconds of every repetition, and a checkpoint's bytes."""

    step: list[float] = field(default_factory=list)
    """Undisturbed."""
    blocking: list[float] = field(default_factory=list)
    blocked: list[float] = field(default_factory=list)
    lost: list[float] = field(default_factory=list)
    """By the steps in which a checkpoint was written, together."""
    written: list[float] = field(default_factory=list)
    """From the step's end until it was published."""
    size: int = 0


class Rank:
    """An engine that trains and saves."""

    def __init__(self, job: Job, folder: Path, work: Work) -> None:
        place = Placement("actor", tuple(range(job.world)))
        self._job, self._work, self._step = job, work, 0
        background = Background(job, {"actor": place})
        groups = make_groups([place], job.rank, "cpu", job.timeout)["actor"]
        spec = EngineSpec(folder, Head.lm, True, torch.bfloat16, seed=0, max_tokens_per_micro_batch=work.max_tokens)
        self._engine = TrainEngine(spec, groups, job.device, job.board)
        self._engine.add_optimizer(OptimConfig(lr=LEARNING_RATE), total_steps=1_000_000)
        self._rows = range(job.rank, len(work.sequences.ids), job.world)
        self.blocking = Checkpoints(FOLDER / "blocking", 1, job)
        self.background = Checkpoints(FOLDER / "background", 1, job, background=background)

    def slowest(self, do: Callable[[], object]) -> float:
        """Seconds of what all ranks begin together."""
        self._job.everywhere(None)
        return max(self._job.everywhere(seconds(do)))

    def train(self) -> None:
        self._engine.train_step(self._work.sequences, self._rows, self._loss)

    def save(self, checkpoints: Checkpoints) -> None:
        self._step += 1
        checkpoints.save(self._step, {"actor": self._engine}, {}, {})

    def published(self) -> bool:
        """Whether the last save in the background is."""
        return self._job.hand_over.agree(step_folder(self.background.folder, self._step).exists(), source=0)

    def _loss(self, outputs: TokenOutputs, at: torch.Tensor) -> torch.Tensor:
        return self._work.loss(outputs.values, at)


def measure(folder: Path, work: Work, num_steps: int, repetitions: int) -> Figures:
    """On each rank."""
    torch.set_num_threads(1)
    job = start_job(stage_timeout=TIMEOUT, check_program=False)
    rank, found = Rank(job, folder, work), Figures()
    for number in range(1 + repetitions):
        steps = [rank.slowest(rank.train) for _ in range(num_steps)]
        blocking = rank.slowest(lambda: rank.save(rank.blocking))
        blocked = rank.slowest(lambda: rank.save(rank.background))
        disturbed: list[float] = []
        while not rank.published():
            disturbed.append(rank.slowest(rank.train))
        rank.background.finish()
        if number:
            found.step += steps
            found.blocking.append(blocking)
            found.blocked.append(blocked)
            found.written.append(sum(disturbed))
            found.lost.append(sum(disturbed) - len(disturbed) * statistics.median(steps))
    found.size = sum(file.stat().st_size for file in FOLDER.rglob("*") if file.is_file()) // 2
    job.close()
    return found


def table_of(found: Figures, num_ranks: int) -> Table:
    table = Table(
        f"Checkpoints: {num_ranks} ranks, {found.size / 1e6:.0f} MB, seconds",
        ("what", "seconds", "of a blocking save", "target"),
    )
    blocking = statistics.median(found.blocking)

    def add(name: str, values: Sequence[float], target: str = "") -> None:
        value = statistics.median(values)
        table.add(name, figure(value) if value > 0 else f"{value:.2f}", f"{value / blocking:.0%}", target)

    met = statistics.median(found.blocked) / blocking < TARGET
    add("blocking: the step waits", found.blocking)
    add("in the background: the step waits", found.blocked, f"{TARGET:.0%} {'met' if met else 'missed'}")
    add("the next steps lose, together", found.lost)
    add("until it is published", found.written)
    table.notes.append(f"An undisturbed step takes {figure(statistics.median(found.step))} s.")
    return table


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parser(__doc__)
    arguments.add_argument("--ranks", type=at_least(1), default=2, help="default 2")
    arguments.add_argument("--rows", type=at_least(1), default=32, help="sequences of an optimizer step; default 32")
    arguments.add_argument("--steps", type=at_least(1), default=3, help="undisturbed ones a repetition; default 3")
    given = arguments.parse_args(argv)
    folder = model_folder(given.model, given.quick)
    repetitions = given.repetitions or (1 if given.quick else 5)
    vocab_size = read_config(folder, trust_remote_code=False).get_text_config().vocab_size
    work = Work.draw(max(given.ranks, 4) if given.quick else given.rows, vocab_size, max_tokens=1024)
    shutil.rmtree(FOLDER, ignore_errors=True)
    with OtherPrograms() as others:
        found = on_ranks(given.ranks, measure, folder, work, given.steps, repetitions, timeout=TIMEOUT)
    shutil.rmtree(FOLDER)
    show(table_of(found, given.ranks), others)
    return 0


if __name__ == "__main__":
    sys.exit(main())
