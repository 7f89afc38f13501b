"""Adapters in files: what a checkpoint says of them, the whole model that they make, and a folder of peft's own."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from verl.engine import durable
from verl.engine.hf_folder import check_free
from verl.engine.shards import MODEL, Reader
from verl.engine.train_engine import TrainEngine
from verl.errors import UserError
from verl.model.lora import Adapter, adapted_weight, adapter_config, adapter_names, is_adapter, saved_name, scale_of
from verl.model.weight_files import DTYPES, Safetensors

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
"""As peft calls them."""


def write_config(config: Mapping[str, Any], folder: Path) -> None:
    """adapter_config.json, among what a checkpoint has beside tensors."""
    durable.write(folder / CONFIG, json.dumps(config, indent=2, sort_keys=True).encode())


def check_scale(engine: TrainEngine, role: str, companions: Path) -> None:
    """Raises UserError where a checkpoint's adapters count more or less than the engine's would with the same values.

    `companions`: where `write_config` wrote, if there are any.
    """
    file = companions / CONFIG
    if engine.spec.lora is None or not file.is_file():
        return
    saved = scale_of(json.loads(file.read_bytes()))
    here = scale_of(adapter_config(engine.parts[0], engine.spec.folder))
    if saved != here:
        raise UserError(
            f"{role}.lora: adapters count {here:g} times with these settings, and {saved:g} times in the checkpoint "
            f"{companions.parent}; set rank, alpha and rslora to what they were"
        )


class SavedModel:
    """What was trained in a role's folder of a checkpoint: the whole model, or adapters and perhaps a scalar head."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._reader = folder, Reader(folder)
        entries = self._reader.tensors()
        self.shapes = {name.removeprefix(MODEL): e.size for name, e in entries.items() if name.startswith(MODEL)}

    def whole(self, name: str) -> Tensor:
        """On the CPU, as it was saved: in float32."""
        return self._reader.whole(MODEL + name)


class SavedAdapters(SavedModel):
    def __init__(self, folder: Path, config: dict[str, Any]) -> None:
        """`config`: of adapter_config.json."""
        super().__init__(folder)
        self.config = config

    @classmethod
    def find(cls, folder: Path, companions: Path) -> SavedAdapters | None:
        """None: there are none in it. `companions`: where `write_config` wrote."""
        file = companions / CONFIG
        return cls(folder, json.loads(file.read_bytes())) if file.is_file() else None

    def write(self, out: Path, dtype: torch.dtype, replace: bool) -> None:
        """As a folder for `PeftModel.from_pretrained`. Raises UserError when `out` exists and is not to be replaced."""
        check_free(out, replace)
        part = durable.start(out)
        tensors = {saved_name(name): self.whole(name).to(dtype) for name in self.shapes}
        save_file(tensors, part / WEIGHTS, metadata={"format": "pt"})
        write_config(self.config, part)
        (part / WEIGHTS).chmod((part / CONFIG).stat().st_mode)  # safetensors lets nobody but the owner read
        durable.sync(part / WEIGHTS)
        durable.publish(out)


class MergedModel:
    """The whole model that saved adapters make with the one that they were trained on, a tensor at a time."""

    def __init__(self, saved: SavedAdapters, base: Path | None) -> None:
        """`base`: where that model is now; None: where it was. Raises UserError where it is not."""
        self._saved = saved
        folder = Path(saved.config["base_model_name_or_path"]) if base is None else base
        remedy = f"name the folder of the model that the adapters in {saved.folder} were trained on with --base FOLDER"
        if not folder.is_dir():
            raise UserError(f"{folder}: no such folder; {remedy}")
        self._files = Safetensors(folder)
        for name, shape in self._adapted.items():
            if name not in self._files or self._files.shape(name) != shape:
                raise UserError(f"{folder} has no '{name}' of shape {shape}; {remedy}")

    @cached_property
    def shapes(self) -> Mapping[str, torch.Size]:
        """By the names of the model's files. A language-model head is left out where a scalar one was trained."""
        saved = self._saved.shapes
        trained = {name: shape for name, shape in saved.items() if not is_adapter(name)}
        decoder = next(iter(self._adapted)).partition(".")[0] + "."
        names = [name for name in self._files.names() if name not in trained]
        if trained:
            names = [name for name in names if name.startswith(decoder)]
        return {name: torch.Size(self._files.shape(name)) for name in names} | trained

    def whole(self, name: str) -> Tensor:
        if name in self._saved.shapes:
            return self._saved.whole(name)
        shape = self.shapes[name]
        weight = torch.empty(shape, dtype=DTYPES[self._files.dtype(name)])
        self._files.read_into(weight, name, tuple(slice(0, size) for size in shape))
        if name not in self._adapted:
            return weight
        down, up = (self._saved.whole(part) for part in adapter_names(name))
        return Adapter(down, up, scale_of(self._saved.config)).merged(weight)

    @cached_property
    def _adapted(self) -> dict[str, tuple[int, int]]:
        """Shapes of the weights that adapters belong to."""
        shapes = self._saved.shapes
        return {
            weight: (shapes[up][0], shapes[down][1])
            for weight in dict.fromkeys(adapted_weight(name) for name in shapes if is_adapter(name))
            for down, up in [adapter_names(weight)]
        }
