"""Which ways of the weights are refused, and who sends them."""

from __future__ import annotations

import pytest

from verl.checks import CHOICES
from verl.config import PPOConfig
from verl.errors import ConfigError
from verl.flow.placement import Placement
from verl.generation.vllm.delivery import WeightTransfer
from verl.reshard.boxes import sender_of
from verl.roles.weight_paths import refuse_transfer


def _refused(
    transfer: str, rollout: tuple[int, ...], actor: tuple[int, ...], backend: str = "vllm", device: str = "cuda"
) -> str:
    """The message; empty: it is not refused."""
    places = Placement("rollout", rollout, leaders_only=True), Placement("actor", actor)
    try:
        refuse_transfer(WeightTransfer(transfer), backend, device, *places)
    except ConfigError as error:
        return str(error)
    return ""


def test_the_setting_has_no_other_values() -> None:
    assert CHOICES["rollout.weight_transfer"] == tuple(WeightTransfer)
    assert PPOConfig().rollout.weight_transfer == WeightTransfer.node_memory


@pytest.mark.parametrize("transfer", ["ipc", "nccl"])
def test_without_gpus_and_without_vllm_there_is_the_nodes_memory(transfer: str) -> None:
    said = _refused(transfer, (0, 1), (2, 3), device="cpu")
    assert said.startswith(f"rollout.weight_transfer={transfer}: ") and "runs on the cpu" in said
    assert said.endswith("set rollout.weight_transfer=node_memory")
    said = _refused(transfer, (0, 1), (2, 3), backend="torch")
    assert "rollout.backend is torch here" in said
    assert _refused("node_memory", (0,), (0,), "torch", "cpu") == ""
    assert _refused(transfer, (0,), (0,), "replay", "cpu") == "", "a run that is compared with one that had GPUs"


def test_nccl_needs_a_sender_that_no_engine_shares_a_gpu_with() -> None:
    said = _refused("nccl", (0, 1, 2, 3), (1, 0))
    assert said.startswith("rollout.weight_transfer=nccl: ") and "actor.devices are all in rollout.devices" in said
    assert said.endswith("(ranks 1, 0); set rollout.weight_transfer=ipc")
    assert _refused("nccl", (0, 1), (1, 0, 2)) == ""
    assert _refused("nccl", (2, 3), (0, 1)) == ""
    for rollout in ((0, 1), (0, 2), (2, 3)):
        assert _refused("ipc", rollout, (0, 1)) == ""


@pytest.mark.parametrize(
    "rollout, actor, sender", [((2, 3), (1, 0), 1), ((1, 3), (3, 2, 0), 2), ((0, 1), (1, 0), None)]
)
def test_the_sender_is_the_actors_first_rank_off_the_rollout(
    rollout: tuple[int, ...], actor: tuple[int, ...], sender: int | None
) -> None:
    assert sender_of(Placement("rollout", rollout), Placement("actor", actor)) == sender
