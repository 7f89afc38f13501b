"""Stages of all ranks on one time axis: written per rank, shown by Chrome's tracing or Perfetto."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from verl.monitor.jsonl import JsonLines, read_jsonl
from verl.monitor.stages import Span

FOLDER = "timeline"


class Timeline:
    """run_dir/timeline/rank{r}.jsonl: {"step", "name", "start", "end", "role"}, one span a line."""

    def __init__(self, run_dir: str | Path, rank: int, first_step: int = 0) -> None:
        self._lines = JsonLines(Path(run_dir) / FOLDER / f"rank{rank}.jsonl", first_step)

    def log(self, step: int, spans: Iterable[Span]) -> None:
        self._lines.append({"step": step, **asdict(span)} for span in spans)

    def close(self) -> None:
        self._lines.close()


def read_timeline(run_dir: str | Path, step: int | None = None) -> dict[int, list[Span]]:
    """Each rank's spans, of all steps or of one."""
    timeline: dict[int, list[Span]] = {}
    for rank, rows in _ranks(run_dir):
        timeline[rank] = [Span(r["name"], r["start"], r["end"], r["role"]) for r in rows if step in (None, r["step"])]
    return timeline


def chrome_trace(run_dir: str | Path) -> Path:
    """Write run_dir/timeline/trace.json, for ui.perfetto.dev or chrome://tracing: a process a rank.

    Complete events ("ph": "X") of the Trace Event Format, in microseconds from the first span's start.
    """
    ranks = _ranks(run_dir)
    if not ranks:
        raise ValueError(f"{Path(run_dir) / FOLDER} holds no rank*.jsonl: run with debug.timeline=true to record them")
    origin = min((row["start"] for _, rows in ranks for row in rows), default=0.0)
    events: list[dict[str, Any]] = []
    for rank, rows in ranks:
        events.append({"ph": "M", "name": "process_name", "pid": rank, "tid": 0, "args": {"name": f"rank {rank}"}})
        events += [
            {
                "ph": "X",
                "name": row["name"],
                "cat": row["role"] or "step",
                "pid": rank,
                "tid": 0,
                "ts": (row["start"] - origin) * 1e6,
                "dur": (row["end"] - row["start"]) * 1e6,
                "args": {"step": row["step"]},
            }
            for row in rows
        ]
    trace = Path(run_dir) / FOLDER / "trace.json"
    trace.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}), encoding="utf-8")
    return trace


def overlap(spans_a: Iterable[Span], spans_b: Iterable[Span]) -> float:
    """Seconds in which at least one span of each side was running."""
    edges: list[tuple[float, int, int]] = []
    for side, spans in enumerate((spans_a, spans_b)):
        for span in spans:
            edges += [(span.start, side, 1), (span.end, side, -1)]
    running, since, seconds = [0, 0], 0.0, 0.0
    for time, side, change in sorted(edges):
        if all(running):
            seconds += time - since
        running[side] += change
        since = time
    return seconds


def _ranks(run_dir: str | Path) -> list[tuple[int, list[dict[str, Any]]]]:
    files = {int(path.stem.removeprefix("rank")): path for path in (Path(run_dir) / FOLDER).glob("rank*.jsonl")}
    return [(rank, read_jsonl(files[rank])) for rank in sorted(files)]
