"""Prompt files and a tokenizer, small and made on the spot."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "<|start|> {{ m.role }} {{ m.content }} <|end|> {% endfor %}"
    "{% if add_generation_prompt %}<|start|> assistant{% endif %}"
)
WORDS = ["<unk>", "<|start|>", "<|end|>", "user", "system", "assistant", *"abcdefgh"]


def word_tokenizer(chat_template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    """A token a word; its ids are the words' places in WORDS."""
    model = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    model.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=model, unk_token="<unk>", chat_template=chat_template)


def row(content: str, **changes: Any) -> dict[str, Any]:
    return {
        "data_source": "unit",
        "prompt": [{"role": "user", "content": content}],
        "reward_model": {"style": "rule", "ground_truth": content.upper()},
        "extra_info": {"length": len(content)},
    } | changes


def write_jsonl(path: Path, rows: list[dict[str, Any] | str]) -> str:
    """Strings are written as they are: broken lines."""
    path.write_text("".join(f"{r if isinstance(r, str) else json.dumps(r)}\n" for r in rows))
    return str(path)


def write_parquet(path: Path, rows: list[dict[str, Any]]) -> str:
    pq.write_table(pa.Table.from_pylist(rows), path)
    return str(path)
