"""Facts and problems as text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby

from verl.preflight.compare import Problem, node_names
from verl.preflight.facts import Facts

MOST_ROWS = 20
WIDEST = 56
"""Characters of a cell; the remedy, which stands last, may be longer."""
_HEADS = ("node", "ranks", "what", "is", "should be", "remedy")


def table(problems: Sequence[Problem]) -> str:
    """One line for each problem, under a line of heads."""
    rows = [
        (p.node, span(p.ranks), p.what, p.here, p.wanted, p.remedy)
        for p in problems[:MOST_ROWS]
    ]  # fmt: skip
    lines = _columns([_HEADS, *rows])
    if len(problems) > MOST_ROWS:
        lines.append(f"and {len(problems) - MOST_ROWS} more")
    return "\n".join(lines)


def listing(problems: Sequence[Problem]) -> str:
    """For one node: what is wrong, and on the next line how to mend it."""
    return "\n".join(f"  {p.what}: {p.here}; should be {p.wanted}\n    {p.remedy}" for p in problems)


def _columns(rows: Sequence[Sequence[str]]) -> list[str]:
    short = [[_cut(cell) for cell in row[:-1]] + [row[-1]] for row in rows]
    widths = [max(map(len, column)) for column in zip(*short, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in short]


def _cut(cell: str) -> str:
    cell = " ".join(cell.split())
    return cell if len(cell) <= WIDEST else cell[: WIDEST - 4] + " ..."


def span(ranks: Iterable[int]) -> str:
    """0-3,6"""
    parts = []
    for _, run in groupby(enumerate(sorted(ranks)), key=lambda pair: pair[1] - pair[0]):
        numbers = [number for _, number in run]
        parts.append(str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]}-{numbers[-1]}")
    return ",".join(parts)


def summary(facts: Sequence[Facts]) -> str:
    """A line for each node, for the log."""
    lines = []
    for node, name in node_names(facts).items():
        here = sorted((f for f in facts if f.node == node), key=lambda f: f.rank)
        first = here[0]
        versions = ", ".join(f"{what} {version}" for what, version in first.versions.items() if version)
        lines.append(
            f"{name}: rank {span(f.rank for f in here)}, {devices(first)}, {versions}, "
            f"{first.network.interface} {first.network.address}"
        )
    return "\n".join(lines)


def devices(facts: Facts) -> str:
    """2 x NVIDIA H200 (139 GiB)"""
    if not facts.accelerators:
        return f"no GPU, {facts.cores} cores"
    kinds = [f"{device.name} ({device.memory / (1 << 30):.0f} GiB)" for device in facts.accelerators]
    return ", ".join(f"{len(list(run))} x {kind}" for kind, run in groupby(kinds))
