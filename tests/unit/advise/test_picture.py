"""The picture of a mesh, word for word."""

from xml.etree import ElementTree

import pytest

from tests.support.advice import job_of
from verl.advise.picture import LEGEND, as_text, draw
from verl.advise.svg import as_svg
from verl.config import AdvantageEstimator, AlgorithmConfig, PPOConfig

TWO_NODES = """
actor:
  devices: ["node1:0", "node1:1", "node2:0", "node2:1"]
  parallelism: {fsdp: true, tensor_parallel_size: 2, pipeline_parallel_size: 2}
critic:
  devices: ["node1:2"]
  parallelism: {fsdp: false}
rollout:
  devices: ["node2:2-3"]
  backend: vllm
  tensor_parallel_size: 2
reward: {devices: ["node1:3"]}
"""
PICTURE = """\
            node1                     node2
            0     1     2     3       0     1     2     3
actor       p0t0  p0t1  .     .       p1t0  p1t1  .     .
critic      .     .     whole .       .     .     .     .
reference   p0t0  p0t1  .     .       p1t0  p1t1  .     .
reward      .     .     .     whole   .     .     .     .
rollout     .     .     .     .       .     .     t0    t1

p: pipeline stage, d, c, t: data-, context- and tensor-parallel index, r: replica of the rollout
actor      pp 2 x dp 1 x tp 2, FSDP 1: nothing to shard over, each device holds its whole 1/4 of the model
critic     pp 1 x dp 1 x tp 1, no FSDP: each device holds the whole model
reference  pp 2 x dp 1 x tp 2, FSDP 1: nothing to shard over, each device holds its whole 1/4 of the model; not in the \
mesh, so where the actor is
reward     pp 1 x dp 1 x tp 1, FSDP 1: nothing to shard over, each device holds the whole model
rollout    1 replica of 2 devices, vllm, 64 sequences at once"""
NARROW = """\
            node1
            0     1     2     3
actor       p0t0  p0t1  .     .
critic      .     .     whole .
reference   p0t0  p0t1  .     .
reward      .     .     .     whole

            node2
            0     1     2     3
actor       p1t0  p1t1  .     .
reference   p1t0  p1t1  .     .
rollout     .     .     t0    t1
"""


def test_two_nodes_side_by_side():
    assert "\n".join(as_text(draw(job_of(TWO_NODES)), 80)) == PICTURE


def test_two_nodes_below_each_other_where_there_is_no_room():
    text = "\n".join(as_text(draw(job_of(TWO_NODES)), 50))
    assert text.startswith(NARROW)


def test_data_parallel_ranks_and_replicas():
    text = "actor: {devices: [0, 2]}\nrollout: {devices: [3, 1]}\nreward: {devices: [1], parallelism: {fsdp: false}}"
    config = PPOConfig(algorithm=AlgorithmConfig(adv_estimator=AdvantageEstimator.grpo))
    lines = list(as_text(draw(job_of(text, config=config)), 80))
    assert lines[2:6] == [
        "actor       d0    .     d1    .",
        "reference   d0    .     d1    .",
        "reward      .     whole .     .",
        "rollout     .     r1    .     r0",  # the order of the list
    ]
    assert "actor      pp 1 x dp 2 x tp 1, FSDP 2" in lines


def test_copies_of_a_model():
    text = "actor: {devices: [0-7], parallelism: {fsdp_size: 2, tensor_parallel_size: 2}}\nrollout: {devices: [0]}"
    lines = list(as_text(draw(job_of(text)), 80))
    assert "actor      pp 1 x dp 4 x tp 2, 2 copies of FSDP 2" in lines
    lines = list(as_text(draw(job_of(text.replace("fsdp_size: 2", "fsdp_size: 1"))), 200))
    assert any("4 copies of FSDP 1: nothing to shard over, each device holds its whole 1/2" in line for line in lines)


def test_a_reward_function_is_beside_the_leaders():
    lines = list(as_text(draw(job_of("actor: {devices: [0]}\nrollout: {devices: [1-2], tensor_parallel_size: 2}")), 80))
    assert "reward      .     whole ." in lines
    assert "reward     a reward function, beside the rollout's leaders" in lines


@pytest.mark.parametrize("width", [0, 20, 60, 400])
def test_lines_are_no_wider_than_the_terminal(width: int):
    text = 'actor: {devices: ["n1:0-7", "n2:0-7", "n3:0-7"]}\nrollout: {devices: ["n1:0"]}'
    lines = list(as_text(draw(job_of(text)), width))
    grid = lines[: lines.index(LEGEND)]
    one_node = len("reference") + 3 + 8 * (len("whole") + 1) - 1
    assert max(map(len, grid)) <= max(width, one_node)


def test_the_svg_has_a_cell_for_each_device_and_role():
    picture = draw(job_of(TWO_NODES.replace("node1", "a-b")))
    root = ElementTree.fromstring(as_svg(picture, 'my <mesh> & its "devices".yaml'))
    space = "{http://www.w3.org/2000/svg}"
    texts = [element.text for element in root.iter(f"{space}text")]
    assert texts[0] == 'my <mesh> & its "devices".yaml'
    assert texts.count("p0t0") == 2 and texts.count("whole") == 2 and "a-b" in texts
    assert len(list(root.iter(f"{space}rect"))) == 1 + 8 * 5
