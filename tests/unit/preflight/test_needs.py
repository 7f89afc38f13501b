"""Memory and /dev/shm of fabricated nodes against what a mesh puts on them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.support.paper_clusters import GIB, ROOMY, changed, cluster
from verl.config import AdvantageEstimator, PPOConfig
from verl.mesh.parse import parse_value
from verl.mesh.spec import MeshSpec
from verl.preflight.facts import Facts
from verl.preflight.files import ModelSize
from verl.preflight.memory import Memory
from verl.preflight.needs import shortages

MIB = 1 << 20
BILLION = 10**9
DOCKER_SHM = replace(ROOMY, shm_size=64 * MIB, shm_free=64 * MIB)
ON_CPU: dict[str, Any] = {"accelerators": (), "visible": None}


def mesh(**rollout: Any) -> MeshSpec:
    return parse_value(
        {
            "actor": {"devices": ["node1:0", "node1:1", "node2:0", "node2:1"], "dtype": "float32"},
            "critic": {"devices": ["node1:2"], "parallelism": {"fsdp": False}},
            "rollout": {"devices": ["node2:2", "node2:3"], "backend": "vllm", "tensor_parallel_size": 2, **rollout},
            "reward": {"devices": ["node1:3"]},
        },
        "test",
    )


def facts(memory: Memory, **common: Any) -> list[Facts]:
    """Two nodes with four processes each."""
    models = {role: ModelSize(BILLION, BILLION // 10) for role in ("actor", "critic", "reference")}
    return changed(cluster([4, 4], memory=memory, **common), [0, 4], models=models)


def test_where_there_is_plenty_nothing_is_said() -> None:
    assert shortages(facts(ROOMY), PPOConfig(), mesh()) == []
    assert shortages(facts(ROOMY, **ON_CPU), PPOConfig(), mesh()) == []


def test_dockers_shm_is_too_small_for_nccl_and_for_a_split_engine() -> None:
    node1, node2 = shortages(facts(DOCKER_SHM), PPOConfig(), mesh())
    assert (node1.node, node1.what, node1.here) == ("node1", "/dev/shm", "64 MiB free of 64 MiB")
    assert node1.wanted == "128 MiB: NCCL among 4 processes"
    assert node2.wanted == "256 MiB: NCCL among 4 processes and vLLM with tensor_parallel_size 2"
    assert "--shm-size=1g" in node2.remedy and "emptyDir: {medium: Memory}" in node2.remedy


def test_on_a_cpu_only_the_node_of_the_split_engine_needs_shm_for_each_of_its_threads() -> None:
    (problem,) = shortages(facts(DOCKER_SHM, **ON_CPU), PPOConfig(), mesh())
    assert (problem.node, problem.ranks) == ("node2", (4, 5, 6, 7))
    assert problem.wanted == "160 MiB: vLLM with tensor_parallel_size 2"
    assert shortages(facts(DOCKER_SHM, cores=8, **ON_CPU), PPOConfig(), mesh()) == []
    config = PPOConfig()
    config.rollout.cpu_threads = 1
    assert shortages(facts(DOCKER_SHM, **ON_CPU), config, mesh()) == []


@pytest.mark.parametrize("rollout", [{"tensor_parallel_size": 1}, {"tensor_parallel_size": 1, "backend": "torch"}])
def test_an_engine_that_is_not_split_needs_none(rollout: dict[str, Any]) -> None:
    assert shortages(facts(DOCKER_SHM, **ON_CPU), PPOConfig(), mesh(**rollout)) == []


def test_what_earlier_runs_have_left_in_shm() -> None:
    full = replace(ROOMY, shm_free=10 * MIB)  # 32 threads need more
    (problem,) = shortages(facts(full, **ON_CPU), PPOConfig(), mesh())
    assert problem.here == "10 MiB free of 64.0 GiB"
    assert problem.remedy == "on node2: remove what earlier runs have left in /dev/shm"


def test_with_gpus_only_the_weights_under_way_are_in_the_nodes_memory() -> None:
    """Two buckets, each of which holds the largest tensor: 100 million numbers of two bytes."""
    tight = replace(ROOMY, limit=32 * GIB, left=300 * MIB)
    (problem,) = shortages(facts(tight), PPOConfig(), mesh())
    assert (problem.node, problem.what) == ("node2", "memory")
    assert problem.here == "300 MiB left of the container's limit of 32.0 GiB"
    assert problem.wanted == "381 MiB: weights under way 381 MiB"
    assert "resources.limits.memory" in problem.remedy
    assert shortages(facts(replace(tight, left=400 * MIB)), PPOConfig(), mesh()) == []


def test_weights_that_go_from_gpu_to_gpu_need_no_node_memory() -> None:
    config = PPOConfig()
    config.rollout.weight_transfer = "ipc"
    assert shortages(facts(replace(ROOMY, limit=32 * GIB, left=300 * MIB)), config, mesh()) == []


def test_a_bucket_is_as_large_as_the_setting_says() -> None:
    config = PPOConfig()
    config.rollout.reshard_bucket_mib = 1024
    (problem,) = shortages(facts(replace(ROOMY, free=GIB)), config, mesh())
    assert problem.wanted == "1.9 GiB: weights under way 1.9 GiB", "all of them, which is less than two buckets"


def test_on_a_cpu_the_training_state_is_too() -> None:
    """16 bytes a parameter that learns, spread over the role's ranks: half of the actor on each node."""
    node1, node2 = shortages(facts(replace(ROOMY, free=10 * GIB), **ON_CPU), PPOConfig(), mesh())
    assert node1.here == "10.0 GiB left on the machine"
    assert node1.wanted == "24.2 GiB: actor 7.5 GiB, critic 14.9 GiB, reference 1.9 GiB"
    # the engine has the weights once more, and a KV cache in each of its two processes
    assert node2.wanted == "12.5 GiB: actor 7.5 GiB, reference 1.9 GiB, weights under way 381 MiB, vLLM 2.9 GiB"


def test_what_is_offloaded_is_in_the_nodes_memory() -> None:
    """Of a billion parameters: 8 bytes of moments in two copies, 16 of all that learns, 2 of what is frozen."""
    away = parse_value(
        {
            "actor": {
                "devices": ["node1:0-1", "node2:0-1"],
                "parallelism": {"fsdp_size": 2},
                "hybrid_engine": {"offload_optimizer": True},
            },
            "critic": {"devices": ["node1:2"], "hybrid_engine": {"offload_parameters": True}},
            "reference": {"devices": ["node2:2"], "hybrid_engine": {"offload_parameters": True}},
            "rollout": {"devices": ["node2:3"], "backend": "torch"},
        },
        "test",
    )
    node1, node2 = shortages(facts(replace(ROOMY, free=GIB)), PPOConfig(), away)
    assert node1.wanted == "22.4 GiB: actor 7.5 GiB, critic 14.9 GiB"
    assert node2.wanted == "9.3 GiB: actor 7.5 GiB, reference 1.9 GiB"


def test_checkpoints_in_the_background_are_written_from_a_copy() -> None:
    """12 bytes of each parameter that learns: of GPUs, too, and beside what is on the node already."""
    config = PPOConfig()
    config.trainer.async_save = True
    node1, node2 = shortages(facts(replace(ROOMY, free=GIB)), config, mesh())
    assert node1.wanted == "16.8 GiB: checkpoint copy of actor 5.6 GiB, checkpoint copy of critic 11.2 GiB"
    assert node2.wanted == "6.0 GiB: checkpoint copy of actor 5.6 GiB, weights under way 381 MiB"


def test_trainers_that_leave_shared_devices_are_in_the_nodes_memory_meanwhile() -> None:
    """Of a billion parameters: 12 bytes of those that learn, 4 where the moments are there already, 2 of what is
    frozen, on the two devices of the replica alone. On a CPU nothing moves."""
    config = PPOConfig()
    config.rollout.offload_trainers = True
    shared = parse_value(
        {
            "actor": {"devices": ["node1:0-3"]},
            "critic": {"devices": ["node1:0-1", "node2:0-1"], "hybrid_engine": {"offload_optimizer": True}},
            "reference": {"devices": ["node1:0"], "hybrid_engine": {"offload_parameters": True}},
            "reward": {"devices": ["node2:0"]},
            "rollout": {"devices": ["node1:0-1", "node2:2-3"], "backend": "torch", "tensor_parallel_size": 2},
        },
        "test",
    )
    node1, node2 = shortages(facts(replace(ROOMY, free=GIB)), config, shared)
    assert node1.wanted == (
        "13.0 GiB: actor while the rollout works 5.6 GiB, critic 3.7 GiB, critic while the rollout works 1.9 GiB, "
        "reference 1.9 GiB"
    )
    assert node2.wanted == "3.7 GiB: critic 3.7 GiB"
    on_cpu = shortages(facts(replace(ROOMY, free=GIB), **ON_CPU), config, shared)
    assert on_cpu and not any("while the rollout works" in problem.wanted for problem in on_cpu)


def test_adapters_leave_the_model_frozen_and_need_no_reference() -> None:
    config = PPOConfig()
    config.actor.lora.rank = config.critic.lora.rank = 8
    node1, node2 = shortages(facts(replace(ROOMY, free=GIB), **ON_CPU), config, mesh())
    assert node1.wanted == "3.7 GiB: actor 1.9 GiB, critic 1.9 GiB"
    assert "reference" not in node2.wanted


def test_roles_that_are_not_built_need_nothing() -> None:
    config = PPOConfig()
    config.algorithm.adv_estimator = AdvantageEstimator.grpo
    config.algorithm.kl_ctrl.kl_coef = 0.0
    node1, _ = shortages(facts(replace(ROOMY, free=1 * GIB), **ON_CPU), config, mesh())
    assert node1.wanted == "7.5 GiB: actor 7.5 GiB"


def test_a_model_of_unknown_size_is_not_guessed() -> None:
    unknown = cluster([4, 4], memory=replace(ROOMY, free=1), **ON_CPU)
    assert shortages(unknown, PPOConfig(), mesh()) == []


def test_a_mesh_that_the_job_cannot_hold_is_not_its_business() -> None:
    assert shortages(cluster([1, 1], memory=DOCKER_SHM), PPOConfig(), mesh()) == []


def test_an_engine_over_two_nodes() -> None:
    torn = mesh(devices=["node2:2", "node1:3"])
    (problem,) = shortages(facts(ROOMY), PPOConfig(), torn)
    assert (problem.what, problem.ranks) == ("rollout.devices", (3, 6))
    assert problem.here == "replica 0 lies on node2 and node1"
    assert "list the 2 devices of each replica" in problem.remedy
    assert shortages(facts(ROOMY), PPOConfig(), mesh(devices=["node2:2", "node1:3"], tensor_parallel_size=1)) == []
