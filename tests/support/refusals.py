"""What `train` refuses, seen from every rank of a job: the message, and how far it had got."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.support.ranks import run_ranks
from verl.config import PPOConfig
from verl.errors import UserError
from verl.mesh.spec import MeshSpec
from verl.roles import build, build_rollout
from verl.train import train


@dataclass(frozen=True)
class Refusal:
    message: str
    engines: tuple[str, ...]
    """Trainers and rollout engines that some rank had begun to make before."""


def refusal(
    config: PPOConfig, mesh: MeshSpec, ranks: int, tamper: Callable[[], None] = lambda: None, timeout: float = 150.0
) -> Refusal:
    """The UserError of a job, the same on all ranks. `tamper` runs on each rank before `train`."""
    said = run_ranks(ranks, _refused, config, mesh, tamper, timeout=timeout)
    messages = {message for message, _ in said}
    assert len(messages) == 1, f"the ranks say different things: {messages}"
    return Refusal(messages.pop(), tuple(engine for _, engines in said for engine in engines))


def _refused(config: PPOConfig, mesh: MeshSpec, tamper: Callable[[], None]) -> tuple[str, list[str]]:
    begun: list[str] = []
    for module, name in ((build, "TrainEngine"), (build_rollout, "TorchEngine"), (build_rollout, "VllmEngine")):
        _note_calls(module, name, begun)
    tamper()
    try:
        train(config, mesh)
    except UserError as error:
        return str(error), begun
    raise AssertionError("it was not refused")


def _note_calls(module: Any, name: str, begun: list[str]) -> None:
    make = vars(module)[name]

    def noted(*args: Any, **kwargs: Any) -> Any:
        begun.append(name)
        return make(*args, **kwargs)

    setattr(module, name, noted)
