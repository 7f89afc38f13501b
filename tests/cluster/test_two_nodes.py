"""The two-node example, for real: two hosts, eight processes, the command word for word."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from scripts.make_tiny_model import make_tiny_model
from tests.support.hosts import hosts, requires_hosts
from tests.support.jobs import ROOT
from tests.support.node_jobs import make_checkout, started
from tests.support.prompt_files import write_parquet
from verl.generation.vllm.probe import probe

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.slow,
    requires_hosts,
    pytest.mark.vllm,
    pytest.mark.skipif(not probe("cpu").usable, reason=probe("cpu").message),
    pytest.mark.timeout(3000),
]

MESH = (ROOT / "configs" / "device_mesh" / "two_nodes_8.yaml").read_text()
COMMAND = [
    "torchrun", "--nnodes=2", "--nproc_per_node=4", "--rdzv_backend=c10d", "--rdzv_endpoint=node1:29400",
    "--rdzv_id=verl_ppo_2024", "train_ppo.py", "--config", "configs/ppo_config.yaml",
    "--device_mesh", "device_mesh.yaml",
]  # fmt: skip
ON_FSDP = [f"device_mesh.actor.parallelism.{kind}_parallel_size=1" for kind in ("tensor", "pipeline")]
LIMIT = 2400.0
"""Seconds for a run of eight processes and a split engine on two busy cores."""
STEPS = 2


@dataclass
class Result:
    codes: list[int]
    said: list[str]
    run_dir: Path

    @property
    def metrics(self) -> list[dict[str, float]]:
        return [json.loads(line) for line in (self.run_dir / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(
    scope="module",
    params=[pytest.param([], id="pp x tp"), pytest.param(ON_FSDP, id="fsdp")],
)
def result(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Result]:
    """One run that all tests look at: what `make demo` leaves under outputs/, replaced by something tiny."""
    with hosts(2, tmp_path_factory.mktemp("nodes")) as (node1, node2):
        checkout = make_checkout(node1.shared / "verl", MESH)
        demo = checkout / "outputs" / "demo"
        make_tiny_model(demo / "model", num_heads=8, num_layers=4)
        allow_positions(demo / "model", 1024)
        (demo / "data").mkdir()
        write_parquet(demo / "data" / "train.parquet", prompts(16 * STEPS))
        write_parquet(demo / "data" / "val.parquet", prompts(2))
        command = [*COMMAND, *request.param]
        with started(checkout, (node1, command, {}), (node2, command, {})) as parts:
            codes = [part.wait(LIMIT) for part in parts]
            yield Result(codes, [part.said for part in parts], checkout / "outputs" / "verl" / "ppo")


def prompts(count: int) -> list[dict[str, object]]:
    return [
        {
            "data_source": "last_number",
            "prompt": [{"role": "user", "content": f"What is {i} times 3?"}],
            "reward_model": {"style": "rule", "ground_truth": str(3 * i)},
            "extra_info": {"index": i},
        }
        for i in range(count)
    ]


def allow_positions(model: Path, count: int) -> None:
    """The settings of the file, 512 tokens of prompt and of response, fit into the tiny model."""
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": count}))


def test_it_ends_well_on_both_nodes(result: Result) -> None:
    assert result.codes == [0, 0], "\n".join(result.said)[-6000:]


def test_every_step_learns_and_is_logged_once(result: Result) -> None:
    trained = [line for line in result.metrics if "actor/pg_loss" in line]
    assert [line["step"] for line in trained] == list(range(1, STEPS + 1))
    for line in trained:
        assert line["actor/grad_norm"] > 0 and line["critic/grad_norm"] > 0
        assert round(line["perf/samples_per_s"] * line["perf/time_per_step"]) == 16


def test_the_engine_on_node2_has_the_actors_weights_of_both_nodes(result: Result) -> None:
    """With others its log-probs would not be those of the trainer. In bfloat16 they agree to some hundredths."""
    for line in result.metrics:
        if "rollout/logprob_gap_mean" in line:
            assert line["rollout/logprob_gap_mean"] < 0.05


def test_rank_0_says_what_the_nodes_are(result: Result) -> None:
    assert "node1: rank 0-3, " in result.said[0] and "node2: rank 4-7, " in result.said[0]
    assert "node2: rank 4-7" not in result.said[1]


def test_the_engines_log_is_in_the_shared_folder(result: Result) -> None:
    assert (result.run_dir / "logs" / "vllm_0.log").stat().st_size > 0
