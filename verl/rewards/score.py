"""A response to be scored, its score, and the error that a failing reward function ends the run with."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

SHOWN_CHARACTERS = 200
"""Of a response or a ground truth, in messages."""


class RewardError(RuntimeError):
    """The reward function failed on a sample, or its workers cannot run. The message names the sample."""


class Status(StrEnum):
    ok = "ok"
    timeout = "timeout"
    error = "error"


@dataclass(frozen=True)
class Score:
    row: int
    """The sample's row in the step's global order."""
    score: float
    """The function's score, or the failure score."""
    extra: dict[str, float]
    """The other finite numbers of the dict that the function returned."""
    status: Status
    problem: str = ""
    """What went wrong, with the function's traceback; empty for `ok`."""


@dataclass(frozen=True)
class Sample:
    row: int
    data_source: str
    solution_str: str
    """The response's text, without the prompt."""
    ground_truth: Any
    extra_info: dict[str, Any]

    @property
    def arguments(self) -> dict[str, Any]:
        """What the reward function is called with, by keyword."""
        return {
            "data_source": self.data_source,
            "solution_str": self.solution_str,
            "ground_truth": self.ground_truth,
            "extra_info": self.extra_info,
        }

    def __str__(self) -> str:
        truth, response = _clip(repr(self.ground_truth)), _clip(repr(self.solution_str))
        return f"sample of row {self.row} (data source {self.data_source!r}, ground truth {truth}, response {response})"


def _clip(text: str) -> str:
    return text if len(text) <= SHOWN_CHARACTERS else text[:SHOWN_CHARACTERS] + "..."
