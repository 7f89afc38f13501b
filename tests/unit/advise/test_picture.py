"""The picture of a mesh, word for word."""

from itertools import pairwise
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


def test_a_long_name_has_room_and_the_next_node_begins_behind_it():
    name = "gpu-node-1.cluster.example.com"
    text = f'actor: {{devices: ["{name}:0", "b:0"]}}\nrollout: {{devices: ["b:0"]}}'
    lines = list(as_text(draw(job_of(text)), 80))
    assert lines[0].index("b") > lines[0].index(name) + len(name)
    assert lines[1].rindex("0") == lines[0].rindex("b")
    assert next(as_text(draw(job_of(text)), 40)).endswith(name)  # and b comes below


def test_the_svg_has_a_cell_for_each_device_and_role():
    picture = draw(job_of(TWO_NODES.replace("node1", "a-b")))
    root = ElementTree.fromstring(as_svg(picture, 'my <mesh> & its "devices".yaml'))
    space = "{http://www.w3.org/2000/svg}"
    texts = [element.text for element in root.iter(f"{space}text")]
    assert texts[0] == 'my <mesh> & its "devices".yaml'
    assert texts.count("p0t0") == 2 and texts.count("whole") == 2 and "a-b" in texts
    assert len(list(root.iter(f"{space}rect"))) == 1 + 8 * 5


SPACE = "{http://www.w3.org/2000/svg}"
LETTER = 7.3
"""Pixels of a letter of 12-pixel monospace, rounded up."""


@pytest.mark.parametrize(
    "text",
    [
        TWO_NODES,
        TWO_NODES.replace("node1", "gpu-node-0123456789.cluster-a.example.com"),
        'actor: {devices: ["a:0-7", "b:0-7", "c:0-7", "d:0-7"], parallelism: {tensor_parallel_size: 2, fsdp_size: 1, '
        'context_parallel_size: 2, pipeline_parallel_size: 2}}\nrollout: {devices: ["d:0-7"]}',
        'actor: {devices: ["n:0-31"]}\nrollout: {devices: ["n:0-31"]}',
    ],
)
def test_nothing_overlaps_in_the_svg_or_leaves_it(text: str):
    root = ElementTree.fromstring(as_svg(draw(job_of(text)), "mesh.yaml"))
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    spans: dict[float, list[tuple[float, float]]] = {}
    for element in root.iter(f"{SPACE}text"):
        long = len(element.text or "") * LETTER
        left = float(element.attrib["x"]) - (long / 2 if "text-anchor" in element.attrib else 0)
        spans.setdefault(float(element.attrib["y"]), []).append((left, left + long))
    for y, row in spans.items():
        row.sort()
        assert 0 < y < height and row[0][0] > 0 and row[-1][1] < width
        assert all(end <= begin for (_, end), (begin, _) in pairwise(row)), (y, row)
    boxes = [{key: float(box.attrib[key]) for key in ("x", "y", "width", "height")} for box in root.iter(f"{SPACE}rect")
             if "x" in box.attrib]  # fmt: skip
    assert max(box["x"] + box["width"] for box in boxes) < width
    assert len({(box["x"], box["y"]) for box in boxes}) == len(boxes)


def test_many_nodes_stand_below_each_other_in_the_svg():
    nodes = ", ".join(f'"node{number}:0-7"' for number in range(1, 9))
    svg = as_svg(draw(job_of(f'actor: {{devices: [{nodes}]}}\nrollout: {{devices: ["node1:0"]}}')), "mesh.yaml")
    root = ElementTree.fromstring(svg)
    assert float(root.attrib["width"]) < 1300
    heads = {text.attrib["y"] for text in root.iter(f"{SPACE}text") if (text.text or "").startswith("node")}
    assert len(heads) == 4  # two of eight devices side by side
