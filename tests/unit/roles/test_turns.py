"""Which trainers leave, and what is said where none can."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from verl.config import PPOConfig
from verl.flow.placement import Placement
from verl.generation.residency import Turns
from verl.monitor.stages import Stages
from verl.roles import turns
from verl.roles.build_rollout import Engines
from verl.roles.role import Here


def make(device: str, rollout: tuple[int, ...], offload: bool, replays: bool = False) -> Turns:
    """On rank 0 of a job whose actor is on ranks 0 and 1; its trainer keeps 5 bytes."""
    config = PPOConfig()
    config.rollout.offload_trainers, config.debug.replay_rollouts = offload, "recorded" if replays else None
    job: Any = SimpleNamespace(device=torch.device(device), rank=0, is_main=True)
    trainer: Any = SimpleNamespace(parked=SimpleNamespace(host_bytes=5))
    place = Placement("rollout", rollout, leaders_only=True)
    return turns.make_turns(
        config, Engines(), place, [Placement("actor", (0, 1))], [trainer], None, Here(job, Stages())
    )


def test_trainers_leave_a_gpu_that_is_shared_where_they_are_told_to(caplog: pytest.LogCaptureFixture):
    assert make("cuda", (0, 1), offload=True).host_bytes == 5
    assert make("cuda", (0, 1), offload=False).host_bytes == 0
    assert make("cuda", (1, 2), offload=True).host_bytes == 0, "rank 1 shares its device, rank 0 does not"
    assert not caplog.records


@pytest.mark.parametrize(
    ("device", "rollout", "replays", "why"),
    [
        ("cpu", (0, 1), False, "since what a CPU computes with is in host memory anyway"),
        ("cuda", (0, 1), True, "since no engine needs a device where debug.replay_rollouts gives the responses"),
        ("cuda", (2, 3), False, "since the rollout shares no device with a role that has a model"),
    ],
)
def test_where_nothing_moves_a_warning_says_why(
    device: str, rollout: tuple[int, ...], replays: bool, why: str, caplog: pytest.LogCaptureFixture
):
    assert make(device, rollout, offload=True, replays=replays).host_bytes == 0
    (record,) = caplog.records
    assert record.getMessage().startswith("rollout.offload_trainers=true: nothing moves") and why in record.getMessage()
    make(device, rollout, offload=False)
    assert len(caplog.records) == 1
