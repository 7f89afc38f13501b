"""TensorBoard, Weights & Biases, MLflow and the others, through accelerate's trackers."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import PartialState
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker, filter_trackers, get_available_trackers
from accelerate.utils import LoggerType

from verl.errors import UserError
from verl.monitor.redact import redact, redact_argument

TENSORBOARD_FOLDER = "tensorboard"


def check_trackers(names: Sequence[str]) -> None:
    """Raises ValueError, for all bad names at once, if a tracker is unknown or its package is not installed."""
    usable = set(map(str, get_available_trackers())) | (LOGGER_TYPE_TO_CLASS.keys() - set(LoggerType.list()))
    problems = []
    for name in names:
        if name not in LOGGER_TYPE_TO_CLASS:
            problems.append(f"{name!r} is none of {', '.join(sorted(LOGGER_TYPE_TO_CLASS))}")
        elif name not in usable:
            problems.append(f"{name!r} is not installed: pip install {_PACKAGES.get(name, name)}")
    if problems:
        raise UserError(f"trainer.trackers: {'; '.join(problems)}; or leave it out")


class Trackers:
    """The trackers that `trainer.trackers` names. Every rank makes one; only rank 0's does anything."""

    def __init__(
        self,
        names: Sequence[str],
        run_dir: str | Path,
        *,
        project: str,
        experiment: str,
        config: Mapping[str, Any],
        first_step: int = 0,
    ) -> None:
        """Start them, after the process group. `config` is stored as hyperparameters, flat and without its secrets.

        `first_step` is the first step this run will log: TensorBoard hides what an earlier attempt wrote from there on.
        """
        check_trackers(names)
        self._trackers: list[GeneralTracker] = []
        if not names or (dist.is_initialized() and dist.get_rank() != 0):
            return
        _adopt_process_group()
        options = {
            "tensorboard": {"purge_step": first_step},
            "wandb": {"name": experiment, "dir": str(run_dir)},
            "mlflow": {"run_name": experiment},
        }
        for name in map(str, filter_trackers(list(names), run_dir)):
            tracker = LOGGER_TYPE_TO_CLASS[name]
            if tracker.requires_logging_directory:
                run = TENSORBOARD_FOLDER if name == "tensorboard" else experiment
                self._trackers.append(tracker(run, str(run_dir), **options.get(name, {})))
            else:
                self._trackers.append(tracker(project, **options.get(name, {})))
        for tracker in self._trackers:
            with _redacted_command_line():
                tracker.start()
            tracker.store_init_configuration(flatten(redact(dict(config))))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for tracker in self._trackers:
            tracker.log(dict(metrics), step=step)

    def close(self) -> None:
        for tracker in self._trackers:
            tracker.finish()
        self._trackers = []


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, bool | int | float | str]:
    """Nested settings as `actor.optim.lr`: the plain values that every tracker takes. Lists become JSON text."""
    flat: dict[str, bool | int | float | str] = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            # str(): the member of a StrEnum is written as the text that it is
            plain = str(value) if isinstance(value, str) else value
            flat[f"{prefix}{key}"] = (
                plain if isinstance(plain, bool | int | float | str) else json.dumps(plain, default=str)
            )
    return flat


_PACKAGES = {"comet_ml": "comet-ml", "aim": "'aim<4'"}


@contextmanager
def _redacted_command_line() -> Iterator[None]:
    """wandb and others record sys.argv when they start, and overrides may hold secrets."""
    arguments = sys.argv
    sys.argv = [redact_argument(argument) for argument in arguments]
    try:
        yield
    finally:
        sys.argv = arguments


def _adopt_process_group() -> None:
    """Make accelerate's process state from the process group that there is.

    The trackers ask that state whether they are on the main process. With cpu=False it takes every rank of a CPU job
    for the main one, and on GPUs it sets the current device; with cpu=True it takes the group as it is, but changes
    the number of threads where OMP_NUM_THREADS is unset. Under torchrun and without a group it would make one.
    """
    assert dist.is_initialized() or "LOCAL_RANK" not in os.environ, "trackers are started before the process group"
    num_threads = torch.get_num_threads()
    PartialState(cpu=True)
    torch.set_num_threads(num_threads)
