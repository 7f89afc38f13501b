"""Writes the prompts of a small arithmetic task as parquet files that verl (and upstream verl) reads.

    python scripts/prepare_data.py --task products --out outputs/demo/data --seed 0

The tasks are reasoning-gym's, set so easy that a small model gets some of them right. All distinct questions are
collected and split by what they ask for, not by how they are written: 3 x 4 and 4 x 3 are always on the same side.
At least 40 of them are held out, so that the standard error of a measured accuracy, sqrt(p (1 - p) / n), is below 0.08.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

SYSTEM_PROMPT = "Answer with the number only."
HELD_OUT = 40
"""Fewest questions to hold out: 0.5 / sqrt(40) = 0.079."""
DRAWS = 4000
"""Questions drawn from the generator: over ten times as many as a task has distinct ones, so that all are found."""
TIME_LIMIT = 120.0
"""Seconds a generator may take: some loop for ever where their ranges leave them no choice."""


@dataclass(frozen=True)
class Task:
    settings: dict[str, Any]
    """Arguments of reasoning_gym.create_dataset."""
    meaning: Callable[[dict[str, Any]], str]
    """From an entry's metadata, what the question asks for: questions of one meaning stay on one side of the split."""


def order_left_out(metadata: dict[str, Any]) -> str:
    """The operator and the operands, the operands sorted where their order does not matter."""
    match = re.fullmatch(r"(\d+) ([-+*]) (\d+)", metadata["expression"])
    if match is None:
        raise ValueError(f"not two numbers with an operator between them: {metadata['expression']!r}")
    left, operator, right = match.groups()
    if operator != "-":
        left, right = sorted((left, right), key=int)
    return f"{left} {operator} {right}"


def numbers_sorted(metadata: dict[str, Any]) -> str:
    return " ".join(map(str, sorted(metadata["numbers"])))


ONE_DIGIT_PAIR = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
TASKS = {
    "products": Task(ONE_DIGIT_PAIR, order_left_out),
    "chain_sum": Task(ONE_DIGIT_PAIR, order_left_out),
    "basic_arithmetic": Task(
        {**ONE_DIGIT_PAIR, "operators": ["+"], "allow_parentheses": False, "allow_negation": False}, order_left_out
    ),
    "gcd": Task({"min_numbers": 2, "max_numbers": 2, "min_value": 1, "max_value": 12}, numbers_sorted),
    "count_bits": Task({"min_n": 1, "max_n": 256}, lambda metadata: str(metadata["number"])),
}


@dataclass(frozen=True)
class Question:
    text: str
    answer: str
    meaning: str


def distinct_questions(name: str) -> Iterator[Question]:
    """The generator's questions without repetitions, by text: an order that no draw decides."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)  # a dependency of its, compiled at the first import
        import reasoning_gym

    task = TASKS[name]
    dataset = reasoning_gym.create_dataset(name, size=DRAWS, seed=0, **task.settings)
    found = {}
    for number in range(DRAWS):
        entry = dataset[number]
        found[entry["question"]] = Question(entry["question"], entry["answer"], task.meaning(entry["metadata"]))
    yield from (found[text] for text in sorted(found))


def _send_questions(name: str, pipe: Connection) -> None:
    pipe.send(list(distinct_questions(name)))


def collect(
    name: str, limit: float = TIME_LIMIT, work: Callable[[str, Connection], None] = _send_questions
) -> list[Question]:
    """`work` in a process of its own, for a generator that loops can only be ended from outside.

    Raises TimeoutError after `limit` seconds, and ValueError where the process ends without an answer.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=work, args=(name, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        if not ours.poll(limit):
            raise TimeoutError(f"reasoning-gym's {name} was stopped after {limit:g} s: its ranges may be too tight")
        return ours.recv()
    except EOFError:
        process.join(10)
        raise ValueError(f"generating {name} failed with exit code {process.exitcode}: see its traceback") from None
    finally:
        process.kill()
        process.join()


def split(questions: list[Question], seed: int, held_out: int = HELD_OUT) -> tuple[list[Question], list[Question]]:
    """(training, validation). Whole meanings go to validation, in an order drawn by `seed`, until it is full."""
    if not 0 < held_out < len(questions):
        raise ValueError(f"cannot hold out {held_out} of {len(questions)} questions: leave some for training")
    meanings = sorted({question.meaning for question in questions})
    random.Random(seed).shuffle(meanings)
    held: set[str] = set()
    num_held = 0
    for meaning in meanings:
        if num_held >= held_out:
            break
        held.add(meaning)
        num_held += sum(question.meaning == meaning for question in questions)
    train = [question for question in questions if question.meaning not in held]
    val = [question for question in questions if question.meaning in held]
    if not train:
        raise ValueError(f"holding out {held_out} of {len(questions)} questions leaves none for training")
    return train, val


def rows(questions: list[Question], task: str, side: str) -> list[dict[str, Any]]:
    """Rows in upstream verl's format."""
    return [
        {
            "data_source": f"reasoning_gym/{task}",
            "prompt": [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": question.text}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": question.answer},
            "extra_info": {"split": side, "index": index, "meaning": question.meaning},
        }
        for index, question in enumerate(questions)
    ]


def write(path: Path, table: list[dict[str, Any]]) -> None:
    """Write a parquet file whole, or not at all."""
    import pyarrow
    import pyarrow.parquet

    draft = path.with_suffix(".tmp")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(table), draft)
    os.replace(draft, path)


def prepare(task: str, out: Path, seed: int, held_out: int = HELD_OUT) -> dict[str, int]:
    """Write out/train.parquet and out/val.parquet; returns the number of rows of each."""
    train, val = split(collect(task), seed, held_out)
    out.mkdir(parents=True, exist_ok=True)
    write(out / "train.parquet", rows(train, task, "train"))
    write(out / "val.parquet", rows(val, task, "val"))
    return {"train": len(train), "val": len(val)}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=sorted(TASKS), default="products", help="reasoning-gym's name of the task")
    parser.add_argument("--out", type=Path, required=True, help="folder for train.parquet and val.parquet")
    parser.add_argument("--seed", type=int, default=0, help="decides which questions are held out")
    parser.add_argument("--held-out", type=int, default=HELD_OUT, help="fewest questions to hold out")
    arguments = parser.parse_args(argv)
    counts = prepare(arguments.task, arguments.out, arguments.seed, arguments.held_out)
    print(f"{arguments.out}: {json.dumps(counts)} prompts of {arguments.task}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
