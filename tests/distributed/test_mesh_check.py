"""A run holds its mesh against its models before it loads one, and says where in the mesh the mistake is."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.make_tiny_model import make_tiny_model
from tests.support.refusals import refusal
from tests.support.runs import Task
from verl.mesh.parse import parse

pytestmark = [pytest.mark.dist, pytest.mark.timeout(900)]

MESH = """\
actor:
  devices: [0-1]
  parallelism:
    pipeline_parallel_size: 2
critic: {devices: all}
rollout:
  devices: [0-1]
"""


def test_a_degree_that_does_not_suit_the_model_is_told_with_its_line(tmp_path: Path) -> None:
    task = Task.make(tmp_path)
    model = make_tiny_model(tmp_path / "shallow", num_layers=1)
    refused = refusal(task.config("shallow", model__path=str(model)), parse(MESH, "mesh.yaml"), 2)
    assert refused.message == (
        "mesh.yaml:4: actor.parallelism.pipeline_parallel_size: 2: the model has 1 layers; set it to 1 or less "
        f"({model})"
    )
    assert refused.engines == ()
