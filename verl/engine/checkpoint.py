"""The run's checkpoints: saved by all ranks, published by one rename, found again whole or not at all."""

from __future__ import annotations

import base64
import json
import logging
import secrets
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from verl.engine import durable
from verl.engine.adapter_files import check_scale, write_config
from verl.engine.background import Background
from verl.engine.hf_folder import copy_companions
from verl.engine.manifest import TRAINER, BrokenCheckpointError, Found, Manifest, find, sizes, step_folder, step_folders
from verl.engine.shards import load_engine, save_tensors
from verl.engine.share import Learnt, Share
from verl.engine.train_engine import TrainEngine
from verl.errors import UserError
from verl.flow.circle import Circle
from verl.flow.job import Job
from verl.flow.signs import Signs

COMPANIONS = "hf"
"""In a role's folder: what a Hugging Face folder has beside weights."""

logger = logging.getLogger(__name__)


class Checkpoints:
    """run_dir/checkpoints, which all nodes see under the same path. All methods are collective over the job.

    step_N/ROLE/          shards of parameters and AdamW's state by Hugging Face name (torch.distributed.checkpoint)
    step_N/ROLE/hf/       config and tokenizer, for an export, and the config of adapters
    step_N/trainer.json   what rank 0 says of the run's position
    step_N/ranks/         what each rank says of its own
    step_N/manifest.json  the size of every file; written last

    An exception on one rank is for that rank to raise: nothing is published, and the job ends.
    """

    def __init__(
        self,
        run_dir: Path,
        keep: int,
        job: Job,
        tokenizer_folder: Path | None = None,
        background: Background | None = None,
    ) -> None:
        """`keep`: newest checkpoints that stay; 0: all. `tokenizer_folder`: where it is not the models' own.

        `background`: writes them while the run goes on; None: `save` lasts until one is published.
        """
        self.folder, self.keep, self.job, self.tokenizer_folder = run_dir / "checkpoints", keep, job, tokenizer_folder
        self._background = background

    def prepare(self) -> None:
        """At the start of a run: the folder is there, all ranks share it, and what a killed save left is gone.

        Raises UserError on every rank when rank 0 cannot write there, or some do not see what it writes.
        """
        name = f".seen_by_all_{secrets.token_hex(8)}"
        self.job.together(lambda: self._make(name) if self.job.is_main else None)
        mark = self.folder / self.job.hand_over.agree(name, source=0)
        blind = [rank for rank, sees in enumerate(self.job.everywhere(mark.exists())) if not sees]
        if self.job.is_main:
            mark.unlink()
        if blind:
            raise UserError(_not_shared(self.folder, blind))

    def _make(self, name: str) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            for path in durable.leftovers(self.folder):
                logger.warning("removed %s, which a save that did not end had left", path)
                shutil.rmtree(path)
            (self.folder / name).touch()
        except OSError as error:
            raise UserError(
                f"trainer.run_dir: {self.folder.absolute()} cannot be written: {error}. Set it to a folder of yours."
            ) from error

    # -- save --------------------------------------------------------------------------------------------------------

    def save(
        self,
        step: int,
        engines: Mapping[str, TrainEngine],
        trainer_state: dict[str, Any],
        rank_state: Mapping[str, bytes],
    ) -> None:
        """Publishes step_`step` once every rank has said that its part is written: now, or in the background.

        `engines`: the trained roles that this rank serves. `trainer_state`: anything JSON holds; rank 0's is written.
        `rank_state`: this rank's own, given back to the same rank of the same mesh. Raises UserError on every rank when
        the disk of one refuses; in the background then `raise_if_failed` and `finish` do.
        """
        roles = {role: Learnt.of(engine) for role, engine in engines.items()}
        background = self._background
        if background is not None:
            background.finish()  # what it writes are the last copies
            roles = {role: replace(of, here=background.copies[role].take(of.readable)) for role, of in roles.items()}
        share = Share(step, json.dumps(trainer_state).encode(), rank_state, roles)
        if background is None:
            groups = {role: engine.groups.everyone for role, engine in engines.items()}
            self._write(share, replace(self.job.circle, what="a checkpoint"), groups)
        else:
            circle, groups = background.circle, background.groups
            background.start(f"writes step_{step}", lambda: self._write(share, circle, groups))

    def raise_if_failed(self) -> None:
        """Raises what has gone wrong in the background."""
        if self._background is not None:
            self._background.raise_if_failed()

    def finish(self) -> None:
        """Waits for what is being written in the background."""
        if self._background is not None:
            self._background.finish()

    def _write(self, share: Share, circle: Circle, groups: Mapping[str, dist.ProcessGroup]) -> None:
        """By all ranks together, each of which speaks on its circle and its roles' groups alone."""
        target = step_folder(self.folder, share.step)
        part = durable.part_of(target)
        circle.together(lambda: self._start(target))
        circle.together(lambda: self._write_share(share, part, circle.signs, groups))
        meshes = circle.everywhere({role: learnt.mesh for role, learnt in share.roles.items()})
        if self.job.is_main:
            with durable.naming(part):
                durable.write(part / TRAINER, share.trainer_state)
                Manifest(share.step, self.job.world, _merged(meshes), sizes(part)).write(part)
                durable.publish(target)
                self._set_later_ones_aside(share.step)
                self._remove_old_ones()

    def _start(self, target: Path) -> None:
        if self.job.is_main:
            with durable.naming(target):
                (durable.start(target) / "ranks").mkdir()

    def _write_share(self, share: Share, part: Path, signs: Signs, groups: Mapping[str, dist.ProcessGroup]) -> None:
        if not part.is_dir():
            raise UserError(_not_shared(self.folder, [self.job.rank]))
        problems: list[str] = []
        for role, learnt in sorted(share.roles.items()):
            try:
                save_tensors(learnt.tensors, part / role, groups[role], signs, learnt.here)
            except UserError as error:  # its peers go on to the next role, so this rank does
                problems += error.problems
        with durable.naming(part):
            for role, learnt in share.roles.items():
                if dist.get_rank(groups[role]) == 0:
                    copy_companions(learnt.model_folder, part / role / COMPANIONS, self.tokenizer_folder)
                    if learnt.adapters is not None:
                        write_config(learnt.adapters, part / role / COMPANIONS)
            _write_rank_state(part, self.job.rank, share.rank_state)
        if problems:
            raise UserError(*problems)

    def _set_later_ones_aside(self, step: int) -> None:
        """Resuming must go on with this run, not with an attempt that it left behind."""
        for later, folder in step_folders(self.folder).items():
            if later > step:
                aside = folder.with_name(f"abandoned_{folder.name}")
                if aside.exists():
                    durable.discard(aside)
                folder.rename(aside)
                logger.warning("%s is of an attempt that this run left behind; it is now %s", folder, aside)

    def _remove_old_ones(self) -> None:
        if self.keep == 0:
            return
        folders = step_folders(self.folder)
        whole = [step for step, folder in folders.items() if _is_whole(folder)]
        for step, folder in folders.items():
            if step < whole[-self.keep :][0]:
                durable.discard(folder)

    # -- find and load -----------------------------------------------------------------------------------------------

    def latest(self) -> Found | None:
        """The newest whole checkpoint of the run, the same on every rank. Broken ones are skipped with a warning."""
        newest = self._newest() if self.job.is_main else None
        folder = self.job.hand_over.agree(newest and str(newest.folder), source=0)
        return None if folder is None else find(Path(folder))

    def at(self, folder: Path) -> Found:
        """The checkpoint in `folder`. Raises UserError on every rank if one of them sees no whole one there."""

        def look() -> Found:
            try:
                return find(folder)
            except BrokenCheckpointError as error:
                raise UserError(
                    f"trainer.resume_path: {error}. It is a folder like run_dir/checkpoints/step_100, which all nodes "
                    "see under the same path."
                ) from error

        return self.job.together(look)

    def check(self, found: Found, roles: Iterable[str]) -> None:
        """Raises UserError when the checkpoint lacks one of the roles that a run trains."""
        for role in roles:
            if role not in found.manifest.meshes:
                raise UserError(
                    f"{found.folder} holds {_list(found.manifest.meshes)}, but this run trains the {role} too. Resume "
                    f"with the settings of the run that wrote it, or start anew with another trainer.experiment_name."
                )

    def load(self, found: Found, engines: Mapping[str, TrainEngine]) -> tuple[dict[str, Any], dict[str, bytes] | None]:
        """Fills the engines; (trainer state, this rank's state). The latter is None when ranks or meshes are others.

        Raises UserError when the checkpoint lacks a role or is of another model.
        """
        self.check(found, engines)
        for role in sorted(found.manifest.meshes):  # on all ranks alike: what one role's refuse ends the others too
            self.job.together(partial(self._load_role, found, role, engines))
        same = self._meshes(engines) == found.manifest.meshes and self.job.world == found.manifest.world
        return found.trainer_state, _read_rank_state(found.folder, self.job.rank) if same else None

    def _meshes(self, engines: Mapping[str, TrainEngine]) -> dict[str, Any]:
        """Every role's mesh, on every rank: a synchronisation of the job."""
        return _merged(self.job.everywhere({role: e.groups.mesh.mesh.tolist() for role, e in engines.items()}))

    def _load_role(self, found: Found, role: str, engines: Mapping[str, TrainEngine]) -> None:
        if role in engines:
            check_scale(engines[role], role, found.folder / role / COMPANIONS)
            load_engine(engines[role], found.folder / role, self.job.board)

    def _newest(self) -> Found | None:
        for folder in reversed(step_folders(self.folder).values()):
            try:
                return find(folder)
            except BrokenCheckpointError as error:
                logger.warning("skipped a broken checkpoint: %s", error)
        return None


def _merged(meshes: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """What the ranks say of the roles that they serve, together."""
    return {role: mesh for said in meshes for role, mesh in said.items()}


def _is_whole(folder: Path) -> bool:
    try:
        find(folder)
    except BrokenCheckpointError:
        return False
    return True


def _rank_file(folder: Path, rank: int) -> Path:
    return folder / "ranks" / f"rank_{rank}.json"


def _write_rank_state(folder: Path, rank: int, state: Mapping[str, bytes]) -> None:
    text = json.dumps({name: base64.b64encode(value).decode() for name, value in state.items()})
    durable.write(_rank_file(folder, rank), text.encode())


def _read_rank_state(folder: Path, rank: int) -> dict[str, bytes]:
    return {name: base64.b64decode(text) for name, text in json.loads(_rank_file(folder, rank).read_bytes()).items()}


def _not_shared(folder: Path, ranks: list[int]) -> str:
    return (
        f"trainer.run_dir: what rank 0 writes to {folder.absolute()}, rank {_list(ranks)} does not see. "
        "Set it to a folder that all nodes mount under the same path."
    )


def _list(items: Any) -> str:
    return ", ".join(map(str, items))
