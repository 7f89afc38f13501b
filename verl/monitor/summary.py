"""What came of a run, from its metrics.jsonl."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from rich.table import Table

from verl.monitor.jsonl import read_jsonl
from verl.monitor.log import METRICS_FILE
from verl.monitor.names import SAMPLES_PER_SECOND, SCORE, STEP_SECONDS, STEP_TOKENS, VALIDATION_SCORE

Point = tuple[int, float]
"""A step and the figure it had."""


@dataclass(frozen=True)
class Summary:
    """A figure that the run did not record is None."""

    steps: int
    """The last step."""
    train_first: Point | None
    train_last: Point | None
    """Mean score of the responses of the first and last step."""
    validation_first: Point | None
    validation_last: Point | None
    validation_best: Point | None
    """Of equal ones, the earliest."""
    samples_per_s: float | None
    tokens_per_s: float | None
    """Of all steps together: their sum over the sum of their seconds, what lay between steps left out."""
    wall_time: float
    """Seconds from the start of the first logged step to the last line, pauses between restarts included."""
    paths: dict[str, Path]
    """What there is in the run's folder."""

    def table(self) -> Table:
        """For a rich console."""
        table = Table("", "", title=f"Run of {self.steps} steps", show_header=False)
        for label, point in {
            "validation reward before": self.validation_first,
            "validation reward after": self.validation_last,
            "best validation reward": self.validation_best,
            "training reward, first step": self.train_first,
            "training reward, last step": self.train_last,
        }.items():
            if point:
                table.add_row(label, f"{point[1]:.4f} (step {point[0]})")
        for label, speed in {"samples/s": self.samples_per_s, "tokens/s": self.tokens_per_s}.items():
            if speed is not None:
                table.add_row(label, f"{speed:,.2f}")
        table.add_row("wall time", str(timedelta(seconds=round(self.wall_time))))
        for label, path in self.paths.items():
            table.add_row(label, str(path))
        return table


def summarise(run_dir: str | Path) -> Summary:
    """Raises ValueError if the folder holds no metrics."""
    run_dir = Path(run_dir)
    lines = read_jsonl(run_dir / METRICS_FILE)
    if not lines:
        raise ValueError(f"{run_dir / METRICS_FILE} is missing or empty: give the folder of a run that has done a step")
    train, validation = _points(lines, SCORE), _points(lines, VALIDATION_SCORE)
    timed = [line for line in lines if line.get(STEP_SECONDS)]
    seconds = sum(line[STEP_SECONDS] for line in timed)
    contents = {"metrics": METRICS_FILE, "samples": "samples", "TensorBoard": "tensorboard", "model": "hf"}
    contents |= {"checkpoints": "checkpoints", "timeline": "timeline"}
    return Summary(
        steps=lines[-1]["step"],
        train_first=train[0] if train else None,
        train_last=train[-1] if train else None,
        validation_first=validation[0] if validation else None,
        validation_last=validation[-1] if validation else None,
        validation_best=max(validation, key=lambda point: point[1], default=None),
        samples_per_s=_rate(timed, SAMPLES_PER_SECOND, seconds),
        tokens_per_s=sum(line[STEP_TOKENS] for line in timed) / seconds if timed else None,
        wall_time=lines[-1]["time"] - lines[0]["time"] + lines[0].get(STEP_SECONDS, 0.0),
        paths={label: run_dir / name for label, name in contents.items() if (run_dir / name).exists()},
    )


def _points(lines: list[dict[str, Any]], name: str) -> list[Point]:
    return [(line["step"], line[name]) for line in lines if line.get(name) is not None]


def _rate(timed: list[dict[str, Any]], name: str, seconds: float) -> float | None:
    return sum(line[name] * line[STEP_SECONDS] for line in timed) / seconds if timed else None
