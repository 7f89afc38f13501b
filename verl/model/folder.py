"""A model's folder: given, or fetched from the hub once a node."""

from __future__ import annotations

import json
from pathlib import Path

from verl.errors import UserError
from verl.model.hub import hub_folder


def local_folder(path: str, role: str, fetch: bool, of_model: bool = True) -> Path:
    """The folder that `path` names. A hub id is looked up in the local cache, and fetched into it only with `fetch`.

    `role`: the setting, for messages. `of_model`: it must have a config.json, which a tokenizer's need not. Raises
    UserError when there is no such folder and the hub does not give it (HF_HUB_OFFLINE is respected).
    """
    folder = Path(path).expanduser()
    if folder.is_dir():
        if of_model and not (folder / "config.json").is_file():
            raise UserError(f"{role}: the folder '{path}' holds no config.json, so it is no Hugging Face model folder.")
        return folder
    if folder.is_absolute() or path.startswith(".") or path.count("/") != 1:
        raise UserError(
            f"{role}: no model folder at '{path}' (looked in {folder.absolute()}). Set the path to a Hugging Face "
            f"model folder or a hub id such as 'org/name'; `make demo` prepares a small one under outputs/demo/model."
        )
    try:
        return hub_folder(path, ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt", "*.py"), fetch)
    except UserError as error:
        raise UserError(f"{role}: {error}") from error


def architecture(folder: Path) -> str:
    """The first class name in the folder's config.json, or ''."""
    names = json.loads((folder / "config.json").read_text()).get("architectures") or [""]
    return names[0]
