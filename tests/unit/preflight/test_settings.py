"""Settings as text: whole, readable, and without secrets."""

from __future__ import annotations

import json
from dataclasses import replace

from verl.config import PPOConfig, leaves
from verl.mesh.parse import parse_value
from verl.preflight.settings import settings

MESH = parse_value({"actor": {"devices": ["node1:0", "node2:0"]}, "rollout": {"devices": ["node2:0"]}}, "test")


def test_every_setting_is_there_by_name() -> None:
    told = settings(PPOConfig(), MESH)
    names = {name for name, _ in leaves(PPOConfig())} - {"device_mesh"}
    assert names == {name for name in told if not name.startswith("device_mesh.")}
    assert told["trainer.seed"] == "1" and told["algorithm.adv_estimator"] == '"gae"'
    assert json.loads(told["device_mesh.actor.devices"]) == ["node1:0", "node2:0"]
    assert told["device_mesh.rollout.backend"] == '"auto"'


def test_where_the_mesh_was_written_does_not_matter() -> None:
    config = PPOConfig()
    config.device_mesh = "mesh.yaml"
    assert settings(config, replace(MESH, source="elsewhere")) == settings(PPOConfig(), MESH)


def test_a_secret_is_compared_and_not_told() -> None:
    told = []
    for secret in ("hunter2", "hunter3"):
        config = PPOConfig()
        config.reward.function.kwargs = {"api_key": secret, "url": "https://me:hunter2@host", "k": 3}
        told.append(settings(config, MESH)["reward.function.kwargs"])
    assert told[0] != told[1]
    assert all("hunter" not in text and '"k": 3' in text for text in told)
