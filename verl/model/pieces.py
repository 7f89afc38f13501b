"""How a parameter is kept in a model's folder: under its own name, but for experts, which files hold one by one."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import torch

Box = tuple[slice, ...]
"""Part of a tensor: a slice for each dimension."""

EXPERTS = ("qwen3_moe",)
"""Model types with experts whose files are those described here."""
_EXPERTS = re.compile(r"(?P<layer>.+\.mlp\.experts)\.(?P<kind>gate_up_proj|down_proj)")


@dataclass(frozen=True)
class Piece:
    """A tensor of a model's files, or a part of one."""

    name: str
    box: Box
    """Which part of the file's tensor it is."""
    index: tuple[slice | int, ...]
    """Where it is in the tensor at hand: a parameter or a rank's shard of one."""


def pieces(name: str, shape: torch.Size | tuple[int, ...], box: Box | None = None) -> Iterator[Piece]:
    """What lies in `box` of the parameter (None: all of it), and where. `shape`: of the whole parameter."""
    box = tuple(slice(0, size) for size in shape) if box is None else box
    found = _EXPERTS.fullmatch(name)
    if found is None or len(shape) != 3:
        yield Piece(name, box, tuple(slice(0, side.stop - side.start) for side in box))
        return
    # [experts, out, in]; gate and up projection stand one behind the other in `out`
    kinds = ["gate_proj", "up_proj"] if found["kind"] == "gate_up_proj" else ["down_proj"]
    rows = shape[1] // len(kinds)
    experts, out, inputs = box
    for expert in range(experts.start, experts.stop):
        for number, kind in enumerate(kinds):
            low, high = max(out.start, number * rows), min(out.stop, (number + 1) * rows)
            if low < high:
                yield Piece(
                    f"{found['layer']}.{expert}.{kind}.weight",
                    (slice(low - number * rows, high - number * rows), inputs),
                    (
                        expert - experts.start,
                        slice(low - out.start, high - out.start),
                        slice(0, inputs.stop - inputs.start),
                    ),
                )


def size_of(box: Box) -> tuple[int, ...]:
    return tuple(side.stop - side.start for side in box)
