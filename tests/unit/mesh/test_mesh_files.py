"""The shipped meshes, and what is refused for now."""

from pathlib import Path

import pytest

from verl.errors import MeshError
from verl.mesh.parse import parse
from verl.mesh.resolve import Process, resolve
from verl.mesh.spec import MeshSpec, RolloutSpec
from verl.mesh.unsupported import refuse_unsupported

FOLDER = Path(__file__).parents[3] / "configs" / "device_mesh"
FILES = sorted(FOLDER.glob("*.yaml"))
SPLIT_TRAINING = {"tensor_parallel_4", "two_nodes_8", "hybrid_engine_4", "hybrid_engine_8"}


def shipped(name: str) -> MeshSpec:
    return parse((FOLDER / f"{name}.yaml").read_text(), f"{name}.yaml")


def devices(spec: MeshSpec) -> dict[str, list[str]]:
    return {role: [str(device) for device in entry.devices] for role, entry in spec.roles.items()}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_every_shipped_mesh_fits_the_number_of_devices_in_its_name(file: Path):
    spec = shipped(file.stem)
    count = 1 if file.stem == "single" else int(file.stem.rpartition("_")[2])
    nodes = {device.node for entry in spec.roles.values() for device in entry.devices}
    names = sorted(node for node in nodes if node is not None) or ["box"]
    each = count // len(names)
    processes = [Process(rank, (names[rank // each],), rank // each, rank % each, each) for rank in range(count)]
    used = {rank for ranks in resolve(spec, processes).values() for rank in ranks}
    assert used == set(range(count))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_only_split_training_roles_are_refused_for_now(file: Path):
    if file.stem in SPLIT_TRAINING:
        with pytest.raises(MeshError, match="is not supported yet outside the rollout"):
            refuse_unsupported(shipped(file.stem))
    else:
        refuse_unsupported(shipped(file.stem))


def test_what_is_refused_for_now_is_named():
    with pytest.raises(MeshError) as caught:
        refuse_unsupported(shipped("two_nodes_8"))
    assert list(caught.value.problems) == [
        "two_nodes_8.yaml: actor.parallelism.tensor_parallel_size: 2 is not supported yet outside the rollout; set it "
        "to 1, and let fsdp: true spread the model over the role's devices",
        "two_nodes_8.yaml: actor.parallelism.pipeline_parallel_size: 2 is not supported yet outside the rollout; set "
        "it to 1, and let fsdp: true spread the model over the role's devices",
    ]


def test_the_articles_first_example():
    spec = shipped("tensor_parallel_4")
    assert devices(spec) == {"actor": ["0", "1"], "critic": ["2"], "reward": ["2"], "rollout": ["3"]}
    assert (spec.roles["actor"].tensor_parallel_size, spec.roles["actor"].data_parallel_size) == (2, 1)
    assert spec.roles["reward"].dtype == "bfloat16" and not spec.roles["critic"].parallelism.fsdp
    rollout = spec.roles["rollout"]
    assert isinstance(rollout, RolloutSpec) and (rollout.backend, rollout.max_num_seqs) == ("vllm", 64)
    assert devices(shipped("article_4")) == devices(spec)
    assert shipped("article_4").roles["actor"].data_parallel_size == 2


def test_the_articles_second_example():
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


@pytest.mark.parametrize(("name", "degree"), [("hybrid_engine_4", 1), ("hybrid_engine_8", 2)])
def test_the_articles_third_example(name: str, degree: int):
    actor = shipped(name).roles["actor"]
    assert (actor.pipeline_parallel_size, actor.tensor_parallel_size, actor.data_parallel_size) == (2, 2, degree)
    engine = actor.hybrid_engine
    assert (engine.enable, engine.activation_checkpointing, engine.offload_activations) == (True, True, False)
