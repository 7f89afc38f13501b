"""What an engine has learnt, in a folder that each of its ranks writes its own shards to and any mesh can read."""

from __future__ import annotations

import io
import os
import pickle
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
)
from torch.futures import Future

from verl.engine import durable
from verl.engine.train_engine import TrainEngine
from verl.errors import UserError
from verl.flow.board import Board
from verl.flow.signs import Signs
from verl.model.load import hf_parameters

MODEL = "model."
"""Before the Hugging Face name of a parameter."""
_OPTIMIZER = "optimizer."
"""Before the Hugging Face name of a parameter and one of AdamW's names for its state."""
_STEPS_DONE = "steps_done"


def save_tensors(
    tensors: Mapping[str, Tensor],
    folder: Path,
    group: dist.ProcessGroup,
    signs: Signs,
    here: Mapping[str, Tensor] | None = None,
) -> None:
    """`engine_tensors` as a folder of torch.distributed.checkpoint. Collective over the engine's ranks, on `group`.

    `here`: this rank's part of each, on the CPU, where the tensors themselves may have changed. Raises UserError when
    this rank's disk refuses, for this rank to tell: the others leave in silence, and the folder is not whole.
    """
    with _Turns(signs, group, f"its shards of {folder.name}") as turns:
        try:
            dcp.save(
                dict(tensors),
                storage_writer=_Writer(folder, turns),
                planner=_SavePlanner(signs.beat, here),
                process_group=group,
            )
        except dcp.api.CheckpointException as error:
            failures = {rank: failure for rank, (failure, _) in error.failures.items()}
            if not all(isinstance(failure, UserError) for failure in failures.values()):
                raise
            if (own := failures.get(dist.get_rank(group))) is not None:
                raise own from None


def load_engine(engine: TrainEngine, folder: Path, board: Board) -> None:
    """Fills the engine from what `save_tensors` wrote on any mesh. Collective over the engine's ranks.

    Raises UserError, alike on all of them, when the folder is of another model.
    """
    tensors = engine_tensors(engine)
    reader = Reader(folder)
    peers = [rank for rank in dist.get_process_group_ranks(engine.groups.everyone) if rank != board.rank]
    with board.waiting(peers, f"its part of {folder.name}"):
        shapes = _whole_shapes(engine, tensors)
    _check_fits(engine, shapes, reader)
    with _Turns(board, engine.groups.everyone, f"its shards of {folder.name}") as turns:
        reader.turns = turns
        planner = _LoadPlanner(board.beat)
        dcp.load(dict(tensors), storage_reader=reader, planner=planner, process_group=engine.groups.everyone)
    if engine.optimizer is not None:
        engine.optimizer.steps_done = int(tensors[_STEPS_DONE])


@torch.no_grad()
def engine_tensors(engine: TrainEngine) -> dict[str, Tensor]:
    """Parameters, AdamW's state and the optimizer's step count, by name: the engine's own tensors but for the last.

    There are tensors alone in it: rates, betas and the like come from the config, so a resumed run may change them.
    """
    adapters_alone = engine.spec.lora is not None
    named = [(name, p) for name, p in hf_parameters(engine.model) if p.requires_grad or not adapters_alone]
    tensors = {MODEL + name: parameter.detach() for name, parameter in named}
    if engine.optimizer is None:
        return tensors
    for name, parameter in named:
        if parameter.requires_grad:
            state = engine.optimizer.state_of(parameter)
            tensors |= {f"{_OPTIMIZER}{name}.{key}": value for key, value in state.items()}
    tensors[_STEPS_DONE] = torch.tensor(engine.optimizer.steps_done)
    return tensors


def _whole_shapes(engine: TrainEngine, tensors: dict[str, Tensor]) -> dict[str, tuple[int, ...]]:
    """Of the tensors of all pipeline stages, alike on all of the engine's ranks."""
    said: list[Any] = [None] * engine.groups.everyone.size()
    here = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    dist.all_gather_object(said, here, group=engine.groups.everyone)
    return {name: shape for shapes in said for name, shape in shapes.items()}


def _check_fits(engine: TrainEngine, shapes: dict[str, tuple[int, ...]], reader: Reader) -> None:
    saved, model = reader.tensors(), engine.spec.folder
    problems = [
        f"'{name}' has shape {tuple(saved[name].size)} in the checkpoint, but {shape} in the model"
        for name, shape in shapes.items()
        if name in saved and tuple(saved[name].size) != shape
    ]
    problems += [f"'{name}' of the model is not in the checkpoint" for name in shapes if name not in saved]
    strangers = [name for name in saved if name.startswith(MODEL) and name not in shapes]
    problems += [f"'{name}' of the checkpoint is not in the model" for name in strangers]
    if problems:
        raise UserError(
            f"the checkpoint {reader.path} is not of the model {model}: {problems[0]} ({len(problems)} differences). "
            "A run goes on with the model and the adapters that it began with: set the role's path and lora to those, "
            "or start anew with another trainer.experiment_name."
        )


class _Turns:
    """Tells the board when this rank waits for its peers and when it works by itself.

    DCP's collectives stand before and after its reading and writing. Were the whole call a wait, then a rank whose disk
    hangs would be waited for by peers that it waits for, and the watchdog would name nobody.
    """

    def __init__(self, signs: Signs, group: dist.ProcessGroup, what: str) -> None:
        self._signs, self._what, self._wait = signs, what, ExitStack()
        self._peers = [rank for rank in dist.get_process_group_ranks(group) if rank != signs.rank]

    def __enter__(self) -> _Turns:
        self._begin_wait()
        return self

    def __exit__(self, *error: object) -> None:
        self._wait.close()

    def work(self, task: Callable[[], Future[Any]]) -> Future[Any]:
        self._wait.close()
        done = task()
        self._begin_wait()
        return done

    def _begin_wait(self) -> None:
        self._wait.enter_context(self._signs.waiting(self._peers, self._what))


class _Files(FileSystem):
    """Says which file could not be written, and what to do."""

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        with durable.naming(Path(path)), super().create_stream(path, mode) as stream:
            yield stream

    def mkdir(self, path: str | os.PathLike[str]) -> None:
        with durable.naming(Path(path)):
            super().mkdir(path)


class _Writer(dcp.FileSystemWriter):
    """Files are synced to the disk by DCP's own default; the path is not written into them."""

    def __init__(self, folder: Path, turns: _Turns) -> None:
        super().__init__(folder)
        self.fs = _Files()
        self._turns = turns

    def write_data(self, plan: dcp.SavePlan, planner: dcp.SavePlanner) -> Future[Any]:
        write = super().write_data
        return self._turns.work(lambda: write(plan, planner))

    def storage_meta(self) -> StorageMeta:
        return StorageMeta(save_id=self.save_id)


class Reader(dcp.FileSystemReader):
    """Runs no code that a checkpoint might carry.

    DCP reads tensors with `weights_only=True`, but it unpickles its `.metadata` and whatever is no tensor. Here the
    metadata may name nothing but the plain records that it is made of, of which the one for "no tensor" is none.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._metadata = self._read_metadata()
        self.turns: _Turns | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._metadata

    def read_data(self, plan: dcp.LoadPlan, planner: dcp.LoadPlanner) -> Future[None]:
        read = super().read_data
        return read(plan, planner) if self.turns is None else self.turns.work(lambda: read(plan, planner))

    def tensors(self) -> dict[str, TensorStorageMetadata]:
        """Shape and dtype of everything in the folder."""
        entries = self._metadata.state_dict_metadata
        return {name: entry for name, entry in entries.items() if isinstance(entry, TensorStorageMetadata)}

    def whole(self, name: str) -> Tensor:
        """One tensor on the CPU, in the dtype that it was saved in; without a process group."""
        entry = self.tensors()[name]
        tensor = torch.empty(entry.size, dtype=entry.properties.dtype)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            dcp.load({name: tensor}, storage_reader=self, no_dist=True)
        return tensor

    def _read_metadata(self) -> Metadata:
        file = Path(self.path) / ".metadata"
        try:
            return _MetadataUnpickler(io.BytesIO(file.read_bytes())).load()
        except (OSError, EOFError, pickle.UnpicklingError) as error:
            raise UserError(f"{file} cannot be read: {error}. Resume from another checkpoint.") from error


_METADATA_PARTS = {
    "torch": {"Size"} | {name for name, value in vars(torch).items() if isinstance(value, torch.dtype)},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.metadata": {
        "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta",
        "TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
    },
}  # fmt: skip


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str) -> Any:
        if (module_name, global_name) == ("builtins", "getattr"):
            return _member
        if global_name not in _METADATA_PARTS.get(module_name, ()):
            raise pickle.UnpicklingError(f"it names {module_name}.{global_name}, which no checkpoint of verl needs")
        return super().find_class(module_name, global_name)


def _member(kind: Any, name: str) -> Any:
    """In place of `getattr`, by which the first releases of Python 3.11 pickle the member of an enum."""
    if kind is not _MEM_FORMAT_ENCODING:
        raise pickle.UnpicklingError(f"it asks for {name} of {kind}, which no checkpoint of verl needs")
    return kind[name]


class _SavePlanner(dcp.DefaultSavePlanner):
    def __init__(self, beat: Callable[[], None], here: Mapping[str, Tensor] | None) -> None:
        super().__init__()
        self._beat, self._here = beat, here

    def lookup_object(self, index: MetadataIndex) -> Any:
        return super().lookup_object(index) if self._here is None else self._here[index.fqn]

    def resolve_data(self, write_item: Any) -> Tensor | io.BytesIO:
        self._beat()
        return super().resolve_data(write_item)


class _LoadPlanner(dcp.DefaultLoadPlanner):
    def __init__(self, beat: Callable[[], None]) -> None:
        super().__init__()
        self._beat = beat

    def commit_tensor(self, read_item: Any, tensor: Tensor) -> None:
        self._beat()
        super().commit_tensor(read_item, tensor)
