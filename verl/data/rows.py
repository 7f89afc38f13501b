"""Rows of prompt files: what a row must hold, and how a wrong one is named.

The format is verl's: `data_source`, `prompt` (chat messages, or a plain string), `reward_model: {style, ground_truth}`
and `extra_info`. docs/data.md describes it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

UNNAMED_SOURCE = "unknown"
"""Data source of a row that names none, which only a run without a reward function accepts."""


class RowError(ValueError):
    """One row cannot be used. The message names the file and the row; `data.skip_bad_rows` drops such rows."""


@dataclass(frozen=True)
class Row:
    """A row whose parts have the right types."""

    prompt: str | list[dict[str, Any]]
    """A string that is fed as it is, or chat messages, each with `role` and `content`."""
    data_source: str
    ground_truth: Any
    extra_info: dict[str, Any]


def parse_row(raw: dict[str, Any], prompt_key: str, needs_ground_truth: bool) -> Row:
    """Checks one row of a file.

    `needs_ground_truth` demands the two columns that a reward function reads, `data_source` and
    `reward_model.ground_truth`. Raises `RowError` that says what is wrong, without the row's place.
    """
    return Row(
        prompt=_prompt(raw, prompt_key),
        data_source=_data_source(raw, needs_ground_truth),
        ground_truth=_ground_truth(raw, needs_ground_truth),
        extra_info=_mapping(raw, "extra_info") or {},
    )


def _prompt(raw: dict[str, Any], key: str) -> str | list[dict[str, Any]]:
    prompt = raw.get(key)
    if prompt is None:
        raise RowError(f"no '{key}'; the row has {_names(raw)}")
    if isinstance(prompt, str):
        if not prompt.strip():
            raise RowError(f"'{key}' is empty")
        return prompt
    if not isinstance(prompt, list):
        raise RowError(f"'{key}' is {_kind(prompt)}, not chat messages or a string")
    messages = [_message(message, f"{key}[{i}]") for i, message in enumerate(prompt)]
    if not any(message["content"].strip() for message in messages):
        raise RowError(f"'{key}' is empty")
    return messages


def _message(message: Any, place: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise RowError(f"{place} is {_kind(message)}, not a message with 'role' and 'content'")
    for part in ("role", "content"):
        if message.get(part) is None:
            raise RowError(f"{place} has no '{part}'; it has {_names(message)}")
        if not isinstance(message[part], str):
            raise RowError(f"{place}.{part} is {_kind(message[part])}, not a string; only text is supported")
    if not message["role"].strip():
        raise RowError(f"{place}.role is empty")
    # Parquet gives every message of a column all the fields that any of them has.
    return {name: value for name, value in message.items() if value is not None}


def _data_source(raw: dict[str, Any], needed: bool) -> str:
    source = raw.get("data_source")
    if source is None:
        if needed:
            raise RowError(f"no 'data_source'; the row has {_names(raw)}")
        return UNNAMED_SOURCE
    if not isinstance(source, str) or not source:
        raise RowError(f"'data_source' is {_kind(source)}, not the name of a source")
    return source


def _ground_truth(raw: dict[str, Any], needed: bool) -> Any:
    reward_model = _mapping(raw, "reward_model")
    if reward_model is None and needed:
        raise RowError(f"no 'reward_model' with a 'ground_truth'; the row has {_names(raw)}")
    truth = None if reward_model is None else reward_model.get("ground_truth")
    if truth is None and needed:
        raise RowError(f"no 'ground_truth' in 'reward_model'; it has {_names(reward_model or {})}")
    return truth


def _mapping(raw: dict[str, Any], key: str) -> dict[str, Any] | None:
    value = raw.get(key)
    if value is not None and not isinstance(value, dict):
        raise RowError(f"'{key}' is {_kind(value)}, not a mapping")
    return value


def _names(mapping: dict[str, Any]) -> str:
    present = [name for name, value in mapping.items() if value is not None]
    return ", ".join(map(repr, present)) or "nothing"


def _kind(value: Any) -> str:
    shown = repr(value)
    return f"{type(value).__name__} {shown if len(shown) <= 40 else shown[:40] + '...'}"
