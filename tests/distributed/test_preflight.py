"""The pre-flight among real ranks. Two nodes are played by torchrun's variables; real ones are in tests/cluster."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.ranks import run_ranks
from verl.config import PPOConfig
from verl.errors import SharedError
from verl.flow.job import start_job
from verl.mesh.parse import parse_value
from verl.preflight.check import check_cluster

pytestmark = pytest.mark.dist

Spoil = Callable[[PPOConfig, int], None]


def fly(spoil: Spoil, run_dir: Path, nodes: int) -> str:
    """What a rank hears; '' where the job may go on."""
    rank = int(os.environ["RANK"])
    if nodes > 1:
        os.environ |= {"GROUP_WORLD_SIZE": str(nodes), "GROUP_RANK": str(rank), "LOCAL_RANK": "0"}
        os.environ |= {"LOCAL_WORLD_SIZE": "1", "VERL_NODE_NAME": f"n{rank}"}
    config = PPOConfig()
    config.trainer.run_dir = str(run_dir / "run")
    spoil(config, rank)
    devices = [f"n{i}:0" for i in range(nodes)] if nodes > 1 else [0, 1]
    mesh = parse_value({role: {"devices": devices} for role in ("actor", "critic", "rollout")}, "test")
    try:
        job = start_job(300, check_program=False, admit=lambda meeting: check_cluster(config, mesh, meeting))
    except SharedError as error:
        return str(error)
    job.close()
    return ""


def nothing(config: PPOConfig, rank: int) -> None: ...


def other_seed(config: PPOConfig, rank: int) -> None:
    config.trainer.seed = 7 if rank == 1 else 1
    config.trainer.stage_timeout = 30.0 if rank == 1 else 600.0


def other_secret(config: PPOConfig, rank: int) -> None:
    config.reward.function.kwargs = {"api_key": f"hunter{rank}"}


def own_run_dir(config: PPOConfig, rank: int) -> None:
    """The same path in the settings, another folder on each node: as far as a process can see, a working directory."""
    folder = Path(config.trainer.run_dir).parent / f"disk{rank}"
    folder.mkdir(parents=True, exist_ok=True)
    os.chdir(folder)
    config.trainer.run_dir = "run"


@pytest.mark.parametrize("nodes", [1, 2])
def test_ranks_that_are_alike_go_on_and_leave_nothing_behind(nodes: int, tmp_path: Path) -> None:
    assert run_ranks(2, fly, nothing, tmp_path, nodes) == ["", ""]
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_settings_that_differ_end_all_ranks_with_one_table(tmp_path: Path) -> None:
    one, two = run_ranks(2, fly, other_seed, tmp_path, 1)
    assert one == two
    lines = [line.split() for line in one.splitlines()]
    assert one.startswith("This node cannot run this job:\nnode ")
    node = socket.gethostname()
    assert lines[2][:5] == [node, "1", "trainer.seed", "7", "1"]
    assert lines[3][:5] == [node, "1", "trainer.stage_timeout", "30.0", "600.0"]


def test_a_secret_that_differs_is_told_of_and_not_told(tmp_path: Path) -> None:
    said, _ = run_ranks(2, fly, other_secret, tmp_path, 2)
    assert "reward.function.kwargs" in said and "hunter" not in said


def test_a_run_dir_that_is_not_shared(tmp_path: Path) -> None:
    one, two = run_ranks(2, fly, own_run_dir, tmp_path, 2)
    assert one == two
    assert "n1    1      trainer.run_dir  what rank 0 writes is not seen  one folder for all nodes (n0)" in one
    assert str(tmp_path / "disk1" / "run") in one


def read_only(config: PPOConfig, rank: int) -> None:
    config.trainer.run_dir = "/proc/no/such/place"


def test_a_run_dir_that_cannot_be_made(tmp_path: Path) -> None:
    one, two = run_ranks(2, fly, read_only, tmp_path, 2)
    assert one == two
    assert "n0    0      trainer.run_dir  cannot be written: " in one
