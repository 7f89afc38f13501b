"""Runs on the CPU in which every rank's memory counts as a device of its own, and a journal of who is there when."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from verl.config import PPOConfig
from verl.engine.parked import Parked
from verl.engine.train_engine import TrainEngine
from verl.generation.inprocess.engine import TorchEngine
from verl.generation.residency import sharing
from verl.mesh.spec import MeshSpec
from verl.reshard.execute import WeightSync
from verl.roles import build, build_rollout, turns
from verl.train import train


class Event(NamedTuple):
    rank: int
    what: str
    detail: str = ""


@dataclass
class Journal:
    """A file that all ranks append to: its order is that in which things happened."""

    path: Path

    def note(self, what: str, detail: object = "") -> None:
        line = json.dumps([int(os.environ["RANK"]), what, str(detail)]) + "\n"
        descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(descriptor, line.encode())
        os.close(descriptor)

    def read(self) -> list[Event]:
        return [Event(*json.loads(line)) for line in self.path.read_text().splitlines()]


@dataclass
class FakeEngine:
    """What a replica's leader has to put to sleep and to wake."""

    journal: Journal
    dies_at: int | None = None
    """In so many wakes of its KV cache from now it is gone."""
    awake: set[str] = field(default_factory=set)

    def sleep(self) -> None:
        time.sleep(0.02)  # as it does: others must wait for it
        self.awake.clear()
        self.journal.note("sleep")

    def wake(self, *tags: str) -> None:
        for tag in tags:
            if tag not in self.awake:
                self.awake.add(tag)
                self.journal.note("wake", tag)
                if self.dies_at is not None and tag == "kv_cache":
                    self.dies_at -= 1
                    if self.dies_at == 0:
                        raise RuntimeError("the engine has died")


def train_in_turns(config: PPOConfig, mesh: MeshSpec, path: Path, dies_at: int | None = None) -> None:
    """A rank of a run whose engines are the torch backend's, with a fake one on each replica's leader that sleeps."""
    journal = Journal(path)
    _watch(journal)
    turns.takes_turns = build_rollout.takes_turns = lambda rollout, others, job: sharing(rollout, others, job.rank)
    make, rollout = turns.make_turns, mesh.roles["rollout"]
    leaders = [device.index for device in rollout.devices][:: rollout.tensor_parallel_size]

    def make_turns(config: PPOConfig, engines: build_rollout.Engines, *rest: Any) -> turns.Turns:
        if int(os.environ["RANK"]) in leaders:
            engines.sleeper = FakeEngine(journal, dies_at)  # type: ignore[assignment]
        return make(config, engines, *rest)

    build.make_turns = make_turns
    train(config, mesh)


def _watch(journal: Journal) -> None:
    """Notes what happens, on the way in, or, where memory is given up, once that is done."""

    def before(owner: type, method: str, what: str) -> None:
        inner: Callable[..., Any] = getattr(owner, method)

        def watched(*args: Any, **kwargs: Any) -> Any:
            journal.note(what)
            return inner(*args, **kwargs)

        setattr(owner, method, watched)

    before(TrainEngine, "forward", "compute")
    before(TrainEngine, "train_step", "compute")
    before(TorchEngine, "generate", "generate")
    before(WeightSync, "run", "load")
    leave, come_back = Parked.leave, Parked.come_back

    def watched_leave(parked: Parked) -> None:
        if not parked.away:
            leave(parked)
            journal.note("leave", id(parked))

    def watched_return(parked: Parked) -> None:
        assert parked.away
        journal.note("return", id(parked))
        come_back(parked)

    Parked.leave, Parked.come_back = watched_leave, watched_return  # type: ignore[method-assign]
    torch.cuda.empty_cache = lambda: journal.note("free")


def trainers_of(events: Sequence[Event]) -> Mapping[int, set[str]]:
    """By rank those that ever leave."""
    found: dict[int, set[str]] = {}
    for event in events:
        if event.what == "leave":
            found.setdefault(event.rank, set()).add(event.detail)
    return found
