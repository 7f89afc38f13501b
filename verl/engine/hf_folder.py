"""A Hugging Face model folder as it is written: its weight files, its config, and what else belongs to it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from verl.engine import durable
from verl.errors import UserError

MAX_FILE_BYTES = 5 * 10**9
_MODEL_FILES = ("config.json", "generation_config.json", "*.py")
_TOKENIZER_FILES = (
    "tokenizer*.json", "special_tokens_map.json", "added_tokens.json", "chat_template.*",
    "vocab.*", "merges.txt", "*.model", "*.tiktoken", "*.py",
)  # fmt: skip
_HEAD = "score.weight"
_MARKS = ("config.json", "adapter_config.json")
"""One of them is in every folder that an export writes."""


def copy_companions(folder: Path, target: Path, tokenizer_folder: Path | None = None) -> None:
    """Copies what belongs to a model beside its weights: configs, code, and the tokenizer of the folder that has it."""
    files = _matching(tokenizer_folder or folder, _TOKENIZER_FILES) | _matching(folder, _MODEL_FILES)
    target.mkdir(parents=True, exist_ok=True)
    for name, file in files.items():
        durable.copy(file, target / name)


def _matching(folder: Path, patterns: Sequence[str]) -> dict[str, Path]:
    return {file.name: file for pattern in patterns for file in folder.glob(pattern)}


def plan_files(sizes: Mapping[str, int], max_bytes: int) -> dict[str, list[str]]:
    """Tensors by weight file, in order; `sizes` in bytes. A file holds at most `max_bytes`, or one larger tensor."""
    bins: list[list[str]] = [[]]
    filled = 0
    for name, size in sizes.items():
        if bins[-1] and filled + size > max_bytes:
            bins.append([])
            filled = 0
        bins[-1].append(name)
        filled += size
    if len(bins) == 1:
        return {"model.safetensors": bins[0]}
    return {f"model-{i:05}-of-{len(bins):05}.safetensors": names for i, names in enumerate(bins, start=1)}


def check_free(out: Path, replace: bool) -> None:
    """Raises UserError when `out` exists and is not to be replaced, or is something else than a model's folder."""
    if not out.exists():
        return
    if not replace:
        raise UserError(f"{out.absolute()} exists already. Name another folder, or remove that one first.")
    is_model = any((out / name).is_file() for name in _MARKS)
    if not is_model and not (out.is_dir() and not any(out.iterdir())):
        raise UserError(
            f"{out.absolute()} is to be replaced and is no model's folder ({' or '.join(_MARKS)} in it). Name another."
        )


class HFFolder:
    """A folder on its way: write all of its weight files, then publish it."""

    def __init__(
        self,
        out: Path,
        source: Path,
        tokenizer_folder: Path | None,
        files: Mapping[str, Sequence[str]],
        dtype: torch.dtype,
        replace: bool,
    ) -> None:
        """`source`: where config and tokenizer come from; `files`: tensor names by weight file, as of `plan_files`.

        Raises UserError when `out` exists and is not to be replaced.
        """
        check_free(out, replace)
        names = {name for names in files.values() for name in names}
        config = written_config(json.loads((source / "config.json").read_bytes()), _HEAD in names, dtype)
        self._out, self._files, self._bytes = out, files, 0
        self._part = durable.start(out)
        copy_companions(source, self._part, tokenizer_folder)
        self._write_json("config.json", config)

    def write(self, file: str, tensors: dict[str, Tensor]) -> None:
        path = self._part / file
        save_file(tensors, path, metadata={"format": "pt"})
        path.chmod((self._part / "config.json").stat().st_mode)  # safetensors lets nobody but the owner read
        durable.sync(path)
        self._bytes += sum(tensor.nbytes for tensor in tensors.values())

    def publish(self) -> None:
        if len(self._files) > 1:
            places = {name: file for file, names in self._files.items() for name in names}
            index = {"metadata": {"total_size": self._bytes}, "weight_map": places}
            self._write_json("model.safetensors.index.json", index)
        durable.publish(self._out)

    def _write_json(self, name: str, content: dict[str, Any]) -> None:
        durable.write(self._part / name, json.dumps(content, indent=2).encode())


def written_config(config: dict[str, Any], has_head: bool, dtype: torch.dtype) -> dict[str, Any]:
    """The config.json of a model that was loaded with `config` and is written in `dtype`.

    `has_head`: with a value or score head; `AutoModelForSequenceClassification` then loads it with one label.
    """
    written = {key: value for key, value in config.items() if key not in ("torch_dtype", "num_labels")}
    written["dtype"] = str(dtype).removeprefix("torch.")
    written["architectures"] = _architectures(config, has_head)
    return written | ({"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}} if has_head else {})


def _architectures(config: dict[str, Any], has_head: bool) -> list[str]:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as WITH_LM_HEAD
    from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES as WITH_SCORE

    classes, kind = (WITH_SCORE if has_head else WITH_LM_HEAD), config["model_type"]
    if kind in classes:
        return [classes[kind]]
    if has_head:
        raise UserError(
            f"transformers has no sequence classification model of type '{kind}', so no class would load this value "
            "head. Export the actor instead."
        )
    return config.get("architectures", [])  # a model with code of its own
