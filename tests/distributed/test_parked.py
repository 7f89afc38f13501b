"""An engine whose tensors leave its device between steps learns the same bits, and can be read and saved then."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from scripts.make_tiny_model import make_tiny_model
from tests.support.adapters import fill_adapters
from tests.support.engines import Layout, assert_equal, learnt, make_engines, placed, train
from tests.support.ranks import run_ranks
from verl.config import LoraConfig
from verl.engine.background import Background
from verl.engine.checkpoint import Checkpoints
from verl.engine.train_engine import TrainEngine
from verl.flow.job import Job, start_job
from verl.flow.placement import Placement
from verl.model.load import local_tensor
from verl.model.packing import Sequences

pytestmark = [pytest.mark.dist, pytest.mark.timeout(900)]

LORA = LoraConfig(rank=3, alpha=8)
CASES: dict[str, tuple[Layout, dict[str, Any]]] = {
    "FSDP 2": ({"actor": (1, 0), "critic": (0, 1)}, {}),
    "TP 2": ({"actor": Placement("actor", (0, 1), tp=2)}, {}),
    "two stages": ({"actor": Placement("actor", (0, 1), pp=2)}, {}),
    "two copies, offloaded": ({"actor": Placement("actor", (0, 1), fsdp_size=1)}, {"offload_optimizer": True}),
    "LoRA, FSDP 2": ({"actor": (0, 1)}, {"lora": LORA}),
    "LoRA, TP 2": ({"actor": Placement("actor", (0, 1), tp=2)}, {"lora": LORA}),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {role: make_tiny_model(folder / role, num_layers=2, tied=True) for role in ("actor", "critic")}


def bytes_in_process() -> int:
    """Of all tensors, but for host memory, which is of bytes."""
    found: dict[int, int] = {}
    for thing in gc.get_objects():
        if isinstance(thing, Tensor) and thing.device.type == "cpu" and thing.dtype is not torch.uint8:
            storage = local_tensor(thing.detach()).untyped_storage()
            found[storage._cdata] = storage.nbytes()
    return sum(found.values())


def copied(shards: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: shards[name].clone() for name in shards}


def outputs(engine: TrainEngine) -> Tensor:
    ids = torch.arange(3, 12)
    made = engine.forward(Sequences.responses([ids, ids + 20], [ids + 7, ids[:4]]))
    return torch.empty(0) if made is None else made.values


def train_both(job: Job, layout: Layout, models: Mapping[str, Path], settings: dict[str, Any]) -> dict[str, int]:
    """Two steps at home, and two with an absence before each; what they came to is the same. Bytes by what."""
    home, parked = (make_engines(job, layout, models, **settings) for _ in range(2))
    for engine in [*home.values(), *parked.values()]:
        fill_adapters(engine)
    sizes: dict[str, int] = {}
    for number in range(2):
        sizes["home"] = bytes_in_process() if number else 0
        wanted = {role: copied(engine.shards()) for role, engine in home.items()}
        shards = {role: engine.shards() for role, engine in parked.items()}
        for engine in parked.values():
            engine.parked.leave()
            engine.parked.leave()
            with pytest.raises(AssertionError, match="the device"):
                outputs(engine)
        for role, shard in shards.items():
            assert_equal(copied(shard), wanted[role])
            assert [shard[name].stride() for name in shard] == [wanted[role][name].stride() for name in shard]
        del shards, wanted
        sizes["away"] = bytes_in_process() if number else 0
        for engine in parked.values():
            engine.parked.come_back()
            engine.parked.come_back()
        for role in home:
            assert torch.equal(outputs(home[role]), outputs(parked[role]))
        train(home, 1)
        train(parked, 1)
        for role in home:
            assert_equal(learnt(home[role]), learnt(parked[role]))
    sizes["held"] = sum(size_of(engine) for engine in parked.values())
    sizes["host"] = sum(engine.parked.host_bytes for engine in parked.values())
    return sizes


def size_of(engine: TrainEngine) -> int:
    """Bytes of parameters and AdamW's state on this rank, by their shapes."""
    assert engine.optimizer is not None
    states = [value for state in engine.optimizer.adamw.state.values() for value in state.values()]
    return sum(local_tensor(t.detach()).nbytes for t in [*engine.model.parameters(), *states])


def train_all(models: Mapping[str, Path]) -> dict[str, dict[str, int]]:
    job = start_job(stage_timeout=300, check_program=False)
    found = {name: train_both(job, layout, models, settings) for name, (layout, settings) in CASES.items()}
    job.close()
    return found


def test_absences_change_no_bit_and_free_the_memory(models: dict[str, Path]) -> None:
    for rank in run_ranks(2, train_all, models):
        for name, sizes in rank.items():
            freed = sizes["home"] - sizes["away"]
            assert sizes["held"] <= freed < 1.2 * sizes["held"], (name, sizes)  # FSDP pads shards
            assert sizes["host"] >= sizes["held"]


# -- checkpoints -------------------------------------------------------------------------------------------------------

LAYOUT: Layout = {"actor": (0, 1), "critic": Placement("critic", (1, 0), tp=2)}


def save_while_away(models: dict[str, Path], run_dir: Path) -> None:
    """Before the first step too, when AdamW has no state yet; in the background it is written while they train on."""
    job = start_job(stage_timeout=300, check_program=True)
    background = Background(job, placed(LAYOUT))
    for name, how in (("at once", None), ("background", background)):
        checkpoints = Checkpoints(run_dir / name, 0, job, background=how)
        engines = make_engines(job, LAYOUT, models)
        for step in range(2):
            for engine in engines.values():
                engine.parked.leave()
            checkpoints.save(step, engines, {}, {})
            for engine in engines.values():
                engine.parked.come_back()
            wanted = {role: learnt(engine) for role, engine in engines.items()}
            train(engines, 1)
            checkpoints.finish()
            loaded = make_engines(job, LAYOUT, models)
            train(loaded, 1)
            checkpoints.load(checkpoints.at(run_dir / name / "checkpoints" / f"step_{step}"), loaded)
            for role, engine in loaded.items():
                assert_equal(learnt(engine), wanted[role])
    job.close()


def test_a_checkpoint_of_an_engine_that_is_away(models: dict[str, Path], tmp_path: Path) -> None:
    run_ranks(2, save_while_away, models, tmp_path)
