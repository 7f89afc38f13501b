"""What a row must hold, and what is said of one that does not."""

from __future__ import annotations

from typing import Any

import pytest

from verl.data.rows import UNNAMED_SOURCE, RowError, parse_row

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1 + 1?"}]


def raw(**changes: Any) -> dict[str, Any]:
    row = {
        "data_source": "openai/gsm8k",
        "prompt": MESSAGES,
        "reward_model": {"style": "rule", "ground_truth": "2"},
        "extra_info": {"split": "train", "index": 7},
    }
    return row | changes


def test_a_row_of_verls_format() -> None:
    row = parse_row(raw(ability="math"), "prompt", needs_ground_truth=True)
    assert (row.prompt, row.data_source, row.ground_truth) == (MESSAGES, "openai/gsm8k", "2")
    assert row.extra_info == {"split": "train", "index": 7}


def test_a_plain_string_and_another_key() -> None:
    row = parse_row(raw(prompt=None, question="1 + 1 ="), "question", needs_ground_truth=True)
    assert row.prompt == "1 + 1 ="


def test_fields_that_parquet_adds_to_a_message_are_dropped() -> None:
    row = parse_row(raw(prompt=[{"role": "user", "content": "hi", "name": None}]), "prompt", needs_ground_truth=True)
    assert row.prompt == [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize("truth", ["", 0, False, [], {"answers": ["a"]}, 2.5])
def test_a_ground_truth_is_any_value(truth: Any) -> None:
    assert parse_row(raw(reward_model={"ground_truth": truth}), "prompt", needs_ground_truth=True).ground_truth == truth


def test_without_a_reward_function_a_prompt_is_enough() -> None:
    row = parse_row({"prompt": "hi"}, "prompt", needs_ground_truth=False)
    assert (row.data_source, row.ground_truth, row.extra_info) == (UNNAMED_SOURCE, None, {})


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"prompt": None}, "no 'prompt'; the row has 'data_source', 'reward_model', 'extra_info'"),
        ({"prompt": ""}, "'prompt' is empty"),
        ({"prompt": " \n"}, "'prompt' is empty"),
        ({"prompt": []}, "'prompt' is empty"),
        ({"prompt": [{"role": "user", "content": " "}]}, "'prompt' is empty"),
        ({"prompt": 3}, "'prompt' is int 3"),
        ({"prompt": {"role": "user", "content": "x"}}, "'prompt' is dict"),
        ({"prompt": ["hi"]}, r"prompt\[0\] is str 'hi', not a message"),
        ({"prompt": [*MESSAGES, {"content": "x"}]}, r"prompt\[2\] has no 'role'; it has 'content'"),
        ({"prompt": [{"role": "user"}]}, r"prompt\[0\] has no 'content'"),
        ({"prompt": [{"role": "user", "content": None}]}, r"prompt\[0\] has no 'content'"),
        ({"prompt": [{"role": " ", "content": "x"}]}, r"prompt\[0\].role is empty"),
        ({"prompt": [{"role": "user", "content": [{"type": "image"}]}]}, r"prompt\[0\].content is list .* only text"),
        ({"data_source": None}, "no 'data_source'"),
        ({"data_source": 3}, "'data_source' is int 3"),
        ({"data_source": ""}, "'data_source' is str ''"),
        ({"reward_model": None}, "no 'reward_model' with a 'ground_truth'"),
        ({"reward_model": "2"}, "'reward_model' is str '2', not a mapping"),
        ({"reward_model": {"style": "rule"}}, "no 'ground_truth' in 'reward_model'; it has 'style'"),
        ({"reward_model": {"style": "rule", "ground_truth": None}}, "no 'ground_truth'"),
        ({"extra_info": "x"}, "'extra_info' is str 'x', not a mapping"),
    ],
)
def test_a_malformed_row_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(RowError, match=said):
        parse_row(raw(**changes), "prompt", needs_ground_truth=True)


def test_a_long_wrong_value_is_clipped() -> None:
    with pytest.raises(RowError) as error:
        parse_row(raw(prompt=list(range(10_000))), "prompt", needs_ground_truth=True)
    assert len(str(error.value)) < 200
