"""The torch backend on several ranks: a replica that is split samples what a whole one samples."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from scripts.make_tiny_model import make_tiny_model
from tests.support.ranks import RankFailed, run_ranks
from tests.unit.generation.inprocess.test_engine import by_row, requests, sampling
from verl.errors import UserError
from verl.flow.job import Job, start_job
from verl.flow.placement import Placement, make_groups
from verl.generation.inprocess import TorchEngine
from verl.generation.inprocess.peers import Peers
from verl.generation.types import Sample, Sampling
from verl.model.load import parameter_shapes, read_config
from verl.reshard.boxes import generation_domains
from verl.reshard.layout import volume

pytestmark = pytest.mark.dist

SETTINGS = {
    "drawn": sampling(max_tokens=24, top_p=0.95, top_k=100, stop_token_ids=tuple(range(3, 12))),
    "greedy": sampling(max_tokens=24, temperature=0.0),
}
SLOTS = 5
"""Fewer than requests: sequences join and leave."""


def made(folder: Path, job: Job | None, ranks: tuple[int, ...]) -> TorchEngine:
    """The replica that this rank is in, with the folder's weights; a whole one without a job."""
    peers, progress = None, lambda: None
    if job is not None:
        place = Placement("rollout", ranks, tp=len(ranks), leaders_only=True)
        groups = make_groups([place], job.rank, "cpu", job.timeout)["rollout"]
        peers, progress = Peers(groups.mesh.get_group("tp")), job.board.beat
    engine = TorchEngine(str(folder), torch.float32, torch.device("cpu"), SLOTS, False, progress, peers)
    place = Placement("rollout", ranks, tp=len(ranks), leaders_only=True)
    config = read_config(folder, False)
    domains = generation_domains(parameter_shapes(folder, config), config, place)
    boxes = domains[0 if job is None else ranks.index(job.rank)].boxes
    files = {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
    with torch.no_grad():
        for name, tensor in engine.weights().items():
            tensor.copy_(files[name][tuple(slice(*side) for side in boxes[name])])
    engine.commit(version=3)
    assert sum(tensor.numel() for tensor in engine.weights().values()) == sum(map(volume, boxes.values()))
    return engine


def samples(engine: TorchEngine, settings: Sampling) -> dict[int, Sample]:
    return by_row(engine.generate(requests(num_prompts=6, n=2), settings))


def generate(folder: Path, ranks: tuple[int, ...]) -> dict[str, dict[int, Sample]]:
    job = start_job(300, check_program=False)
    engine = made(folder, job, ranks)
    drawn = {name: samples(engine, settings) for name, settings in SETTINGS.items()}
    job.close()
    return drawn


@pytest.fixture
def folder(tmp_path: Path) -> Callable[[str], Path]:
    def make(architecture: str) -> Path:
        """8 query and 2 key-value heads. Qwen's projections have biases, Gemma's head is tied and its window short."""
        tied = architecture == "gemma3"
        return make_tiny_model(tmp_path / architecture, architecture, num_layers=3, num_kv_heads=2, tied=tied)

    return make


@pytest.mark.parametrize(
    "architecture, ranks",
    [("llama", (0, 1)), ("llama", (2, 0, 3, 1)), ("qwen2", (1, 0)), ("qwen3", (0, 1)), ("gemma3", (0, 1))],
)
def test_a_split_replica_samples_what_a_whole_one_samples(
    architecture: str, ranks: tuple[int, ...], folder: Callable[[str], Path]
) -> None:
    """In float32 sums on several ranks differ in the last digits alone, which no draw here hangs on."""
    path = folder(architecture)
    results = run_ranks(len(ranks), generate, path, ranks)
    whole = made(path, None, (0,))
    for name, settings in SETTINGS.items():
        expected = samples(whole, settings)
        assert len({len(sample.token_ids) for sample in expected.values()}) > 1 or name == "greedy"
        for drawn in (result[name] for result in results):
            assert {row: s.token_ids for row, s in drawn.items()} == {row: s.token_ids for row, s in expected.items()}
            for row, sample in drawn.items():
                assert sample.logprobs == pytest.approx(expected[row].logprobs, abs=1e-4)
                assert (sample.ended, sample.version) == (expected[row].ended, 3)


def break_one(folder: Path) -> None:
    job = start_job(300, check_program=False)
    engine = made(folder, job, (0, 1))
    if job.rank == 1:
        engine.weights()["model.norm.weight"].fill_(float("nan"))
    samples(engine, SETTINGS["drawn"])


def test_weights_that_are_broken_on_one_rank_end_all_ranks(folder: Callable[[str], Path]) -> None:
    """None of them goes on, and waits for one that has left."""
    with pytest.raises(RankFailed) as failed:
        run_ranks(2, break_one, folder("llama"))
    assert failed.value.tracebacks.keys() == {0, 1}
    assert all("FloatingPointError" in text for text in failed.value.tracebacks.values())


def refuse(folder: Path) -> str:
    job = start_job(300, check_program=False)
    with pytest.raises(UserError) as refused:
        made(folder, job, (0, 1, 2))
    job.close()
    return str(refused.value)


def test_a_model_that_does_not_split_is_refused_by_name(folder: Callable[[str], Path]) -> None:
    path = folder("llama")
    for message in run_ranks(3, refuse, path):
        assert message.startswith(f"rollout.tensor_parallel_size: 3: backend torch cannot cut {path} so (does not go ")
        assert message.endswith("set it to 1, or use backend vllm")
