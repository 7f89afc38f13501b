"""Named statistics that merge: over micro-batches, over ranks and over roles, always to the figure of the whole."""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import reduce

import torch
from torch import Tensor

SUM, WEIGHT, MAX, MIN = range(4)


class Metrics:
    """Statistics by name. A name used again, here or in what is merged in, adds to the same statistic.

    Each is one float64 row [sum of weight * value, sum of weights, max, min] that stays on the device of its values, so
    recording does not wait for the device; only `to_json` and `result` do. What has no weight is not there.
    """

    def __init__(self) -> None:
        self._rows: dict[str, tuple[str, Tensor]] = {}

    def mean(self, name: str, values: Tensor | float, weights: Tensor | float | None = None) -> None:
        """The mean of `values`, of any shape, by `weights` >= 0 that broadcast to it. Weight 0 leaves no trace."""
        self._add(name, "mean", values, weights)

    def spread(self, name: str, values: Tensor | float, weights: Tensor | float | None = None) -> None:
        """Mean, largest and smallest of the values that have weight: name/mean, name/max, name/min."""
        self._add(name, "spread", values, weights)

    def total(self, name: str, x: Tensor | float) -> None:
        """The sum. Ranks that hold copies of the same rows must not all add theirs."""
        self._add(name, "total", x)

    def max(self, name: str, x: Tensor | float) -> None:
        """The largest; NaN if any is NaN."""
        self._add(name, "max", x)

    def last(self, name: str, x: float) -> None:
        """The value given last, and of merged ones the rightmost: for what is the same on all, as a learning rate."""
        self._add(name, "last", x)

    def __or__(self, other: Metrics) -> Metrics:
        return Metrics.merge([self, other])

    @staticmethod
    def merge(parts: Iterable[Metrics]) -> Metrics:
        """All parts as one, added up in the order given: merge in rank order for the same bits on every run."""
        return reduce(Metrics._absorb, parts, Metrics())

    def result(self) -> dict[str, float]:
        """The figures, sorted by name."""
        figures: dict[str, float] = {}
        for name, (kind, row) in self._filled().items():
            if kind == "mean":
                figures[name] = row[SUM] / row[WEIGHT]
            elif kind == "total":
                figures[name] = row[SUM]
            elif kind == "spread":
                figures |= {f"{name}/mean": row[SUM] / row[WEIGHT], f"{name}/max": row[MAX], f"{name}/min": row[MIN]}
            else:
                figures[name] = row[MAX]
        return dict(sorted(figures.items()))

    def to_json(self) -> bytes:
        """As bytes for other ranks. Floats come back bit for bit; NaN and infinities are spelt Python's way."""
        return json.dumps(self._filled()).encode()

    @staticmethod
    def from_json(raw: bytes) -> Metrics:
        metrics = Metrics()
        for name, (kind, row) in json.loads(raw).items():
            metrics._put(name, kind, torch.tensor(row, dtype=torch.float64))
        return metrics

    def _filled(self) -> dict[str, tuple[str, list[float]]]:
        rows = {name: (kind, row.tolist()) for name, (kind, row) in self._rows.items()}
        return {name: (kind, row) for name, (kind, row) in rows.items() if row[WEIGHT] != 0}

    def _add(self, name: str, kind: str, values: Tensor | float, weights: Tensor | float | None = None) -> None:
        x = torch.as_tensor(values, dtype=torch.float64).detach()
        w = torch.as_tensor(1.0 if weights is None else weights, dtype=torch.float64, device=x.device).expand_as(x)
        if not x.numel():
            return
        kept = w != 0
        # selected, not multiplied: 0 * NaN is NaN
        total = torch.where(kept, x * w, 0.0).sum()
        largest, smallest = torch.where(kept, x, -torch.inf).max(), torch.where(kept, x, torch.inf).min()
        self._put(name, kind, torch.stack([total, w.sum(), largest, smallest]))

    def _absorb(self, other: Metrics) -> Metrics:
        for name, (kind, row) in other._rows.items():
            self._put(name, kind, row)
        return self

    def _put(self, name: str, kind: str, row: Tensor) -> None:
        if name in self._rows:
            there, before = self._rows[name]
            assert there == kind, f"metric {name} is recorded as {there} and as {kind}"
            row = row if kind == "last" else _combined(before, row)
        self._rows[name] = (kind, row)


def _combined(a: Tensor, b: Tensor) -> Tensor:
    # towards the accelerator: the other way would wait for it
    device = b.device if a.device.type == "cpu" else a.device
    a, b = a.to(device), b.to(device)
    return torch.cat([a[:MAX] + b[:MAX], torch.maximum(a, b)[MAX:MIN], torch.minimum(a, b)[MIN:]])
