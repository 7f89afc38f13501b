"""Which rows are dropped, and which end the run."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from tests.support.prompt_files import row, word_tokenizer, write_jsonl
from verl.data.dataset import PromptDataset
from verl.data.select import Selection, select_rows

TEMPLATE_TOKENS = 5  # <|start|> user ... <|end|> <|start|> assistant


def dataset(tmp_path: Path, *rows: Any) -> PromptDataset:
    return PromptDataset([write_jsonl(tmp_path / "x.jsonl", list(rows))], word_tokenizer())


def select(data: PromptDataset, **changes: Any) -> Selection:
    settings = {"max_prompt_length": 100, "filter_overlong": True, "skip_bad_rows": False}
    return select_rows(data, **(settings | changes))


def test_all_good(tmp_path: Path) -> None:
    data = dataset(tmp_path, row("a", data_source="y"), row("a b c", data_source="x"))
    assert select(data) == Selection([0, 1], ("x", "y"), 3 + TEMPLATE_TOKENS, 0, 0)


def test_the_length_counted_is_that_of_what_is_fed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A prompt whose own words fit but whose template makes it too long is overlong."""
    data = dataset(tmp_path, row("a a"), row("a a a"), row("a"))
    with caplog.at_level(logging.WARNING):
        chosen = select(data, max_prompt_length=2 + TEMPLATE_TOKENS)
    assert (chosen.indices, chosen.num_overlong, chosen.longest) == ([0, 2], 1, 2 + TEMPLATE_TOKENS)
    assert "1 of 3 prompts of data.train_files are longer than data.max_prompt_length=7 and dropped" in caplog.text
    data.keep(chosen.indices)
    assert max(len(data.prompt(i).ids) for i in range(len(data))) == 2 + TEMPLATE_TOKENS


def test_an_overlong_prompt_is_an_error_when_not_filtered(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"row 1 \(line 2\): 8 tokens\nRaise data\.max_prompt_length"):
        select(dataset(tmp_path, row("a"), row("a a a")), max_prompt_length=7, filter_overlong=False)


def test_the_first_malformed_rows_are_named_and_the_rest_counted(tmp_path: Path) -> None:
    bad = [row("a", prompt="") for _ in range(7)]
    with pytest.raises(ValueError) as error:
        select(dataset(tmp_path, row("a"), *bad, "{"))
    said = str(error.value).replace(str(tmp_path), "")
    assert said.startswith(
        "8 of 9 rows of data.train_files are malformed:\n  /x.jsonl, row 1 (line 2): 'prompt' is empty"
    )
    assert "row 5 (line 6)" in said
    assert "row 6" not in said
    assert "and 3 more" in said
    assert "data.skip_bad_rows=true" in said


def test_malformed_rows_can_be_dropped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    data = dataset(tmp_path, row("a", prompt=""), row("a"), "{", row("b"))
    with caplog.at_level(logging.WARNING):
        chosen = select(data, skip_bad_rows=True)
    assert (chosen.indices, chosen.num_malformed) == ([1, 3], 2)
    assert "2 of 4 rows of data.train_files are malformed and dropped" in caplog.text


def test_a_missing_chat_template_is_not_taken_for_bad_rows(tmp_path: Path) -> None:
    data = PromptDataset([write_jsonl(tmp_path / "x.jsonl", [row("a")])], word_tokenizer(chat_template=None))
    with pytest.raises(ValueError, match="no chat template"):
        select(data, skip_bad_rows=True)


def test_no_row_left(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"of 2 rows 1 are malformed and 1 longer than data\.max_prompt_length=5"):
        select(dataset(tmp_path, "{", row("a")), skip_bad_rows=True, max_prompt_length=5)


def test_only_the_first_usable_rows(tmp_path: Path) -> None:
    data = dataset(tmp_path, row("a a a a"), row("a"), row("b", data_source="x"), row("c", data_source="y"))
    chosen = select(data, max_prompt_length=6, max_rows=2)
    assert (chosen.indices, chosen.data_sources, chosen.num_overlong) == ([1, 2], ("unit", "x"), 1)
