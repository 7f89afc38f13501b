"""The shipped meshes, and the examples of the introduction to the device mesh that they come from."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from verl.mesh.parse import parse
from verl.mesh.resolve import Process, resolve
from verl.mesh.spec import MeshSpec, RolloutSpec

FOLDER = Path(__file__).parents[3] / "configs" / "device_mesh"
FILES = sorted(FOLDER.glob("*.yaml"))

FIRST = """
# device_mesh.yaml
actor:
  devices: [0, 1]
  parallelism:
    fsdp: true
    tensor_parallel_size: 2
critic:
  devices: [2]
  parallelism:
    fsdp: false
rollout:
  devices: [3]
  backend: "vllm"
  max_num_seqs: 64
reward:
  devices: [2]
  dtype: "bfloat16"
"""
SECOND = """
actor:
  devices: ["node1:0", "node1:1", "node2:0", "node2:1"]
  parallelism:
    fsdp: true
    tensor_parallel_size: 2
    pipeline_parallel_size: 2
critic:
  devices: ["node1:2"]
  parallelism: {fsdp: false}
rollout:
  devices: ["node2:2", "node2:3"]
  backend: "vllm"
  tensor_parallel_size: 2
reward:
  devices: ["node1:3"]
"""
THIRD = """
actor:
  devices: [0, 1, 2, 3]
  parallelism:
    fsdp: true
    tensor_parallel_size: 2
    pipeline_parallel_size: 2
  hybrid_engine:
    enable: true
    activation_checkpointing: true
    offload_activations: false
"""


def shipped(name: str) -> MeshSpec:
    return parse((FOLDER / f"{name}.yaml").read_text(), f"{name}.yaml")


def plain(name: str) -> dict[str, Any]:
    return yaml.safe_load((FOLDER / f"{name}.yaml").read_text())


def devices(spec: MeshSpec) -> dict[str, list[str]]:
    return {role: [str(device) for device in entry.devices] for role, entry in spec.roles.items()}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_every_shipped_mesh_fits_the_number_of_devices_in_its_name(file: Path):
    spec = shipped(file.stem)
    count = 1 if file.stem == "single" else int(file.stem.rpartition("_")[2].removesuffix("gpu"))
    nodes = {device.node for entry in spec.roles.values() for device in entry.devices}
    names = sorted(node for node in nodes if node is not None) or ["box"]
    each = count // len(names)
    processes = [Process(rank, (names[rank // each],), rank // each, rank % each, each) for rank in range(count)]
    used = {rank for ranks in resolve(spec, processes).values() for rank in ranks}
    assert used == set(range(count))


def test_the_introductions_first_example_word_for_word():
    assert plain("tensor_parallel_4") == yaml.safe_load(FIRST)
    spec = shipped("tensor_parallel_4")
    assert devices(spec) == {"actor": ["0", "1"], "critic": ["2"], "reward": ["2"], "rollout": ["3"]}
    assert (spec.roles["actor"].tensor_parallel_size, spec.roles["actor"].data_parallel_size) == (2, 1)
    assert spec.roles["reward"].dtype == "bfloat16" and not spec.roles["critic"].parallelism.fsdp
    rollout = spec.roles["rollout"]
    assert isinstance(rollout, RolloutSpec) and (rollout.backend, rollout.max_num_seqs) == ("vllm", 64)
    assert devices(shipped("article_4")) == devices(spec)
    assert shipped("article_4").roles["actor"].data_parallel_size == 2


def test_the_introductions_second_example_word_for_word():
    assert plain("two_nodes_8") == yaml.safe_load(SECOND)
    spec = shipped("two_nodes_8")
    assert devices(spec) == {
        "actor": ["node1:0", "node1:1", "node2:0", "node2:1"],
        "critic": ["node1:2"],
        "reward": ["node1:3"],
        "rollout": ["node2:2", "node2:3"],
    }
    actor, rollout = spec.roles["actor"], spec.roles["rollout"]
    assert (actor.tensor_parallel_size, actor.pipeline_parallel_size, actor.data_parallel_size) == (2, 2, 1)
    assert (rollout.tensor_parallel_size, rollout.data_parallel_size) == (2, 1)


def test_the_introductions_third_example_word_for_word():
    """It names the actor alone; the shipped file adds the roles that every run has."""
    example = yaml.safe_load(THIRD)
    assert plain("hybrid_engine_4")["actor"] == example["actor"]
    on_eight = plain("hybrid_engine_8")["actor"]
    assert on_eight["devices"] == list(range(8)) and on_eight | {"devices": [0, 1, 2, 3]} == example["actor"]


@pytest.mark.parametrize(("name", "degree"), [("hybrid_engine_4", 1), ("hybrid_engine_8", 2)])
def test_what_the_third_example_comes_to(name: str, degree: int):
    actor = shipped(name).roles["actor"]
    assert (actor.pipeline_parallel_size, actor.tensor_parallel_size, actor.data_parallel_size) == (2, 2, degree)
    engine = actor.hybrid_engine
    assert (engine.enable, engine.activation_checkpointing, engine.offload_activations) == (True, True, False)


def test_an_example_may_stand_on_one_line():
    """As it does where the introduction's line breaks are lost: braces say what indentation did."""
    text = "{actor: {devices: [0, 1], parallelism: {fsdp: true, tensor_parallel_size: 2}}, rollout: {devices: [3]}}"
    assert parse(text, "mesh.yaml").roles["actor"] == shipped("tensor_parallel_4").roles["actor"]
