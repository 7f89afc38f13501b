"""From a prompt to the token ids that are fed to the model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from jinja2 import TemplateError

from verl.data.rows import RowError
from verl.errors import UserError

if TYPE_CHECKING:
    from transformers import BatchEncoding, PreTrainedTokenizerBase


def prompt_ids(tokenizer: PreTrainedTokenizerBase, prompt: str | list[dict[str, Any]]) -> tuple[int, ...]:
    """Token ids of a prompt: chat messages through the tokenizer's template with the opening of the answer added, a
    string as it is (with the special tokens that the tokenizer itself adds).

    Raises `ValueError` for messages when the tokenizer has no template, and `RowError`, without the row's place, for
    messages that its template refuses or that come to no token.
    """
    if isinstance(prompt, str):
        encoding = tokenizer(prompt)
    else:
        encoding = _apply_template(tokenizer, prompt)
    ids = cast("list[int]", encoding["input_ids"])
    if not ids:
        raise RowError("the prompt comes to no token")
    return tuple(ids)


def _apply_template(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, Any]]) -> BatchEncoding:
    if tokenizer.chat_template is None:
        raise UserError(
            f"The prompts are chat messages, but the tokenizer of {tokenizer.name_or_path!r} has no chat template. "
            "Set model.tokenizer_path to a tokenizer with one (an instruct model's), add a chat_template.jinja to its "
            "folder, or give the prompts as strings."
        )
    try:
        encoding = tokenizer.apply_chat_template(messages, tokenize=True, add_generation_prompt=True, return_dict=True)
    except TemplateError as error:
        raise RowError(f"the tokenizer's chat template refuses the messages: {error}") from error
    return cast("BatchEncoding", encoding)
