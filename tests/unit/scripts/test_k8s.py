"""The manifests of scripts/k8s against Kubernetes' own schemas, and against what the job needs.

Kubeflow's PyTorchJob has no schema on the package index: its pod templates are held to the core schema, and the rest to
the fields of the operator's API reference (kubeflow.org/v1).
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from torch.distributed.run import parse_args

from verl.cli import command_line
from verl.launch.plan import processes_by_node
from verl.mesh.spec import MeshSpec

FOLDER = Path(__file__).resolve().parents[3] / "scripts" / "k8s"
OLDEST = "1.29"  # older ones demand onPodConditions in every rule of a podFailurePolicy
VERSIONS = [OLDEST, kubernetes_validate.latest_version()]


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((FOLDER / name).read_text()))


def one(kind: str, name: str = "job.yaml") -> dict[str, Any]:
    (found,) = [document for document in documents(name) if document["kind"] == kind]
    return found


def pods() -> list[Any]:
    replicas = one("PyTorchJob", "pytorchjob.yaml")["spec"]["pytorchReplicaSpecs"]
    return [
        pytest.param(one("Job")["spec"]["template"], id="Job"),
        *(pytest.param(replica["template"], id=f"PyTorchJob {role}") for role, replica in replicas.items()),
    ]


def container(pod: dict[str, Any]) -> dict[str, Any]:
    (only,) = pod["spec"]["containers"]
    return only


def torchrun_arguments(pod: dict[str, Any]) -> Any:
    """What torchrun is told, as its own parser reads it on the first node."""
    command = container(pod)["command"]
    words = command[command.index("verl.launch.torchrun") + 1 :]
    values = {"NODE_RANK": "0", "RANK": "0", "MASTER_ADDR": "verl-master-0", "MASTER_PORT": "23456"}
    return parse_args([re.sub(r"\$\((\w+)\)", lambda name: values[name[1]], word) for word in words])


# -- schemas -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("document", documents("job.yaml"), ids=lambda document: document["kind"])
def test_the_job_is_what_kubernetes_takes(document: dict[str, Any], version: str) -> None:
    kubernetes_validate.validate(document, version, strict=True)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("pod", pods())
def test_pods_are_what_kubernetes_takes(pod: dict[str, Any], version: str) -> None:
    kubernetes_validate.validate({"apiVersion": "v1", "kind": "PodTemplate", "template": pod}, version, strict=True)


def test_a_misspelt_field_would_be_found() -> None:
    job = one("Job")
    job["spec"]["template"]["spec"]["subdomian"] = "verl"
    with pytest.raises(kubernetes_validate.ValidationError, match="subdomian"):
        kubernetes_validate.validate(job, OLDEST, strict=True)


def record(**fields: Any) -> dict[str, Any]:
    return {"type": "object", "properties": fields, "additionalProperties": False}


REPLICA = record(
    replicas={"type": "integer", "minimum": 1},
    restartPolicy={"enum": ["Always", "OnFailure", "Never", "ExitCode"]},
    template={"type": "object"},
)
PYTORCH_JOB = record(
    apiVersion={"const": "kubeflow.org/v1"},
    kind={"const": "PyTorchJob"},
    metadata={"type": "object", "required": ["name"]},
    spec=record(
        runPolicy=record(
            cleanPodPolicy={"enum": ["All", "Running", "None"]},
            ttlSecondsAfterFinished={"type": "integer"},
            activeDeadlineSeconds={"type": "integer"},
            backoffLimit={"type": "integer"},
            schedulingPolicy={"type": "object"},
        ),
        nprocPerNode={"type": "string"},
        pytorchReplicaSpecs=record(Master=REPLICA, Worker=REPLICA) | {"required": ["Master"]},
    ),
)


def test_the_pytorch_job_has_the_operators_fields() -> None:
    job = one("PyTorchJob", "pytorchjob.yaml")
    jsonschema.validate(job, PYTORCH_JOB)
    for replica in job["spec"]["pytorchReplicaSpecs"].values():
        assert container(replica["template"])["name"] == "pytorch", "the operator configures the container of this name"


# -- what the job needs ------------------------------------------------------------------------------------------------


@pytest.fixture
def mesh(tmp_path: Path) -> MeshSpec:
    """Of the config map, read together with its settings."""
    for name, text in one("ConfigMap")["data"].items():
        (tmp_path / name).write_text(text)
    files = ["--config", str(tmp_path / "run.yaml"), "--device_mesh", str(tmp_path / "device_mesh.yaml")]
    return command_line.load(files)[1]


@pytest.mark.parametrize("pod", pods())
def test_the_pods_are_the_nodes_of_the_mesh(pod: dict[str, Any], mesh: MeshSpec) -> None:
    arguments = torchrun_arguments(pod)
    num_nodes, num_processes = int(arguments.nnodes), int(arguments.nproc_per_node)
    assert processes_by_node(mesh) == {f"node{index}": num_processes for index in range(num_nodes)}
    assert container(pod)["resources"]["limits"]["nvidia.com/gpu"] == num_processes
    job, kubeflow = one("Job")["spec"], one("PyTorchJob", "pytorchjob.yaml")["spec"]["pytorchReplicaSpecs"]
    assert job["completions"] == job["parallelism"] == num_nodes
    assert kubeflow["Master"]["replicas"] + kubeflow["Worker"]["replicas"] == num_nodes


@pytest.mark.parametrize("pod", pods())
def test_the_ranks_get_files_that_are_there(pod: dict[str, Any]) -> None:
    arguments, spec = torchrun_arguments(pod), pod["spec"]
    assert arguments.training_script == "train_ppo.py"
    mounts = {mount["mountPath"]: mount["name"] for mount in container(pod)["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    assert set(mounts.values()) == set(volumes)
    assert volumes[mounts["/dev/shm"]]["emptyDir"]["medium"] == "Memory"
    files = one("ConfigMap")
    assert volumes[mounts["/etc/verl"]]["configMap"]["name"] == files["metadata"]["name"]
    given = arguments.training_script_args
    assert {path for path in given if path.startswith("/")} == {f"/etc/verl/{name}" for name in files["data"]}
    assert given[::2] == ["--config", "--device_mesh"]


def test_the_pods_of_the_job_find_each_other() -> None:
    """A pod of an indexed Job is NAME-INDEX, with the address POD.SUBDOMAIN if a headless service bears that name."""
    job, service = one("Job"), one("Service")
    pod = job["spec"]["template"]
    name = service["metadata"]["name"]
    assert pod["spec"]["subdomain"] == name and service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": job["metadata"]["name"]}
    assert service["spec"]["publishNotReadyAddresses"], "they meet before they are ready"
    arguments = torchrun_arguments(pod)
    assert arguments.master_addr == f"{job['metadata']['name']}-0.{name}"
    ports = {port["port"] for port in service["spec"]["ports"]} | {p["containerPort"] for p in container(pod)["ports"]}
    assert ports == {int(arguments.master_port)}


def test_the_index_of_a_pod_is_its_name_in_the_mesh() -> None:
    index, node_name = container(one("Job")["spec"]["template"])["env"]
    annotation = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    assert index == {"name": "NODE_RANK", "valueFrom": {"fieldRef": {"fieldPath": annotation}}}
    assert node_name == {"name": "VERL_NODE_NAME", "value": "node$(NODE_RANK)"}, "after what it is made of"


def test_a_mistake_is_not_tried_again() -> None:
    job = one("Job")["spec"]
    (rule, _) = job["podFailurePolicy"]["rules"]
    assert rule["action"] == "FailJob" and rule["onExitCodes"]["values"] == [2]
    assert job["template"]["spec"]["restartPolicy"] == "Never", "which a podFailurePolicy asks for"
