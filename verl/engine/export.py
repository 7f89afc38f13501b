"""A trained model as a Hugging Face folder for transformers and vLLM, from a running engine or from a checkpoint."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from verl.engine.checkpoint import COMPANIONS
from verl.engine.hf_folder import MAX_FILE_BYTES, HFFolder, plan_files
from verl.engine.manifest import BrokenCheckpointError, find
from verl.engine.shards import MODEL, Reader
from verl.engine.train_engine import TrainEngine
from verl.errors import UserError
from verl.flow.board import Board
from verl.model.load import hf_parameters


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
    parameters = dict(hf_parameters(engine.model))
    files = plan_files({name: p.numel() * dtype.itemsize for name, p in parameters.items()}, max_file_bytes)
    folder = None
    if board.rank == ranks[0]:
        folder = HFFolder(out, source_folder, tokenizer_folder, files, dtype, replace)
    for file, names in files.items():
        held: dict[str, Tensor] = {}
        with board.waiting([rank for rank in ranks if rank != board.rank], f"its shards of {file}"):
            for name in names:
                whole = _gather(parameters[name], dtype)
                if folder is not None:
                    held[name] = whole.cpu()
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
) -> None:
    """The same from run_dir/checkpoints/step_N, in one process without a job. Memory: one weight file.

    Raises UserError when the checkpoint is broken or lacks the role, or when `out` exists and is not to be replaced.
    """
    try:
        found = find(checkpoint)
    except BrokenCheckpointError as error:
        raise UserError(f"{error}. Name a folder like run_dir/checkpoints/step_100.") from error
    if role not in found.manifest.meshes:
        raise UserError(f"{checkpoint} holds {', '.join(found.manifest.meshes)}, no '{role}'.")
    reader = Reader(checkpoint / role)
    shapes = {name: entry.size for name, entry in reader.tensors().items() if name.startswith(MODEL)}
    sizes = {name.removeprefix(MODEL): shape.numel() * dtype.itemsize for name, shape in shapes.items()}
    files = plan_files(sizes, max_file_bytes)
    folder = HFFolder(out, checkpoint / role / COMPANIONS, None, files, dtype, replace)
    for file, names in files.items():
        folder.write(file, {name: reader.whole(MODEL + name).to(dtype) for name in names})
    folder.publish()


def _gather(parameter: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast first: half the bytes to move."""
    cast = parameter.detach().to(dtype)
    return cast.full_tensor() if isinstance(cast, DTensor) else cast
