"""The inputs that every oracle is asked about, and the files that hold them and the answers.

`python scripts/oracles/cases.py` writes the inputs. They are kept as a file, whose hash says which inputs an answer is
for.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

SEED = 20240607
FOLDER = Path(__file__).resolve().parents[2] / "tests" / "parity" / "expected"
INPUTS = FOLDER / "cases.json"


@dataclass(frozen=True)
class Case:
    """Token columns are float64 [rows, time], 0 at masked places; mask is bool; scores are float64 [rows]."""

    name: str
    settings: dict[str, Any]
    columns: dict[str, Tensor]

    def __getitem__(self, column: str) -> Tensor:
        return self.columns[column]

    @property
    def right_padded(self) -> bool:
        """No masked place stands before a trainable one."""
        mask = self["mask"].long()
        return bool((mask.diff(dim=1) <= 0).all())

    @property
    def all_scored(self) -> bool:
        return not bool(self["scores"].isnan().any())


DEFAULTS: dict[str, Any] = {
    "group_size": 4,
    "gamma": 1.0,
    "lam": 0.95,
    "clip_low": 0.2,
    "clip_high": 0.2,
    "clip_c": 3.0,
    "clip_value": 0.20005,  # off the grid of the inputs: on the very edge of a clip, two gradients are as good
    "mismatch_cap": 2.0,
    "kl_coef": 0.05,
    "target_kl": 6.0,
    "horizon": 1000,
}


def generate() -> dict[str, Any]:
    uniform = random.Random(SEED).uniform
    ragged = [12, 7, 3, 12, 9, 1, 5, 10]
    gaps = ["1110011100", "0011110111", "1111111111", "0100010001"]
    scores = [round(uniform(-2, 2), 4) for _ in range(8)]
    equal = [1.0, 1.0, 1.0, 1.0, -0.7, -0.7, -0.7, -0.7]
    missing = [1.0, None, 3.0, 0.5, *scores[4:7], None]
    return {
        "ragged": _case(uniform, _right_padded(ragged), scores, gamma=0.99),
        "gaps": _case(uniform, [[int(c) for c in row] for row in gaps], scores[:4], gamma=0.9, lam=0.8, group_size=2),
        "single_tokens": _case(uniform, _right_padded([1] * 8), scores),
        "long": _case(uniform, _right_padded([160, 97]), scores[:2], gamma=0.999, group_size=2),
        "on_policy_equal_scores": _case(uniform, _right_padded([4, 2, 3, 4, 1, 4, 2, 2]), equal, apart=0.0),
        "far_off_policy": _case(uniform, _right_padded(ragged), scores, apart=4.0, clip_high=0.28, lam=1.0),
        "missing_scores": _case(uniform, _right_padded([2] * 8), missing),
    }


def _case(
    uniform: Callable[[float, float], float],
    mask: list[list[int]],
    scores: Sequence[float | None],
    apart: float = 0.6,
    **settings: Any,
) -> dict[str, Any]:
    """`apart`: the largest difference of the current and the old log-probs."""

    def draw(low: float, high: float) -> list[list[float]]:
        return [[round(uniform(low, high), 4) if trainable else 0.0 for trainable in row] for row in mask]

    def near(column: list[list[float]], by: float) -> list[list[float]]:
        return [
            [round(x + uniform(-by, by), 4) if trainable else 0.0 for x, trainable in zip(xs, row, strict=True)]
            for xs, row in zip(column, mask, strict=True)
        ]

    old_logprobs, values = draw(-5, -0.1), draw(-2, 2)
    logprobs = near(old_logprobs, apart)
    return {
        "settings": DEFAULTS | settings,
        "kl_updates": [[round(uniform(0, 12), 3), 8 * (i + 1)] for i in range(6)],
        "mask": mask,
        "rewards": draw(-1, 1),
        "values": values,
        "new_values": near(values, 0.5),
        "returns": near(values, 1.0),
        "old_logprobs": old_logprobs,
        "logprobs": logprobs,
        "ref_logprobs": near(logprobs, 1.0),  # near enough for the libraries that clamp KL estimates at 10
        "rollout_logprobs": near(old_logprobs, 1.2),
        "advantages": draw(-2, 2),
        "scores": scores,
    }


def _right_padded(lengths: list[int]) -> list[list[int]]:
    return [[int(t < length) for t in range(max(lengths))] for length in lengths]


def load() -> list[Case]:
    cases = json.loads(INPUTS.read_text())["cases"]
    return [
        Case(name, case.pop("settings"), {column: _tensor(column, values) for column, values in case.items()})
        for name, case in cases.items()
    ]


def _tensor(column: str, values: list[Any]) -> Tensor:
    if column == "scores":
        values = [math.nan if score is None else score for score in values]
    return torch.tensor(values, dtype=torch.bool if column == "mask" else torch.float64)


def write_expected(library: str, oracle: Callable[[Case], dict[str, Tensor | float]]) -> None:
    """Asks the oracle about every case and writes tests/parity/expected/LIBRARY.json."""
    torch.set_default_dtype(torch.float64)  # libraries make constants in it, and float32 ones would be 1e-8 to 1e-7 off
    data = {
        "library": library,
        "version": version(library),
        "torch": version("torch"),
        "seed": SEED,
        "cases_sha256": hashlib.sha256(INPUTS.read_bytes()).hexdigest(),
        "expected": {case.name: {name: _plain(x) for name, x in oracle(case).items()} for case in load()},
    }
    _write(FOLDER / f"{library}.json", data)
    print(f"{library} {data['version']}: {sum(map(len, data['expected'].values()))} answers")


def _plain(x: Tensor | float) -> Any:
    return x.detach().double().tolist() if isinstance(x, Tensor) else float(x)


def _write(path: Path, data: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(_readable(data) + "\n")


def _readable(data: Any, indent: str = "") -> str:
    """JSON with one line for each row of numbers. NaN, which JSON lacks, has no place in it."""
    deeper = indent + "  "
    if isinstance(data, dict):
        inner = ",\n".join(f"{deeper}{json.dumps(key)}: {_readable(value, deeper)}" for key, value in data.items())
        return f"{{\n{inner}\n{indent}}}"
    if isinstance(data, list) and data and isinstance(data[0], list):
        return "[\n" + ",\n".join(deeper + json.dumps(row, allow_nan=False) for row in data) + f"\n{indent}]"
    return json.dumps(data, allow_nan=False)


if __name__ == "__main__":
    _write(INPUTS, {"seed": SEED, "cases": generate()})
    print(f"{len(load())} cases")
