"""Right answers, no question on both sides in another guise, and no generator that hangs the set-up."""

from __future__ import annotations

import re
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scripts.prepare_data import HELD_OUT, TASKS, Question, collect, distinct_questions, prepare, split

pytest.importorskip("reasoning_gym")


def operands(question: str) -> tuple[int, int]:
    """Read from the prompt's words, not from the script's idea of them."""
    left, right = re.findall(r"\d+", question)
    return int(left), int(right)


@pytest.fixture(scope="module")
def products(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict]]:
    out = tmp_path_factory.mktemp("products")
    prepare("products", out, seed=0)
    return {side: pyarrow.parquet.read_table(out / f"{side}.parquet").to_pylist() for side in ("train", "val")}


def test_products_are_all_pairs_of_digits_with_their_product(products: dict[str, list[dict]]) -> None:
    rows = products["train"] + products["val"]
    answers = {operands(row["prompt"][1]["content"]): row["reward_model"]["ground_truth"] for row in rows}
    assert answers == {(a, b): str(a * b) for a in range(10) for b in range(10)}
    assert len(rows) == 100


def test_a_pair_and_its_mirror_are_on_the_same_side(products: dict[str, list[dict]]) -> None:
    pairs = {
        side: {frozenset(operands(row["prompt"][1]["content"])) for row in rows} for side, rows in products.items()
    }
    assert not pairs["train"] & pairs["val"]


def test_held_out_prompts_measure_accuracy_to_eight_hundredths(products: dict[str, list[dict]]) -> None:
    assert (0.5 * 0.5 / len(products["val"])) ** 0.5 <= 0.08
    assert len(products["train"]) > len(products["val"])


def test_rows_are_in_the_format_that_upstream_reads(products: dict[str, list[dict]]) -> None:
    for side, rows in products.items():
        assert [row["extra_info"]["index"] for row in rows] == list(range(len(rows)))
        for row in rows:
            assert set(row) == {"data_source", "prompt", "ability", "reward_model", "extra_info"}
            assert [message["role"] for message in row["prompt"]] == ["system", "user"]
            assert row["prompt"][0]["content"] == "Answer with the number only."
            assert row["data_source"] == "reasoning_gym/products"
            assert row["reward_model"]["style"] == "rule"
            assert row["extra_info"]["split"] == side


def test_the_files_depend_on_the_seed_alone(tmp_path: Path) -> None:
    for folder, seed in (("first", 0), ("again", 0), ("other", 1)):
        prepare("products", tmp_path / folder, seed)
    first, again, other = (
        pyarrow.parquet.read_table(tmp_path / folder / "val.parquet") for folder in ("first", "again", "other")
    )
    assert first.equals(again)
    assert not first.equals(other)


@pytest.mark.parametrize("task", sorted(TASKS))
def test_every_task_has_enough_distinct_questions(task: str) -> None:
    questions = list(distinct_questions(task))
    train, val = split(questions, seed=0)
    assert len({question.text for question in questions}) == len(questions) == len(train) + len(val)
    assert HELD_OUT <= len(val) <= HELD_OUT + 1 < len(train)


@given(st.lists(st.integers(0, 30), min_size=2, max_size=80), st.integers(0, 5), st.data())
def test_a_meaning_is_never_split(meanings: list[int], seed: int, data: st.DataObject) -> None:
    questions = [Question(text=str(number), answer="", meaning=str(m)) for number, m in enumerate(meanings)]
    largest = max(meanings.count(m) for m in meanings)
    held_out = data.draw(st.integers(1, len(questions) - 1))
    try:
        train, val = split(questions, seed, held_out)
    except ValueError:
        assert held_out + largest > len(questions)  # only where whole meanings may leave nothing to train on
        return
    assert sorted(train + val, key=lambda question: int(question.text)) == questions
    assert not {question.meaning for question in train} & {question.meaning for question in val}
    assert held_out <= len(val) < held_out + largest


def test_holding_out_everything_is_refused() -> None:
    questions = [Question(str(number), "", str(number)) for number in range(3)]
    with pytest.raises(ValueError, match="3 of 3"):
        split(questions, 0, held_out=3)


def loop_for_ever(name: str, pipe: Connection) -> None:
    while True:
        pass


def fail(name: str, pipe: Connection) -> None:
    raise RuntimeError("no such range")


def test_a_generator_that_hangs_is_stopped_and_named() -> None:
    started = time.monotonic()
    with pytest.raises(TimeoutError, match=r"gcd was stopped after 0\.5 s"):
        collect("gcd", limit=0.5, work=loop_for_ever)
    assert time.monotonic() - started < 100


def test_a_generator_that_fails_is_named() -> None:
    with pytest.raises(ValueError, match="generating gcd failed with exit code 1"):
        collect("gcd", limit=60, work=fail)
