"""Responses written to a folder as they are sampled, and given back from it: two meshes compared on the same tokens."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from verl.errors import UserError
from verl.generation.types import Backend, Request, Sample, Sampling


class RecordingBackend:
    """Passes everything on to `inner` and writes each sample under its seed."""

    def __init__(self, inner: Backend, folder: Path, leader: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._inner, self._file = inner, (folder / f"samples_{leader}.jsonl").open("w")

    def begin_load(self) -> None:
        self._inner.begin_load()

    def take_bucket(self, number: int) -> None:
        self._inner.take_bucket(number)

    def await_bucket(self) -> None:
        self._inner.await_bucket()

    def commit(self, version: int) -> None:
        self._inner.commit(version)

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[Sample]:
        seeds = {request.row: request.seed for request in requests}
        for sample in self._inner.generate(requests, sampling):
            self._file.write(json.dumps({"seed": seeds[sample.row], **asdict(sample)}) + "\n")
            self._file.flush()
            yield sample

    def close(self) -> None:
        self._file.close()
        self._inner.close()


class ReplayBackend:
    """Gives back what a RecordingBackend wrote; it needs no model."""

    def __init__(self, folder: Path) -> None:
        files = sorted(folder.glob("samples_*.jsonl"))
        if not files:
            raise UserError(
                f"debug.replay_rollouts: {folder} holds no samples_*.jsonl. Record them with debug.record_rollouts."
            )
        lines = [json.loads(line) for file in files for line in file.read_text().splitlines()]
        self._samples = {line.pop("seed"): Sample(**line) for line in lines}

    def begin_load(self) -> None:
        """The samples are what they are."""

    def take_bucket(self, number: int) -> None:
        """No weights are read."""

    def await_bucket(self) -> None:
        """No weights are read."""

    def commit(self, version: int) -> None:
        """The samples are what they are."""

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[Sample]:
        for request in requests:
            if request.seed not in self._samples:
                raise UserError(
                    f"debug.replay_rollouts: row {request.row} was not recorded with this seed. "
                    f"Replay needs trainer.seed, data and batch sizes as they were recorded."
                )
            yield self._samples[request.seed]

    def close(self) -> None:
        """Nothing is held."""
