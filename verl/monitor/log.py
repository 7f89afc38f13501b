"""The run's own files: metrics.jsonl and samples/."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from verl.monitor.jsonl import JsonLines, write_jsonl

METRICS_FILE = "metrics.jsonl"
SAMPLES_FOLDER = "samples"


class MetricsLog:
    """run_dir/metrics.jsonl: {"step", "time", metrics...}, one object a line; "time" is seconds since the epoch."""

    def __init__(self, run_dir: str | Path, first_step: int = 0) -> None:
        """Lines of `first_step`, the first step this run will log, and of later ones are dropped: they come again."""
        self._lines = JsonLines(Path(run_dir) / METRICS_FILE, first_step)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Written at once. A step may have several lines. NaN and infinities, which JSON lacks, become null."""
        figures = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        self._lines.append([{"step": step, "time": time.time(), **figures}])

    def close(self) -> None:
        self._lines.close()


@dataclass(frozen=True)
class LoggedSample:
    prompt: str
    response: str
    score: float
    ground_truth: Any


class SampleLog:
    """run_dir/samples/step_N.jsonl: some of a step's prompts and responses, to read."""

    def __init__(self, run_dir: str | Path) -> None:
        self._folder = Path(run_dir) / SAMPLES_FOLDER

    def log(self, step: int, samples: Iterable[LoggedSample]) -> None:
        """Write the step's file; one of an earlier attempt at this step is replaced."""
        rows = [asdict(sample) for sample in samples]
        for row in rows:
            row["score"] = row["score"] if math.isfinite(row["score"]) else None
        write_jsonl(self._folder / f"step_{step}.jsonl", rows)
