"""A checkpoint's metadata is a pickle, which is read without running what it might carry."""

from __future__ import annotations

import os
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, Metadata

from verl.engine.shards import Reader
from verl.errors import UserError

DTYPES = (torch.float32, torch.bfloat16, torch.int64)


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, dict[str, Tensor]]:
    tensors = {f"model.{dtype}": torch.arange(12).view(3, 4).to(dtype) for dtype in DTYPES}
    save(tmp_path, tensors)
    return tmp_path, tensors


class PathlessWriter(dcp.FileSystemWriter):
    def storage_meta(self) -> None:
        return None


def save(folder: Path, state: dict[str, Any]) -> None:
    with warnings.catch_warnings(action="ignore"):
        dcp.save(state, storage_writer=PathlessWriter(folder), no_dist=True)


def test_whole_tensors_are_read_in_their_own_dtype(saved: tuple[Path, dict[str, Tensor]]) -> None:
    folder, tensors = saved
    reader = Reader(folder)
    assert {name: entry.size for name, entry in reader.tensors().items()} == dict.fromkeys(tensors, (3, 4))
    for name, tensor in tensors.items():
        read = reader.whole(name)
        assert read.dtype is tensor.dtype and torch.equal(read, tensor)


class Attack:
    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.file}",)


def test_metadata_that_would_run_a_command_is_refused(saved: tuple[Path, dict[str, Tensor]]) -> None:
    folder, _ = saved
    payload = pickle.dumps(Attack(folder / "harm"))
    pickle.loads(payload)
    assert (folder / "harm").exists(), "the attack works where nothing is in its way"
    (folder / "harm").unlink()
    (folder / ".metadata").write_bytes(payload)
    with pytest.raises(UserError, match=r"\.metadata cannot be read: it names posix\.system"):
        Reader(folder)
    assert not (folder / "harm").exists()


class ByName:
    """How the first releases of Python 3.11 pickle the member of an enum."""

    def __init__(self, owner: object, name: str) -> None:
        self.owner, self.name = owner, name

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self.owner, self.name)


def test_a_member_of_an_enum_is_read_however_python_pickles_it(saved: tuple[Path, dict[str, Tensor]]) -> None:
    folder, _ = saved
    member = _MEM_FORMAT_ENCODING.TORCH_CHANNELS_LAST
    metadata = Metadata({}, planner_data=ByName(_MEM_FORMAT_ENCODING, member.name))
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    assert Reader(folder).read_metadata().planner_data is member


def test_what_hangs_on_anything_else_is_refused(saved: tuple[Path, dict[str, Tensor]]) -> None:
    folder, _ = saved
    (folder / ".metadata").write_bytes(pickle.dumps(ByName(Metadata, "__init__")))
    with pytest.raises(UserError, match="it asks for __init__ of"):
        Reader(folder)


def test_entries_that_are_no_tensors_are_refused(tmp_path: Path) -> None:
    """They would be unpickled."""
    save(tmp_path, {"model.weight": torch.zeros(2), "notes": {"of": [1, 2]}})
    with pytest.raises(UserError, match="BytesStorageMetadata, which no checkpoint of verl needs"):
        Reader(tmp_path)


def test_metadata_that_is_cut_off_is_refused(saved: tuple[Path, dict[str, Tensor]]) -> None:
    folder, _ = saved
    os.truncate(folder / ".metadata", 40)
    with pytest.raises(UserError, match=r"\.metadata cannot be read"):
        Reader(folder)
