"""What the benchmarks share: measuring sides by turns, medians and their ratio, tables, a line about the machine."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "outputs" / "demo" / "model"
OUT = ROOT / "outputs" / "bench"
"""What a benchmark writes: prompts, reward models, runs."""
QUIET = 0.2
"""Cores that other programs may use while a benchmark is measured; above that its table warns."""


def parser(description: str | None) -> argparse.ArgumentParser:
    """The arguments that every benchmark has."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--model", type=Path, help=f"Hugging Face folder; left out: {MODEL.relative_to(ROOT)}")
    made.add_argument("--repetitions", type=at_least(1), help="measurements of each side, taken by turns")
    made.add_argument("--quick", action="store_true", help="a tiny model and little work: does it run at all?")
    return made


def at_least(minimum: int) -> Callable[[str], int]:
    """The type of an argument that is a whole number of `minimum` or more."""

    def whole(text: str) -> int:
        number = int(text)
        if number < minimum:
            raise argparse.ArgumentTypeError(f"{number}: at least {minimum}")
        return number

    return whole


def model_folder(given: Path | None, quick: bool) -> Path:
    """The model to measure: the one that was asked for, a tiny random one (`quick`), or the demo's."""
    if given is None and quick:
        from scripts.make_tiny_model import make_tiny_model

        return make_tiny_model(OUT / "tiny_model", vocab_size=512)
    folder = (given or MODEL).resolve()
    if not (folder / "config.json").is_file():
        raise SystemExit(
            f"error: there is no model in {folder}. `python scripts/prepare_model.py --out {MODEL.relative_to(ROOT)}` "
            "makes the demo's; --model names another one."
        )
    return folder


def by_turns(sides: Mapping[str, Callable[[], float]], repetitions: int, warm_up: int = 1) -> dict[str, list[float]]:
    """What each side gives, measured A B A B: a machine that gets slower does so to both. The warm-up is left out."""
    measured: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(warm_up + repetitions):
        for name, measure in sides.items():
            value = measure()
            if number >= warm_up:
                measured[name].append(value)
    return measured


def seconds(do: Callable[[], object]) -> float:
    began = time.perf_counter()
    do()
    return time.perf_counter() - began


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Of the medians."""
    return statistics.median(ours) / statistics.median(theirs)


@dataclass
class Table:
    """Rows of text under a title. Columns after the first are numbers and stand to the right."""

    title: str
    header: Sequence[str]
    rows: list[Sequence[str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(self, *cells: str) -> None:
        assert len(cells) == len(self.header), cells
        self.rows.append(cells)

    def compare(self, name: str, ours: Sequence[float], theirs: Sequence[float], target: float) -> None:
        """A row of a table `what | ours | theirs | ratio | target`: medians of rates, where more is better."""
        result = ratio(ours, theirs)
        verdict = "met" if result >= target else "missed"
        rates = (figure(statistics.median(side)) for side in (ours, theirs))
        self.add(name, *rates, f"{result:.2f}", f"{target:g} {verdict}")

    def text(self) -> str:
        lines = [list(self.header), *(list(row) for row in self.rows)]
        widths = [max(len(line[column]) for line in lines) for column in range(len(self.header))]
        aligned = [
            "  ".join(
                cell.ljust(width) if column == 0 else cell.rjust(width)
                for column, (cell, width) in enumerate(zip(line, widths, strict=True))
            ).rstrip()
            for line in lines
        ]
        rule = "-" * max(len(line) for line in aligned)
        return "\n".join([self.title, rule, aligned[0], rule, *aligned[1:], rule, *self.notes])


def figure(value: float) -> str:
    """Three significant digits, and no exponent."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


class OtherPrograms:
    """`with OtherPrograms() as others:` then `others.cores`: what everybody else used of this machine's processors.

    `cores` counts the processes that are neither this one nor children of it that have ended and been waited for.
    """

    cores = 0.0

    def __enter__(self) -> OtherPrograms:
        self._began, self._busy, self._own = time.monotonic(), _busy_seconds(), _own_seconds()
        return self

    def __exit__(self, *exc: object) -> None:
        others = (_busy_seconds() - self._busy) - (_own_seconds() - self._own)
        self.cores = max(0.0, others / (time.monotonic() - self._began))

    def notes(self) -> list[str]:
        if self.cores <= QUIET:
            return []
        return [f"WARNING: other programs used {self.cores:.1f} cores meanwhile; measure again on a quiet machine."]


def _busy_seconds() -> float:
    """Of all processors since the machine started: user, nice, system, irq and softirq."""
    ticks = [int(part) for part in Path("/proc/stat").read_text().splitlines()[0].split()[1:]]
    return sum(ticks[at] for at in (0, 1, 2, 5, 6)) / os.sysconf("SC_CLK_TCK")


def _own_seconds() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def machine() -> str:
    """The processor, the cores that this process may use, the memory, and the versions that decide the speed."""
    info = Path("/proc/cpuinfo").read_text().splitlines()
    name = next((line.split(":", 1)[1].strip() for line in info if line.startswith("model name")), "unknown processor")
    gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    packages = ", ".join(f"{package} {_version(package)}" for package in ("torch", "transformers", "vllm"))
    return f"{name}, {len(os.sched_getaffinity(0))} cores, {gib:.0f} GiB; {packages}"


def _version(package: str) -> str:
    for name in (package, f"{package}-cpu"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "absent"


def show(table: Table, others: OtherPrograms | None = None) -> None:
    print(f"\n{table.text()}")
    print("\n".join([machine(), *(others.notes() if others else [])]), flush=True)
