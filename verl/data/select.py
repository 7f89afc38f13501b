"""Which rows of a data set are used: malformed and overlong ones are dropped, or named in an error."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from verl.data.dataset import PromptDataset
from verl.data.rows import RowError
from verl.errors import UserError

logger = logging.getLogger(__name__)

NAMED_ROWS = 5
"""Rows that a message names; the rest is counted."""


@dataclass(frozen=True)
class Selection:
    indices: list[int]
    """`Prompt.index` of the usable rows, in order: the argument of `PromptDataset.keep`."""
    data_sources: tuple[str, ...]
    """The data sources among them, sorted."""
    longest: int
    """Tokens of the longest one."""
    num_malformed: int
    num_overlong: int


def select_rows(
    dataset: PromptDataset,
    *,
    max_prompt_length: int,
    filter_overlong: bool,
    skip_bad_rows: bool,
    max_rows: int | None = None,
    on_row: Callable[[], None] = lambda: None,
) -> Selection:
    """Reads, checks and tokenises every row of `dataset`, and says which ones to keep.

    A prompt's length is that of `Prompt.ids`: chat template and special tokens count. `max_rows` keeps only the first
    usable rows. What is dropped is logged. Raises `ValueError` for malformed rows unless `skip_bad_rows`, for prompts
    over `max_prompt_length` tokens unless `filter_overlong`, and when no row is left. `on_row` is called for each row.
    """
    indices: list[int] = []
    malformed: list[str] = []
    overlong: list[str] = []
    sources: set[str] = set()
    longest = 0
    for position in range(len(dataset)):
        on_row()
        try:
            prompt = dataset.prompt(position)
        except RowError as error:
            malformed.append(str(error))
            continue
        length = len(prompt.ids)
        if length > max_prompt_length:
            overlong.append(f"{dataset.place(position)}: {length} tokens")
        elif max_rows is None or len(indices) < max_rows:
            indices.append(prompt.index)
            sources.add(prompt.data_source)
            longest = max(longest, length)
    _report(
        f"{len(malformed)} of {len(dataset)} rows of {dataset.setting} are malformed",
        malformed,
        drop=skip_bad_rows,
        remedy="Mend them (docs/data.md describes the format), or set data.skip_bad_rows=true to drop them.",
    )
    _report(
        f"{len(overlong)} of {len(dataset)} prompts of {dataset.setting} are longer than "
        f"data.max_prompt_length={max_prompt_length}",
        overlong,
        drop=filter_overlong,
        remedy="Raise data.max_prompt_length, or set data.filter_overlong_prompts=true to drop them.",
    )
    if not indices:
        raise UserError(
            f"No prompt of {dataset.setting} is left: of {len(dataset)} rows {len(malformed)} are malformed and "
            f"{len(overlong)} longer than data.max_prompt_length={max_prompt_length}. Raise it, or give other prompts."
        )
    return Selection(indices, tuple(sorted(sources)), longest, len(malformed), len(overlong))


def _report(headline: str, problems: list[str], *, drop: bool, remedy: str) -> None:
    if not problems:
        return
    lines = [f"  {problem}" for problem in problems[:NAMED_ROWS]]
    if len(problems) > NAMED_ROWS:
        lines.append(f"  and {len(problems) - NAMED_ROWS} more")
    listed = "\n".join(lines)
    if not drop:
        raise UserError(f"{headline}:\n{listed}\n{remedy}")
    logger.warning("%s and dropped:\n%s", headline, listed)
