"""What a run reads from this node's disks: fingerprints to be held against other nodes', and the models' sizes."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path

import verl
from verl.config import PPOConfig
from verl.preflight.settings import DIGITS, digest

FOLDER, HUB = "a folder", "an id of the hub"
SOURCE = "source of verl"
_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
              "chat_template.jinja", "vocab.json", "merges.txt", "tokenizer.model", "spiece.model")  # fmt: skip
_ENDS = 1 << 20
"""Bytes at either end of a prompt file that are read: parquet has its index at the end."""


@dataclass(frozen=True)
class ModelSize:
    """As its safetensors files tell it, in numbers."""

    parameters: int
    largest: int
    """Of the largest tensor."""


def fingerprints(config: PPOConfig) -> dict[str, str | None]:
    """What -> a text that is the same for the same contents; None where there is nothing.

    What is inside a folder that is not there has no entry.
    """
    found: dict[str, str | None] = {SOURCE: _source()}
    for setting, path in _model_paths(config).items():
        found[setting] = _kind(path)
        folder = find_model(path)
        if folder is not None:
            found |= _inside(setting, folder, of_model=setting != "model.tokenizer_path")
    for setting, files in (("data.train_files", config.data.train_files), ("data.val_files", config.data.val_files)):
        found |= {f"{setting}: {file}": _ends(Path(file).expanduser()) for file in files}
    function = config.reward.function.path
    if function is not None and ":" in function:
        file = _function_file(function.rpartition(":")[0])
        found["reward.function.path"] = _contents([file]) if file is not None else None
    return found


def find_model(path: str) -> Path | None:
    """The folder of a model on this node: given, or in the hub's cache. None: there is none (yet)."""
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder
    if _kind(path) != HUB:
        return None
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        cached = try_to_load_from_cache(path, "config.json")
    except HFValidationError:  # no id at all: said when the model is looked for
        return None
    return Path(cached).parent if isinstance(cached, str) else None


def model_sizes(config: PPOConfig) -> dict[str, ModelSize]:
    """By role, of the models that are on this node in a form that can be read."""
    actor = config.model.path
    paths = {"actor": actor, "critic": config.critic.path or actor, "reference": config.reference.path or actor}
    if config.reward.model.path is not None:
        paths["reward"] = config.reward.model.path
    folders = {role: find_model(path) for role, path in paths.items()}
    sizes = {role: _size(folder) for role, folder in folders.items() if folder is not None}
    return {role: size for role, size in sizes.items() if size is not None}


def _model_paths(config: PPOConfig) -> dict[str, str]:
    named = {
        "model.path": config.model.path,
        "model.tokenizer_path": config.model.tokenizer_path,
        "critic.path": config.critic.path if config.needs_critic else None,
        "reference.path": config.reference.path if config.needs_reference else None,
        "reward.model.path": config.reward.model.path,
    }
    return {setting: path for setting, path in named.items() if path}


def _kind(path: str) -> str | None:
    """As verl.model.folder tells a folder from an id."""
    folder = Path(path).expanduser()
    if folder.is_dir():
        return FOLDER
    return None if folder.is_absolute() or path.startswith(".") or path.count("/") != 1 else HUB


def _inside(setting: str, folder: Path, of_model: bool) -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    tokenizer = [folder / name for name in _TOKENIZER if (folder / name).is_file()]
    if tokenizer:
        found[f"{setting} (tokenizer)"] = _contents(tokenizer)
    if of_model:
        configs = [folder / name for name in ("config.json", "generation_config.json")]
        found[f"{setting} (config)"] = _contents(file for file in configs if file.is_file())
        weights = sorted(folder.glob("*.safetensors"))
        sizes = [(file.name, file.stat().st_size) for file in weights]
        count = f"{len(weights)} file{'' if len(weights) == 1 else 's'}"
        found[f"{setting} (weights)"] = (
            f"{count}, {sum(size for _, size in sizes)} bytes, {digest(repr(sizes).encode())}"
        )
    return found


def _source() -> str:
    package = Path(verl.__file__).parent
    return _contents(sorted(package.rglob("*.py")), package)


def _contents(files: Iterable[Path], root: Path | None = None) -> str:
    """The names count too: below `root`, or alone."""
    length, total = 0, hashlib.sha256()
    for file in files:
        content = file.read_bytes()
        length += len(content)
        total.update(f"{file.relative_to(root) if root else file.name} {len(content)}\n".encode() + content)
    return f"{length} bytes, {total.hexdigest()[:DIGITS]}"


def _ends(file: Path) -> str | None:
    """Of a file that may be large: its length and both its ends."""
    if not file.is_file():
        return None
    length = file.stat().st_size
    with file.open("rb") as stream:
        ends = stream.read(_ENDS)
        stream.seek(max(length - _ENDS, stream.tell()))
        ends += stream.read(_ENDS)
    return f"{length} bytes, {digest(ends)}"


def _function_file(where: str) -> Path | None:
    """The file of `file.py` or of `package.module`, without running any of it."""
    if where.endswith(".py") or "/" in where:
        file = Path(where).expanduser()
        return file if file.is_file() else None
    folders: list[str] | None = None
    spec = None
    for end in range(1, where.count(".") + 2):
        spec = PathFinder.find_spec(".".join(where.split(".")[:end]), folders)
        if spec is None:
            return None
        folders = list(spec.submodule_search_locations or [])
    return Path(spec.origin) if spec is not None and spec.origin else None


def _size(folder: Path) -> ModelSize | None:
    try:
        sizes = [math.prod(shape) for file in folder.glob("*.safetensors") for shape in _shapes(file)]
    except (OSError, ValueError, KeyError, TypeError):  # a broken file: it is named when the folder is checked
        return None
    return ModelSize(sum(sizes), max(sizes)) if sizes else None


def _shapes(file: Path) -> Iterator[list[int]]:
    """From the head of a safetensors file: eight bytes of length, then JSON."""
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if length > file.stat().st_size:
            raise ValueError(f"{file} is no safetensors file")
        head = json.loads(stream.read(length))
    yield from (entry["shape"] for name, entry in head.items() if name != "__metadata__")
