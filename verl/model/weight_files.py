"""The tensors of a model's folder, read a part at a time."""

from __future__ import annotations

import json
import mmap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from verl.errors import UserError
from verl.model.pieces import Box

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Of weights, by their names in the files."""
STEP_BYTES = 4 << 20
"""Of a file that are in this process's memory at a time."""


@dataclass(frozen=True)
class _Stored:
    """A tensor in a file, which is mapped from its beginning."""

    pages: mmap.mmap
    dtype: str
    shape: tuple[int, ...]
    start: int
    """Its first byte."""

    def view(self) -> Tensor:
        dtype, count = DTYPES[self.dtype], torch.Size(self.shape).numel()
        if not count:
            return torch.empty(self.shape, dtype=dtype)
        return torch.frombuffer(self.pages, dtype=dtype, count=count, offset=self.start).view(self.shape)


class Safetensors:
    """All *.safetensors of a folder.

    Pages of a mapped file count as memory of the process that has read them for as long as they are mapped, so that a
    rank would have its part of the file beside its shards: here they go again after every few of them.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise UserError(
                f"the model folder {folder} holds no *.safetensors file. Save the model with save_pretrained."
            )
        self._stored: dict[str, _Stored] = {}
        for file in files:
            self._stored |= _index(file)

    def __contains__(self, name: str) -> bool:
        return name in self._stored

    def shape(self, name: str) -> tuple[int, ...]:
        return self._stored[name].shape

    def dtype(self, name: str) -> str:
        """As the files spell it: F32, BF16 and so on."""
        return self._stored[name].dtype

    def names(self) -> list[str]:
        return list(self._stored)

    def read_into(self, target: Tensor, name: str, box: Box) -> None:
        """Copies a part of a tensor whose dtype is one of `DTYPES` into a tensor of that part's shape."""
        stored = self._stored[name]
        whole = stored.view()
        source = whole[box]
        if not source.numel():
            return
        rows = max(1, STEP_BYTES // whole[0].nbytes)  # a part of a row may lie on all of its pages
        for part, into in zip(source.split(rows), target.split(rows), strict=True):
            into.copy_(part)
            stored.pages.madvise(mmap.MADV_DONTNEED)


def _index(file: Path) -> dict[str, _Stored]:
    """What is where in a file."""
    try:
        with safe_open(file, "pt"):  # finds out whether it is whole
            pass
    except (SafetensorError, OSError) as error:
        raise UserError(f"{file} cannot be read: {error}. Copy or fetch it again.") from error
    # a header is its length in 8 bytes and JSON; offsets count from its end
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        header: dict[str, dict[str, Any]] = json.loads(opened.read(length))
        # private to this process, and so may be given to torch, which wants to be able to write
        pages = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)
    return {
        name: _Stored(pages, entry["dtype"], tuple(entry["shape"]), 8 + length + entry["data_offsets"][0])
        for name, entry in header.items()
        if name != "__metadata__"
    }
