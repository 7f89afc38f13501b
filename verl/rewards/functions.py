"""The built-in reward functions.

All have the signature of a user's function: `compute_score(data_source, solution_str, ground_truth, extra_info=None)`,
with `solution_str` the response's text without the prompt, and give 1.0 for a right answer, 0.0 for another one. They
raise `ValueError` for a ground truth that they cannot compare with: that is a fault of the data, not of the response.
"""

from __future__ import annotations

import json
import re
from decimal import Decimal
from functools import cache
from typing import Any

from verl.rewards.latex import boxed_answer, normalize_answer

# A number, possibly with thousands separators. A minus (or U+2212) is a sign only where no number or word stands before
# it, and a leading point is a decimal point only where none stands before it: "5-3", "f(x)-1" and "...7" hold no -3, -1
# and .7.
NUMBER = re.compile(
    r"(?:(?<![\w.)\]}])[-\u2212])?(?:\d{1,3}(?:,\d{3})+(?!\d)(?:\.\d+)?|\d+(?:\.\d+)?|(?<![\w.])\.\d+)", re.ASCII
)
GSM8K_ANSWER = re.compile(r"####\s*(?:\$\s*)?(" + NUMBER.pattern + r")", re.ASCII)


def last_number(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None = None
) -> float:
    """1.0 if the last number of the text equals the ground truth as a number: 1,000 = 1000.0."""
    truth = _number_of(ground_truth)
    numbers = NUMBER.findall(solution_str)
    return float(bool(numbers) and _decimal(numbers[-1]) == truth)


def exact_match(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None = None
) -> float:
    """1.0 if the whole text is the ground truth, white space at both ends aside."""
    if not isinstance(ground_truth, str | int | float):
        raise ValueError(f"exact_match compares with a string or a number, not {type(ground_truth).__name__}")
    return float(solution_str.strip() == str(ground_truth).strip())


def gsm8k(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,
    strict: bool = False,
) -> float:
    """1.0 if the answer equals the ground truth as a number.

    The answer is the number after the last `####`, the mark of GSM8K's own solutions (Cobbe et al. 2021); where there
    is none, the last number of the text, unless `strict`.
    """
    truth = _number_of(ground_truth)
    marked = GSM8K_ANSWER.findall(solution_str)
    if marked:
        return float(_decimal(marked[-1]) == truth)
    return 0.0 if strict else last_number(data_source, solution_str, ground_truth)


def math(data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None = None) -> float:
    r"""1.0 if the content of the last `\boxed{...}` equals the ground truth after both are brought to one notation.

    The notation is that of the MATH data set (Hendrycks et al. 2021); `normalize_answer` says what is alike. The
    ground truth is an answer, or a whole solution with a `\boxed{...}` of its own.
    """
    if not isinstance(ground_truth, str | int | float):
        raise ValueError(f"math compares with a string or a number, not {type(ground_truth).__name__}")
    truth = str(ground_truth)
    boxed_truth = boxed_answer(truth)
    answer = boxed_answer(solution_str)
    if answer is None:
        return 0.0
    return float(normalize_answer(answer) == normalize_answer(truth if boxed_truth is None else boxed_truth))


def reasoning_gym(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None = None
) -> dict[str, float]:
    """The score, from 0 to 1, that the task's own scorer in Reasoning Gym gives.

    `extra_info["entry"]` is the entry of the task's data set, as a mapping or as JSON (parquet cannot hold entries of
    different tasks in one column otherwise). The answer is what the last `<answer>...</answer>` holds, or the whole
    text. Some scorers raise on answers that they cannot parse: that is 0.0, counted in `scorer_raised`. A scorer has
    its data set's default settings.
    """
    from reasoning_gym.utils import extract_answer

    task, entry = _entry_of(extra_info)
    score_answer = _reasoning_gym_scorer(task)
    answer = extract_answer(solution_str)
    try:
        score = score_answer(solution_str.strip() if answer is None else answer, entry)
    except Exception:  # whatever a scorer makes of a wrong answer, the answer is wrong
        return {"score": 0.0, "scorer_raised": 1.0}
    return {"score": float(score), "scorer_raised": 0.0}


@cache
def _reasoning_gym_scorer(task: str) -> Any:
    from reasoning_gym import get_score_answer_fn

    return get_score_answer_fn(task)


def _entry_of(extra_info: dict[str, Any] | None) -> tuple[str, dict[str, Any]]:
    entry = (extra_info or {}).get("entry")
    if isinstance(entry, str):
        entry = json.loads(entry)
    match entry:
        case {"answer": _, "metadata": {"source_dataset": str(task)}}:
            return task, entry
    raise ValueError(
        "extra_info['entry'] must be an entry of a Reasoning Gym data set, with 'question', 'answer' and "
        f"'metadata.source_dataset', as a mapping or as JSON; it is {entry!r}"
    )


def _number_of(ground_truth: Any) -> Decimal:
    text = str(ground_truth).strip()
    if isinstance(ground_truth, bool) or not NUMBER.fullmatch(text):
        raise ValueError(f"the ground truth {ground_truth!r} is not a number; name another reward.function.path")
    return _decimal(text)


def _decimal(number: str) -> Decimal:
    return Decimal(number.replace(",", "").replace("\u2212", "-"))
