"""Holds every family on every layout against plain Hugging Face in one process, and writes docs/parity.md.

    python -m scripts.parity [--families llama qwen3] [--layouts 1,1,2 2,2,1] [--out FILE]

A layout is pp,dp,tp or pp,dp,tp,cp. Tiny random models in float32 on CPU ranks over gloo. Exit code 1: something is
out of tolerance.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import transformers

from tests.support.parity import FAMILIES, Case, Errors, Layout, Measured, compare, make_family, reference
from verl.model.heads import Head
from verl.model.load import read_config
from verl.parallel.support import unsupported

LAYOUTS: tuple[Layout, ...] = (
    (1, 1, 1), (1, 2, 1), (1, 4, 1), (1, 1, 2), (1, 1, 4), (1, 2, 2),
    (2, 1, 1), (4, 1, 1), (2, 2, 1), (2, 1, 2), (2, 2, 2),
    (1, 1, 1, 2), (1, 2, 1, 2), (1, 1, 2, 2), (2, 1, 1, 2),
)  # fmt: skip
HEADS = {Head.lm: "actor", Head.token_value: "critic"}
NUM_LAYERS = 4
LOSS, GRADIENT, OUTPUTS = 1e-6, 1e-5, 1e-5
OUT = Path(__file__).parents[1] / "docs" / "parity.md"
ABOUT = f"""# Parity

Written by `make parity` with torch {torch.__version__} and transformers {transformers.__version__}. Every row is a
model family as a tiny random model ({NUM_LAYERS} layers, float32), every column a layout of CPU ranks over gloo:
pipeline stages x data-parallel ranks (FSDP) x tensor-parallel ranks, and x context-parallel ranks where there are four
numbers. Each cell trains one mini-batch of twelve ragged sequences, packed into micro-batches of at most 40 tokens, and
holds it against plain Hugging Face in one process: one sequence at a time, eager attention, whole logits, autograd. The
actor's loss is PPO's clipped objective with an entropy bonus at temperature 0.8, the critic's a squared error. In one
of a family's two rows, by turns, activations are recomputed and parameters gathered again in the backward pass.

A cell is the largest error of a gradient: max |a - b| / max |b| of the worst parameter. For every cell the loss is
within {LOSS:g}, log-probs, entropies and values within {OUTPUTS:g}, gradients and their norm within {GRADIENT:g}, and
the outputs of tensor- and context-parallel ranks are the same bits. `-`: refused by name before a model is loaded (see
[parallelism.md](parallelism.md)).
"""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="+", choices=sorted(FAMILIES), default=list(FAMILIES))
    parser.add_argument("--layouts", nargs="+", type=_layout, default=list(LAYOUTS), metavar="PP,DP,TP[,CP]")
    parser.add_argument("--out", type=Path, default=OUT)
    arguments = parser.parse_args(argv)
    transformers.utils.logging.disable_progress_bar()
    cases = {
        (family, head): Case(family, head, frugal=(i + j) % 2 == 1)
        for i, family in enumerate(arguments.families)
        for j, head in enumerate(HEADS)
    }
    found: dict[Layout, dict[Case, Errors]] = {}
    with tempfile.TemporaryDirectory() as folder:
        folders = {family: make_family(Path(folder), family, NUM_LAYERS) for family in arguments.families}
        references = {case: reference(case, folders[case.family]) for case in cases.values()}
        for layout in arguments.layouts:
            found[layout] = _measure(layout, list(cases.values()), folders, references)
            arguments.out.write_text(f"{ABOUT}\n{_table(cases, found)}")  # after each, since they take minutes
    bad = [
        f"{case.family}, {HEADS[case.head]}, on {_title(layout)}: {errors}"
        for layout, by_case in found.items()
        for case, errors in by_case.items()
        if not _within(errors)
    ]
    print("\n".join(bad) or f"all within tolerance; see {arguments.out}")
    return 1 if bad else 0


def _layout(text: str) -> Layout:
    layout = tuple(int(size) for size in text.split(","))
    if len(layout) not in (3, 4):
        raise argparse.ArgumentTypeError(f"{text}: needs three or four sizes, for example 1,2,2")
    return layout


def _measure(
    layout: Layout, cases: Sequence[Case], folders: Mapping[str, Path], references: Mapping[Case, Measured]
) -> dict[Case, Errors]:
    pp, _, tp, cp = (*layout, 1)[:4]
    possible = [case for case in cases if not unsupported(read_config(folders[case.family], False), tp, pp, cp)]
    found = compare(layout, possible, folders, references, timeout=3600.0)
    worst = max((errors.gradient for errors in found.values()), default=0.0)
    print(f"{_title(layout)}: {len(found)} of {len(cases)} cases, gradients within {worst:.1e}", flush=True)
    return found


def _within(errors: Errors) -> bool:
    return (
        errors.loss <= LOSS
        and errors.gradient <= GRADIENT
        and errors.norm <= GRADIENT
        and errors.outputs <= OUTPUTS
        and errors.disagreement == 0.0
    )


def _title(layout: Layout) -> str:
    return " x ".join(str(size) for size in layout)


def _table(cases: Mapping[tuple[str, Head], Case], found: Mapping[Layout, Mapping[Case, Errors]]) -> str:
    lines = [
        "| family | role | " + " | ".join(_title(layout) for layout in found) + " |",
        "|---|---|" + "---|" * len(found),
    ]
    for (family, head), case in cases.items():
        cells = (f"{by_case[case].gradient:.1e}" if case in by_case else "-" for by_case in found.values())
        lines.append(f"| {family} | {HEADS[head]} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
