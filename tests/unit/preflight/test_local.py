"""What `verl doctor` foresees on a node, without the others."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.paper_clusters import ROOMY, cluster
from verl.config import PPOConfig
from verl.generation.vllm.probe import Probe
from verl.mesh.parse import parse_value
from verl.mesh.spec import MeshSpec
from verl.preflight import local
from verl.preflight.facts import Facts
from verl.preflight.local import diagnose
from verl.preflight.network import Network

MIB = 1 << 20


@pytest.fixture(autouse=True)
def no_nvidia_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(local, "_NVIDIA", tmp_path / "nvidiactl")


def node2(**changes: Any) -> Facts:
    """A node with four GPUs, by one process."""
    facts = cluster([4, 4])[4]
    return replace(facts, process=replace(facts.process, rank=0, node_rank=0), **changes)


def mesh(**rollout: Any) -> MeshSpec:
    roles = {
        "actor": {"devices": ["node1:0", "node2:1"]},
        "critic": {"devices": ["node1:2"], "parallelism": {"fsdp": False}},
        "rollout": {"devices": ["node2:2", "node2:3"], "backend": "torch", **rollout},
    }
    return parse_value(roles, "mesh.yaml")


def whats(facts: Facts, spec: MeshSpec | None = None) -> list[str]:
    return [problem.what for problem in diagnose(facts, PPOConfig() if spec else None, spec)]


def test_a_good_node() -> None:
    assert whats(node2()) == []
    assert whats(node2(), mesh()) == []
    assert whats(node2(accelerators=(), visible=None)) == []


def test_a_name_that_the_mesh_does_not_know() -> None:
    facts = node2()
    stranger = replace(facts, process=replace(facts.process, hosts=("gpu-17",)))
    (problem,) = diagnose(stranger, PPOConfig(), mesh())
    assert (problem.what, problem.here, problem.wanted) == ("name", "gpu-17", "one of node1, node2")
    assert "VERL_NODE_NAME" in problem.remedy
    worse = replace(stranger, network=Network("lo", "127.0.1.1", None, "eth0"), files={"model.path": None})
    assert whats(worse, mesh()) == ["name", "network", "model.path"], "all that can be known without it"


def test_names_by_torchruns_order_need_not_be_borne() -> None:
    facts = node2()
    stranger = replace(facts, process=replace(facts.process, hosts=("gpu-17",)))
    by_order = parse_value(
        {"actor": {"devices": ["node0:0", "node1:0"]}, "rollout": {"devices": ["node1:1"], "backend": "torch"}}, "test"
    )
    assert [p.what for p in diagnose(stranger, PPOConfig(), by_order)] == []


def test_a_loopback_matters_to_a_job_of_several_nodes_only() -> None:
    facts = node2(network=Network("lo", "127.0.1.1", None, "eth0"))
    assert whats(facts) == []
    (problem,) = diagnose(facts, PPOConfig(), mesh())
    assert problem.what == "network" and problem.remedy == "export GLOO_SOCKET_IFNAME=eth0 NCCL_SOCKET_IFNAME=eth0"


def test_fewer_devices_than_the_mesh_names() -> None:
    facts = node2()
    (problem,) = diagnose(replace(facts, accelerators=facts.accelerators[:2]), PPOConfig(), mesh())
    assert (problem.what, problem.here, problem.wanted) == ("devices", "2 visible", "4, for mesh.yaml")


def test_a_small_shm_is_told_once_and_by_this_nodes_name() -> None:
    small = replace(ROOMY, shm_size=64 * MIB, shm_free=64 * MIB)
    (problem,) = diagnose(node2(memory=small), PPOConfig(), mesh())
    assert (problem.node, problem.what, problem.ranks) == ("node2", "/dev/shm", ())
    (alone,) = diagnose(node2(memory=small), None, None)
    assert alone.wanted == "384 MiB: NCCL among 4 processes and vLLM with tensor_parallel_size 4"


def test_what_is_missing() -> None:
    assert whats(node2(files={"model.path": None, "source of verl": "x"}), mesh()) == ["model.path"]


def test_gpus_that_torch_does_not_see(tmp_path: Path) -> None:
    (tmp_path / "nvidiactl").touch()
    (problem,) = diagnose(node2(accelerators=(), visible=None), None, None)
    assert problem.what == "accelerators" and "as torch 2.13.0 sees it" in problem.here


def test_an_engine_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    none = Probe(None, None, False, "vLLM is not installed. Install it with ...")
    monkeypatch.setattr(local, "probe", lambda device: none)
    facts = node2()
    assert whats(facts, mesh(backend="vllm")) == ["vllm"]
    there = replace(facts, process=replace(facts.process, hosts=("node1",)))
    assert whats(there, mesh(backend="vllm")) == [], "node1 generates nothing"
