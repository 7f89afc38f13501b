"""The built-in reward functions, on responses written by hand."""

from __future__ import annotations

import json
import time
from importlib.util import find_spec
from typing import Any

import pytest

from verl.rewards.auto import BUILT_IN, auto, check_data_sources, function_for
from verl.rewards.functions import exact_match, gsm8k, last_number, math, reasoning_gym
from verl.rewards.latex import boxed_answer, normalize_answer

LONG = 1_000_000


@pytest.mark.parametrize(
    ("text", "truth", "score"),
    [
        ("The answer is 16.", "16", 1.0),
        ("16 is what 4 x 4 gives, and not 17", "16", 0.0),
        ("no number", "16", 0.0),
        ("", "16", 0.0),
        ("It costs $1,234.50", "1234.5", 1.0),
        ("1,234", 1234, 1.0),
        ("7.0", "7", 1.0),
        ("7.01", "7", 0.0),
        ("-3", "-3", 1.0),
        ("\u22123", -3, 1.0),  # a typographic minus
        ("it is -3", "3", 0.0),
        ("8-3", "3", 1.0),  # a difference, not the number -3
        ("f(8)-3", "3", 1.0),
        ("between 5\u201310", "10", 1.0),  # an en dash
        ("so ...5", "5", 1.0),  # dots before it are no decimal point
        (" .5", "0.5", 1.0),
        ("1,2,3", "3", 1.0),
        ("10,0000", "0", 1.0),  # no thousands separator
        ("10", "100", 0.0),
        ("0016", "16", 1.0),
        ("9" * 5000, "9" * 5000, 1.0),
        ("9" * 5000, "9" * 4999 + "8", 0.0),
    ],
)
def test_last_number(text: str, truth: Any, score: float) -> None:
    assert last_number("x", text, truth) == score


@pytest.mark.parametrize("truth", ["sixteen", "", None, True, ["16"], "1 2"])
def test_last_number_needs_a_number_to_compare_with(truth: Any) -> None:
    with pytest.raises(ValueError, match="is not a number"):
        last_number("x", "16", truth)


@pytest.mark.parametrize(
    ("text", "truth", "score"),
    [(" Paris\n", "Paris", 1.0), ("paris", "Paris", 0.0), ("It is Paris", "Paris", 0.0), ("4", 4, 1.0), ("", "", 1.0)],
)
def test_exact_match(text: str, truth: Any, score: float) -> None:
    assert exact_match("x", text, truth) == score


@pytest.mark.parametrize("function", [exact_match, math])
def test_a_ground_truth_that_is_no_text(function: Any) -> None:
    with pytest.raises(ValueError, match="not list"):
        function("x", "a", ["a"])


@pytest.mark.parametrize(
    ("text", "score", "strict_score"),
    [
        ("2 + 2 = 4\n#### 4", 1.0, 1.0),
        ("#### 3\nno, #### 4", 1.0, 1.0),
        ("#### 4\nThat was 2 + 2 = 5", 1.0, 1.0),
        ("#### $ 4.00", 1.0, 1.0),
        ("#### 5\nThat is 4", 0.0, 0.0),
        ("The answer is 4", 1.0, 0.0),
        ("#### four, 4", 1.0, 0.0),
        ("####", 0.0, 0.0),
    ],
)
def test_gsm8k(text: str, score: float, strict_score: float) -> None:
    assert gsm8k("openai/gsm8k", text, "4") == score
    assert gsm8k("openai/gsm8k", text, "4", strict=True) == strict_score


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"first \boxed{1}, then \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"\boxed {7}", "7"),
        (r"\fbox{3}", "3"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{a \boxed{b}}", "b"),
        (r"{ \boxed{5}", "5"),
        (r"} \boxed{5}", "5"),
        (r"\boxed{1} and \boxed{2", "1"),
        (r"\boxed{", None),
        ("5", None),
    ],
)
def test_boxed_answer(text: str, answer: str | None) -> None:
    assert boxed_answer(text) == answer


@pytest.mark.parametrize(
    "alike",
    [
        [r"\frac{1}{2}", r"\frac12", r"\dfrac{1}{2}", r"\tfrac{2}{4}", "1/2", "0.5", ".5", "0.50", r"\frac 1 2"],
        [r"-\frac{1}{2}", r"\frac{-1}{2}", "-1/2", "-0.5", "\u22120.5"],
        ["1234", "1,234", "1234.", r"1\,234", "$1234$", r"\$1234", "x=1234", r"1234\text{ cm}", r"1234 \mbox{ apples}"],
        ["50", r"50\%", "50%", r"50^\circ", r"50^{\circ}", "50°"],
        [r"\sqrt3", r"\sqrt{3}"],
        [r"\left(3, \frac{\pi}{2}\right)", r"(3,\frac{\pi}{2})", r"( 3,\;\dfrac{\pi}{2} )"],
        [r"\text{Evelyn}", "Evelyn", r"\textbf{Evelyn}"],
        [r"\text{(A)}", "(A)"],
    ],
)
def test_notations_that_mean_the_same(alike: list[str]) -> None:
    assert {normalize_answer(answer) for answer in alike} == {normalize_answer(alike[0])}


def test_answers_that_differ() -> None:
    answers = [
        "1",
        "-1",
        "10",
        "1/3",
        r"\frac{1}{0}",
        "0.333",
        "x",
        "2x",
        r"3\frac{1}{2}",
        "31/2",
        "(1,2)",
        "12",
        "",
        ".",
    ]
    assert len({normalize_answer(answer) for answer in answers}) == len(answers) - 1  # "." is an empty answer


@pytest.mark.parametrize(
    ("text", "truth", "score"),
    [
        (r"Hence \boxed{\dfrac{3}{4}}.", r"\frac{3}{4}", 1.0),
        (r"\boxed{0.75}", r"So it is $\boxed{\frac34}$.", 1.0),  # a whole solution as the ground truth
        (r"\boxed{7}", 7, 1.0),
        (r"\boxed{2+2}", "4", 0.0),  # nothing is computed
        ("7", "7", 0.0),
    ],
)
def test_math(text: str, truth: Any, score: float) -> None:
    assert math("lighteval/MATH", text, truth) == score


@pytest.mark.parametrize(
    "text",
    [
        "1" * LONG,
        "1," * (LONG // 2),
        "111," * (LONG // 4) + "1111",
        "####" + " " * LONG,
        "#### " * (LONG // 5),
        "\\boxed{" * (LONG // 7),
        "\\boxed{" * (LONG // 7) + "1}",
        "{" * LONG,
        "\\boxed{" + " " * LONG + "x}",
        "\\boxed{" + "\\text{ " * (LONG // 7) + "}" * (LONG // 7) + "}",
        "\\boxed{" + "\\frac{1}" * (LONG // 8) + "}",
        "\\boxed{" + "1," * (LONG // 2) + "}",
        "-." * (LONG // 2),
    ],
    ids=range(13),
)
def test_no_text_takes_for_ever(text: str) -> None:
    """A megabyte a function; what grows with the square of the length would take hours."""
    start = time.process_time()
    for function in (last_number, gsm8k, math, exact_match):
        assert function("x", text, "7") == 0.0
    assert time.process_time() - start < 20


CHAIN_SUM = {
    "question": "5 + 3 =",
    "answer": "8",
    "metadata": {"source_dataset": "chain_sum", "source_index": 0},
}


@pytest.mark.skipif(find_spec("reasoning_gym") is None, reason="the demo extra is not installed")
class TestReasoningGym:
    @pytest.mark.parametrize("entry", [CHAIN_SUM, json.dumps(CHAIN_SUM)], ids=["mapping", "json"])
    @pytest.mark.parametrize(
        ("text", "score"), [("8", 1.0), (" 8\n", 1.0), ("5 + 3 is <answer> 8 </answer>", 1.0), ("7", 0.0), ("", 0.0)]
    )
    def test_the_tasks_own_scorer(self, entry: Any, text: str, score: float) -> None:
        assert reasoning_gym("reasoning_gym/chain_sum", text, "8", {"entry": entry}) == {
            "score": score,
            "scorer_raised": 0.0,
        }

    def test_a_scorer_that_raises_on_an_answer(self) -> None:
        entry = {"answer": "2 × 3", "metadata": {"source_dataset": "prime_factorization", "number": 6}}  # noqa: RUF001
        result = reasoning_gym("reasoning_gym/prime_factorization", "two times three", None, {"entry": entry})
        assert result == {"score": 0.0, "scorer_raised": 1.0}

    @pytest.mark.parametrize("extra_info", [None, {}, {"entry": {}}, {"entry": "[]"}, {"entry": {"answer": "8"}}])
    def test_an_entry_that_is_none(self, extra_info: Any) -> None:
        with pytest.raises(ValueError, match=r"extra_info\['entry'\] must be an entry of a Reasoning Gym data set"):
            reasoning_gym("reasoning_gym/chain_sum", "8", "8", extra_info)


def test_auto_chooses_by_data_source() -> None:
    assert function_for("openai/gsm8k") is gsm8k
    assert function_for("lighteval/MATH") is math
    assert function_for("reasoning_gym/chain_sum") is reasoning_gym
    for name, function in BUILT_IN.items():
        assert function_for(name) is function
    assert auto("openai/gsm8k", "#### 4", "4") == 1.0
    assert auto("exact_match", "#### 4", "4") == 0.0


def test_auto_knows_its_limits() -> None:
    with pytest.raises(ValueError, match=r"'my/data'; those known are .*openai/gsm8k.*reward\.function\.path") as error:
        check_data_sources("auto", ["openai/gsm8k", "my/data"])
    assert "file.py:name" in str(error.value)
    check_data_sources("auto", ["openai/gsm8k", "lighteval/MATH"])
    check_data_sources("last_number", ["my/data"])
    check_data_sources(None, ["my/data"])
