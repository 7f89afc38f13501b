"""Which built-in reward function scores which data source."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable
from typing import Any

from verl.errors import UserError
from verl.rewards.functions import exact_match, gsm8k, last_number, math, reasoning_gym

BUILT_IN: dict[str, Callable[..., Any]] = {
    "last_number": last_number,
    "exact_match": exact_match,
    "gsm8k": gsm8k,
    "math": math,
    "reasoning_gym": reasoning_gym,
}
"""By name. Each name is also a data source that the function of that name scores."""

BY_DATA_SOURCE: dict[str, Callable[..., Any]] = BUILT_IN | {
    "openai/gsm8k": gsm8k,
    "lighteval/MATH": math,
    "DigitalLearningGmbH/MATH-lighteval": math,
    "HuggingFaceH4/MATH-500": math,
}
"""What `auto` looks up. Besides these, `reasoning_gym/TASK` is scored by `reasoning_gym`."""


def auto(data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None = None) -> Any:
    """The score by the built-in function of the data source."""
    function = function_for(data_source)
    return function(
        data_source=data_source, solution_str=solution_str, ground_truth=ground_truth, extra_info=extra_info
    )


def function_for(data_source: str) -> Callable[..., Any]:
    """The built-in function of a data source. Raises `ValueError` if there is none."""
    if data_source.startswith("reasoning_gym/"):
        return reasoning_gym
    if data_source not in BY_DATA_SOURCE:
        raise UserError(
            f"No built-in reward function scores the data source {data_source!r}; those known are "
            f"{', '.join(sorted(BY_DATA_SOURCE))} and reasoning_gym/TASK. Set reward.function.path to a built-in name "
            f"({', '.join(sorted(BUILT_IN))}) or to a function of your own, file.py:name or package.module:name "
            "(docs/rewards.md)."
        )
    return BY_DATA_SOURCE[data_source]


def check_data_sources(path: str | None, data_sources: Iterable[str]) -> None:
    """Raises `ValueError` if `reward.function.path` is `auto` and cannot score one of the data sources here."""
    if path != "auto":
        return
    functions = [function_for(source) for source in data_sources]
    if reasoning_gym in functions:
        require_reasoning_gym()


def require_reasoning_gym() -> None:
    if importlib.util.find_spec("reasoning_gym") is None:
        raise UserError("The reward function reasoning_gym needs a package: pip install reasoning-gym")
