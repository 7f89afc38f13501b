"""Prompt files as one sequence of prompts, each read and tokenised when it is asked for."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import TYPE_CHECKING

from verl.data.chat import prompt_ids
from verl.data.files import PromptFile, open_file
from verl.data.prompts import Prompt
from verl.data.rows import RowError, parse_row
from verl.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CACHED_PROMPTS = 1024


class PromptDataset:
    """The prompts of several files, in the order of the files and of their rows.

    Opening it reads the files but parses no row. `select_rows` goes over all of them; it need run on one rank only,
    since the others reach the same data set by `keep(selection.indices)`.
    """

    def __init__(
        self,
        files: Sequence[str],
        tokenizer: PreTrainedTokenizerBase,
        *,
        prompt_key: str = "prompt",
        needs_ground_truth: bool = True,
        setting: str = "data.train_files",
    ) -> None:
        """`needs_ground_truth`: a reward function will read `data_source` and `ground_truth`, so a row must have them.
        `setting` is the files' place in the config, for messages.

        Raises one `ValueError` that names every file that cannot be used.
        """
        if not files:
            raise UserError(f"{setting} is empty: give at least one .parquet or .jsonl file")
        self.setting = setting
        self._tokenizer = tokenizer
        self._prompt_key = prompt_key
        self._needs_ground_truth = needs_ground_truth
        self._files = _open_all(files, prompt_key, needs_ground_truth, setting)
        self._ends = list(accumulate(len(file) for file in self._files))
        self._kept: Sequence[int] = range(self._ends[-1])
        self._cached = lru_cache(maxsize=CACHED_PROMPTS)(self._read)

    def __len__(self) -> int:
        return len(self._kept)

    def prompt(self, position: int) -> Prompt:
        """The prompt at a position among the kept rows.

        Raises `RowError` for a malformed row and `ValueError` for a tokenizer that cannot serve the prompts.
        """
        return self._cached(self._kept[position])

    def keep(self, indices: Sequence[int]) -> None:
        """Leaves only these rows, in this order. `indices` are `Prompt.index`es: row numbers over all files."""
        total = self._ends[-1]
        wrong = [index for index in indices if not 0 <= index < total]
        if wrong:
            raise UserError(
                f"{self.setting} has {total} rows here, but row {wrong[0]} is asked for: "
                "do all nodes see the same files?"
            )
        self._kept = list(indices)

    def place(self, position: int) -> str:
        """File and row (from 0; of JSON lines also the line, from 1) of a position, for messages."""
        file, i = self._locate(self._kept[position])
        return file.place(i)

    def _locate(self, index: int) -> tuple[PromptFile, int]:
        number = bisect_right(self._ends, index)
        file = self._files[number]
        return file, index - (self._ends[number] - len(file))

    def _read(self, index: int) -> Prompt:
        file, i = self._locate(index)
        try:
            row = parse_row(file.row(i), self._prompt_key, self._needs_ground_truth)
            ids = prompt_ids(self._tokenizer, row.prompt)
        except RowError as error:
            raise RowError(f"{file.place(i)}: {error}") from error
        return Prompt(ids, index, row.data_source, row.ground_truth, row.extra_info)


def _open_all(names: Sequence[str], prompt_key: str, needs_ground_truth: bool, setting: str) -> list[PromptFile]:
    files, problems = [], []
    for name in names:
        try:
            files.append(open_file(name, prompt_key, needs_ground_truth))
        except ValueError as error:
            problems.append(f"  {error}")
    if problems:
        lines = "\n".join(problems)
        raise UserError(f"{setting} cannot be used:\n{lines}\ndocs/data.md describes the format.")
    return files
