"""Jobs that are only thought of."""

from dataclasses import replace

import pytest

from tests.support.advice import job_of
from verl.advise.job import NodeSize, nodes_of, read_nodes
from verl.config import AdvantageEstimator, AlgorithmConfig, KLControlConfig, PPOConfig
from verl.errors import MeshError, UserError
from verl.flow.placement import Coordinate
from verl.mesh.parse import parse

TWO_NODES = """
actor: {devices: ["b:0-1", "a:0-1"], parallelism: {tensor_parallel_size: 2, pipeline_parallel_size: 2}}
critic: {devices: ["a:3"]}
rollout: {devices: ["a:2-3"], tensor_parallel_size: 2}
"""


def test_nodes_are_read():
    assert read_nodes("node1:4, node2.lan:8") == [NodeSize("node1", 4), NodeSize("node2.lan", 8)]
    assert read_nodes("8") == [NodeSize("", 8)]


FORM = "write NAME:DEVICES for each node, for example --nodes node1:8,node2:8, or --nodes 8 for one node"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", f'--nodes: "" is no node; {FORM}'),
        ("node1", f'--nodes: "node1" is no node; {FORM}'),
        ("node1:x", f'--nodes: "node1:x" is no node; {FORM}'),
        ("node1:8,", f'--nodes: "" is no node; {FORM}'),
        (":8", f'--nodes: ":8" is no node; {FORM}'),
        ("node1:-1", f'--nodes: "node1:-1" is no node; {FORM}'),
        ("node1:0", "--nodes: node1:0 has no device; leave it out, or say how many it has"),
        ("node1:8,node1:4", f"--nodes: node1 stands there 2 times; {FORM}"),
        ("8,8", f"--nodes: a node without a name stands there 2 times; {FORM}"),
        ("8,node1:8", f"--nodes: of several nodes each needs a name; {FORM}"),
        ("a:9999,b:9999", "--nodes: more than 10000 devices in all; name fewer"),
    ],
)
def test_nodes_that_are_none(text: str, message: str):
    with pytest.raises(UserError) as caught:
        read_nodes(text)
    assert str(caught.value) == message


def test_a_mesh_names_its_nodes_itself():
    """Each has as many devices as torchrun starts processes there: one number for all nodes."""
    assert nodes_of(parse(TWO_NODES, "m")) == [NodeSize("b", 4), NodeSize("a", 4)]
    assert nodes_of(parse("actor: {devices: [0, 5]}\nrollout: {devices: all}", "m")) == [NodeSize("", 6)]


def test_a_mesh_of_the_whole_job_does_not():
    with pytest.raises(MeshError) as caught:
        nodes_of(parse("actor: {devices: all}\nrollout: {devices: all}", "m.yaml"))
    assert str(caught.value) == "m.yaml: devices: all is as many as the job has; say how many with --nodes node1:8 or 8"


def test_a_mesh_of_too_many_devices_is_not_thought_of():
    with pytest.raises(MeshError) as caught:
        nodes_of(parse("actor: {devices: [0]}\nrollout: {devices: [3, 999998]}", "m.yaml"))
    assert str(caught.value) == (
        "m.yaml:2: rollout.devices: index 999998 makes 999999 devices on each of 1 node, and at most 10000 in all are "
        "looked at; lower the index, or name fewer nodes"
    )


def test_ranks_and_places():
    job = job_of(TWO_NODES)
    assert job.nodes == {"b": [0, 1, 2, 3], "a": [4, 5, 6, 7]}
    assert job.placements["actor"].ranks == (0, 1, 4, 5)
    assert job.placements["actor"].coordinate(5) == Coordinate(1, 0, 1)
    assert job.placements["reference"].ranks == job.placements["actor"].ranks
    assert job.placements["reward"].ranks == (6,)  # a reward function, beside the replica's leader
    assert job.roles_on(7) == ["critic", "rollout"]
    assert job.idle == [2, 3]
    assert job.device(7) == "a:3" and job.devices([0, 1, 3, 4, 5]) == "b:0-1, b:3, a:0-1"


def test_nodes_of_one_name_are_told_apart():
    job = job_of("actor: {devices: all}\nrollout: {devices: all}", "a:2,b:1")
    twins = replace(job, processes=tuple(replace(process, hosts=("pod",)) for process in job.processes))
    assert twins.nodes == {"node0": [0, 1], "node1": [2]}
    assert twins.devices([0, 1, 2]) == "node0:0-1, node1:0"


def test_one_node_needs_no_name():
    job = job_of("actor: {devices: [0-2]}\nrollout: {devices: [3]}")
    assert job.nodes == {"this node": [0, 1, 2, 3]} and job.devices([0, 1, 3]) == "0-1, 3" and job.device(2) == "2"


def test_roles_that_the_algorithm_does_without_are_left_out():
    algorithm = AlgorithmConfig(adv_estimator=AdvantageEstimator.grpo, kl_ctrl=KLControlConfig(kl_coef=0.0))
    assert set(job_of(TWO_NODES, config=PPOConfig(algorithm=algorithm)).placements) == {"actor", "rollout", "reward"}


def test_what_the_nodes_lack_is_told():
    with pytest.raises(MeshError, match=r"mesh needs devices b:0, b:1; job has a: 0-3"):
        job_of(TWO_NODES, "a:4")
