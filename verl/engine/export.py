"""A trained model as a Hugging Face folder for transformers and vLLM, from a running engine or from a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from verl.engine.adapter_files import MergedModel, SavedAdapters, SavedModel
from verl.engine.checkpoint import COMPANIONS
from verl.engine.hf_folder import MAX_FILE_BYTES, HFFolder, plan_files
from verl.engine.manifest import BrokenCheckpointError, find
from verl.engine.train_engine import TrainEngine
from verl.errors import UserError
from verl.flow.board import Board
from verl.model.load import base_parameters, whole_tensor
from verl.model.lora import Adapter, adapters
from verl.model.pieces import pieces


def export_hf(
    engine: TrainEngine,
    out: Path,
    source_folder: Path,
    board: Board,
    dtype: torch.dtype = torch.bfloat16,
    max_file_bytes: int = MAX_FILE_BYTES,
    tokenizer_folder: Path | None = None,
    replace: bool = False,
) -> None:
    """Writes the engine's parameters in `dtype` with `source_folder`'s config and tokenizer, on the engine's ranks.

    Collective. The role's first rank writes; it gathers one tensor at a time and holds one file's at once. A tied head
    is left out, as in transformers. `replace`: an older `out` goes once the new one is whole; else UserError.
    """
    ranks = dist.get_process_group_ranks(engine.groups.everyone)
    others = [rank for rank in ranks if rank != board.rank]
    with board.waiting(others, "its part of an export"):
        gathering = _Gathering(engine, dtype)
    files = plan_files(
        {name: shape.numel() * dtype.itemsize for name, shape in gathering.shapes.items()}, max_file_bytes
    )
    folder = None
    if board.rank == ranks[0]:
        folder = HFFolder(out, source_folder, tokenizer_folder, _names(files, gathering.shapes), dtype, replace)
    for file, names in files.items():
        held: dict[str, Tensor] = {}
        with board.waiting(others, f"its shards of {file}"):
            for name in names:
                whole = gathering.whole(name)
                if folder is not None:
                    assert whole is not None
                    held |= _as_in_files(name, whole)
                board.beat()
        if folder is not None:
            folder.write(file, held)
    if folder is not None:
        folder.publish()


def export_checkpoint(
    checkpoint: Path,
    role: str,
    out: Path,
    dtype: torch.dtype = torch.bfloat16,
    max_file_bytes: int = MAX_FILE_BYTES,
    replace: bool = False,
    base: Path | None = None,
) -> None:
    """The same from run_dir/checkpoints/step_N, in one process without a job. Memory: one weight file.

    `base`: of a checkpoint of adapters, the model that they were trained on; None: where it was then. Raises UserError
    when the checkpoint is broken or lacks the role, or when `out` exists and is not to be replaced.
    """
    role_folder = _find_role(checkpoint, role)
    saved: SavedModel | MergedModel
    if (adapters := SavedAdapters.find(role_folder, role_folder / COMPANIONS)) is not None:
        saved = MergedModel(adapters, base)
    else:
        saved = SavedModel(role_folder)
    shapes = _in_order(saved.shapes)
    files = plan_files({name: shape.numel() * dtype.itemsize for name, shape in shapes.items()}, max_file_bytes)
    folder = HFFolder(out, role_folder / COMPANIONS, None, _names(files, shapes), dtype, replace)
    for file, names in files.items():
        held: dict[str, Tensor] = {}
        for name in names:
            held |= _as_in_files(name, saved.whole(name).to(dtype))
        folder.write(file, held)
    folder.publish()


def export_adapters(
    checkpoint: Path, role: str, out: Path, dtype: torch.dtype = torch.float32, replace: bool = False
) -> None:
    """Of such a checkpoint the adapters alone, as a folder for `PeftModel.from_pretrained`. Raises UserError as above,
    and when there are none in it.
    """
    role_folder = _find_role(checkpoint, role)
    adapters = SavedAdapters.find(role_folder, role_folder / COMPANIONS)
    if adapters is None:
        raise UserError(f"{checkpoint}: the {role} was trained without adapters (lora.rank=0). Leave --adapter out.")
    adapters.write(out, dtype, replace)


def _find_role(checkpoint: Path, role: str) -> Path:
    """Its folder in the checkpoint."""
    try:
        found = find(checkpoint)
    except BrokenCheckpointError as error:
        raise UserError(f"{error}. Name a folder like run_dir/checkpoints/step_100.") from error
    if role not in found.manifest.meshes:
        raise UserError(f"{checkpoint} holds {', '.join(found.manifest.meshes)}, no '{role}'.")
    return checkpoint / role


class _Gathering:
    """Whole tensors for the role's first rank, from the ranks of whichever pipeline stage has them. Collective."""

    def __init__(self, engine: TrainEngine, dtype: torch.dtype) -> None:
        self._group, self._dtype, self._device = engine.groups.everyone, dtype, engine.device
        self._here, self._adapters = dict(base_parameters(engine.model)), adapters(engine.model)
        said: list[Any] = [None] * self._group.size()
        dist.all_gather_object(said, {name: p.shape for name, p in self._here.items()}, group=self._group)
        self.shapes = _in_order({name: shape for shapes in said for name, shape in shapes.items()})
        """Of the whole model."""
        self._speaker = {name: next(i for i, has in enumerate(said) if name in has) for name in self.shapes}
        """The first rank of the group that has a part of it."""
        self._speaks_for_us = next(i for i, has in enumerate(said) if has == said[dist.get_rank(self._group)])

    def whole(self, name: str) -> Tensor | None:
        """On the CPU of the group's first rank; None on others."""
        rank, speaker = dist.get_rank(self._group), self._speaker[name]
        gathered = None
        if speaker == self._speaks_for_us:
            gathered = self._gather(name).cpu()
        if speaker == 0:
            return gathered if rank == 0 else None
        if rank == speaker:
            assert gathered is not None
            dist.send(gathered, group=self._group, group_dst=0)
        elif rank == 0:
            received = torch.empty(self.shapes[name], dtype=self._dtype)
            dist.recv(received, group=self._group, group_src=speaker)
            return received
        return None

    def _gather(self, name: str) -> Tensor:
        """Exchanged on the engine's device, wherever its shards are."""
        weight, adapter = self._here[name].detach(), self._adapters.get(name)
        if adapter is None:
            return whole_tensor(weight.to(self._dtype).to(self._device))  # cast first: half the bytes to move
        whole, down, up = (whole_tensor(part.detach().to(self._device)) for part in (weight, adapter.down, adapter.up))
        return Adapter(down, up, adapter.scale).merged(whole).to(self._dtype)


def _in_order(shapes: Mapping[str, torch.Size]) -> dict[str, torch.Size]:
    """By name, numbers by their value: the order of ranks and of checkpoints depends on the mesh."""

    def key(name: str) -> list[tuple[int, str]]:
        return [(int(part), "") if part.isdigit() else (-1, part) for part in name.split(".")]

    return {name: shapes[name] for name in sorted(shapes, key=key)}


def _names(files: Mapping[str, list[str]], shapes: Mapping[str, torch.Size]) -> dict[str, list[str]]:
    """The names that the parameters of each file have in it."""
    return {
        file: [piece.name for name in names for piece in pieces(name, shapes[name])] for file, names in files.items()
    }


def _as_in_files(name: str, whole: Tensor) -> dict[str, Tensor]:
    parts = {piece.name: whole[piece.index] for piece in pieces(name, whole.shape)}
    # tensors of a file must not share their memory
    return {name: whole} if len(parts) == 1 else {part: tensor.clone() for part, tensor in parts.items()}
