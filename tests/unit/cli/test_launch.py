"""`verl launch` as far as it starts nothing."""

from __future__ import annotations

import shlex
import socket
import sys
from pathlib import Path

import pytest

from verl.cli.main import main

MESH = 'actor: {devices: ["nodeA:0-1", "nodeB:0"]}\nrollout: {devices: ["nodeB:0"], backend: torch}\n'
CONFIG = """
model: {path: some/model}
data: {train_files: [train.jsonl], train_batch_size: 6}
actor: {ppo_mini_batch_size: 6}
rollout: {n: 2}
algorithm: {adv_estimator: grpo}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "mesh.yaml").write_text(MESH)
    (tmp_path / "run.yaml").write_text(CONFIG)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("VERL_NODE_NAME", raising=False)
    return tmp_path


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[tuple[str, list[str]]]:
    """(what is said of a node, its command) for each node of a dry run."""
    assert main(["launch", "--config", "run.yaml", "--dry-run", *arguments]) == 0
    lines = capsys.readouterr().out.splitlines()
    return [(lines[i], shlex.split(lines[i + 1])) for i in range(0, len(lines), 2)]


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["launch", "--config", "run.yaml", *arguments]) == 2
    said = capsys.readouterr()
    assert said.out == "" and "Traceback" not in said.err
    return said.err


def test_a_dry_run_shows_what_runs_on_each_node(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--device_mesh", "mesh.yaml", "--rdzv-id", "mine", "--rdzv-port", "4567", "--env", "A=b c"]
    (first, one), (second, two) = shown(capsys, *given, "--workdir", "/data", "--", "actor.optim.lr=1e-5")
    assert first.startswith("nodeA: 2 processes, ssh ") and second.startswith("nodeB: 1 process, ssh ")
    for command in (one, two):
        assert command[:3] == ["cd", "/data", "&&"]
        assert "A=b c" in command and sys.executable in command
        assert "--rdzv_endpoint=nodeA:4567" in command and "--rdzv_id=mine" in command
        tail = ["--config", str(folder / "run.yaml"), "--device_mesh", str(folder / "mesh.yaml"), "actor.optim.lr=1e-5"]
        assert command[-5:] == tail
        assert Path(command[-6]).name == "train_ppo.py" and Path(command[-6]).is_file()
    assert "VERL_NODE_NAME=nodeA" in one and "VERL_NODE_NAME=nodeB" in two


def test_every_launch_has_an_id_of_its_own(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ids = set()
    for _ in range(3):
        (_, one), (_, two) = shown(capsys, "--device_mesh", "mesh.yaml")
        (mine,) = {word for word in [*one, *two] if word.startswith("--rdzv_id=")}
        ids.add(mine)
    assert len(ids) == 3


def test_this_machine_needs_no_ssh(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    host = socket.gethostname()
    (folder / "mesh.yaml").write_text(MESH.replace("nodeA", host))
    (here, _), (there, _) = shown(capsys, "--device_mesh", "mesh.yaml")
    assert here == f"{host}: 2 processes, without ssh" and there.startswith("nodeB: 1 process, ssh ")


def test_a_mesh_of_integers_is_one_job_here(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "mesh.yaml").write_text("actor: {devices: [0, 1]}\nrollout: {devices: [2], backend: torch}\n")
    ((where, command),) = shown(capsys, "--device_mesh", "mesh.yaml")
    assert where == "this machine: 3 processes, without ssh"
    assert "--standalone" in command and "--nproc_per_node=3" in command


def test_settings_may_change_the_mesh(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also where they stand without --, and where the config names the mesh."""
    (folder / "run.yaml").write_text(CONFIG + "device_mesh: mesh.yaml\n")
    ((where, _),) = shown(capsys, 'device_mesh.actor.devices=["nodeC:0"]', 'device_mesh.rollout.devices=["nodeC:0"]')
    assert where.startswith("nodeC: 1 process")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--device_mesh", "none.yaml"], "none.yaml: No such file or directory"),
        (["--rdzv_port", "1"], "unknown flag --rdzv_port, did you mean --rdzv-port?"),
        (["--multirun"], "unknown flag --multirun; `verl launch --help`"),
        (["--rdzv-port", "0"], "a port is a number from 1 to 65535"),
        (["--device_mesh", "mesh.yaml", "--env", "NOT_SET_ANYWHERE"], "--env NOT_SET_ANYWHERE: not set here"),
        (["--device_mesh", "mesh.yaml", "--ssh-config", "none"], "--ssh-config none: no such file"),
        (["--device_mesh", "mesh.yaml", "--", "--cfg", "job"], "--cfg shows or sweeps"),
        (["--device_mesh", "mesh.yaml", "--", "actor.optim.rl=1"], "actor.optim.rl"),
        (["--device_mesh", "mesh.yaml", "--", "--no-such-flag"], "--no-such-flag: unknown flag"),
    ],
)
def test_mistakes_are_told_before_anything_starts(
    arguments: list[str], said: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said in refused(capsys, *arguments)
