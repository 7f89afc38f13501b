"""The containers of scripts/k8s with hosts for pods: their commands, with what Kubernetes would fill in."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.hosts import Host, hosts, requires_hosts
from tests.support.jobs import ROOT

pytestmark = [pytest.mark.cluster, requires_hosts, pytest.mark.timeout(1000)]

START = 400.0
RANKS = """
import json, os, sys
sys.stdout.reconfigure(line_buffering=True, write_through=False)  # as train_ppo.py does
names = ("RANK", "GROUP_RANK", "WORLD_SIZE", "VERL_NODE_NAME")
print(json.dumps({"argv": sys.argv[1:], "host": os.uname().nodename} | {n: os.environ[n] for n in names}), flush=True)
"""
FILES = ["--config", "/etc/verl/run.yaml", "--device_mesh", "/etc/verl/device_mesh.yaml"]


def containers(name: str, kind: str) -> list[dict[str, Any]]:
    """Of each pod, in the order of the nodes."""
    for document in yaml.safe_load_all((ROOT / "scripts" / "k8s" / name).read_text()):
        if document["kind"] == "Job" == kind:
            return [document["spec"]["template"]["spec"]["containers"][0]] * document["spec"]["completions"]
        if document["kind"] == "PyTorchJob" == kind:
            replicas = document["spec"]["pytorchReplicaSpecs"]
            return [
                replicas[role]["template"]["spec"]["containers"][0]
                for role in ("Master", "Worker")
                for _ in range(replicas[role]["replicas"])
            ]
    raise AssertionError(f"no {kind} in {name}")


def expanded(text: str, variables: dict[str, str]) -> str:
    return re.sub(r"\$\((\w+)\)", lambda name: variables[name[1]], text)


def run_pods(pods: list[dict[str, Any]], given: list[dict[str, str]], nodes: list[Host], folder: Path) -> list[str]:
    """What each pod's container writes. `given`: the variables that come from outside the manifest."""
    (folder / "train_ppo.py").write_text(RANKS)
    started = []
    for index in reversed(range(len(pods))):  # the first pod, which has the rendezvous, comes last
        variables = dict(given[index])
        for entry in pods[index].get("env", []):
            if "value" in entry:
                variables[entry["name"]] = expanded(entry["value"], variables)
        command = [expanded(word, variables) for word in pods[index]["command"]]
        environment = dict(os.environ) | variables | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
        process = nodes[index].start(command, env=environment, cwd=folder, stdout=subprocess.PIPE)
        started.insert(0, process)
        time.sleep(1.0)
    said = []
    for process in started:
        out, _ = process.communicate(timeout=START)
        assert process.returncode == 0, out
        said.append(out)
    return said


def job_variables(index: int) -> dict[str, str]:
    """By the fieldRef of NODE_RANK."""
    return {"NODE_RANK": str(index)}


def pytorch_job_variables(index: int) -> dict[str, str]:
    """As Kubeflow's operator sets them; newer ones set torchrun's defaults (PET_*) too."""
    return {
        "RANK": str(index), "WORLD_SIZE": "2", "MASTER_ADDR": "verl-master-0", "MASTER_PORT": "23456",
        "PET_NNODES": "2", "PET_NODE_RANK": str(index), "PET_NPROC_PER_NODE": "auto",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("file", "kind", "first", "variables"),
    [
        ("job.yaml", "Job", "verl-0.verl", job_variables),
        ("pytorchjob.yaml", "PyTorchJob", "verl-master-0", pytorch_job_variables),
    ],
    ids=["Job", "PyTorchJob"],
)
def test_the_pods_meet_and_are_the_meshs_nodes(
    file: str, kind: str, first: str, variables: Any, tmp_path: Path
) -> None:
    with hosts(2, tmp_path / "hosts") as nodes:
        for number in (1, 2):
            with (tmp_path / "hosts" / f"node{number}" / "hosts").open("a") as table:
                table.write(f"{nodes[0].address} {first}\n")
        said = run_pods(containers(file, kind), [variables(index) for index in range(2)], nodes, nodes[0].shared)
    for index, text in enumerate(said):
        ranks = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
        assert sorted(int(rank["RANK"]) for rank in ranks) == list(range(4 * index, 4 * index + 4))
        for rank in ranks:
            assert rank["VERL_NODE_NAME"] == f"node{index}" and rank["GROUP_RANK"] == str(index)
            assert rank["WORLD_SIZE"] == "8" and rank["argv"] == FILES
            assert rank["host"] == f"node{index + 1}"
