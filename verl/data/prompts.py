"""A prompt as the model reads it, and a batch of them as a step consumes it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Prompt:
    ids: tuple[int, ...]
    """Token ids that are fed to the model, the chat template applied."""
    index: int
    """Row number in the data set, counted over its files before anything is dropped: the prompt's name for good."""
    data_source: str
    """Where the prompt is from; chooses the reward function and splits the validation metrics."""
    ground_truth: Any
    """What the reward function compares with; None where the file gives none."""
    extra_info: dict[str, Any]
    """Further columns for the reward function."""


@dataclass(frozen=True)
class PromptBatch:
    """The prompts of one step, the same on every rank.

    With n responses a prompt, row r of the batch is sample `r % n` of `prompts[r // n]`.
    """

    prompts: tuple[Prompt, ...]
    """Prompt groups in global order."""
    weights: tuple[float, ...]
    """One a prompt: 1, or 0 for a dead prompt that only fills the batch up."""
    step: int
    """The step that the batch serves, from 0; part of the key of every random draw."""
