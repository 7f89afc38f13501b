"""`verl launch` over a real sshd: a launcher on node1, and nodes that it can only reach by ssh."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from tests.support.hosts import Host, hosts, requires_hosts
from tests.support.jobs import wait_until, write_config
from tests.support.runs import Task, metrics
from tests.support.sshd import others, requires_sshd, sessions, sshd_on

pytestmark = [pytest.mark.cluster, requires_hosts, requires_sshd, pytest.mark.timeout(1200)]

START = 400.0
"""Seconds for a launch to come up on a busy machine: torchrun imports torch on every node."""
END = 90.0
TRAINING = 700.0
"""For two steps of a tiny model in two processes that share two busy cores with others."""
SEVERED = 300.0
"""ssh gives up after a minute of silence, as the node does; then the ranks' time to end, and that of a busy machine."""
SETTINGS = {
    "model": {"path": "some/model"},
    "data": {"train_files": ["train.jsonl"], "train_batch_size": 6},
    "actor": {"ppo_mini_batch_size": 6},
    "rollout": {"n": 2},
    "algorithm": {"adv_estimator": "grpo"},
}
MESH = {"actor": {"devices": ["node1:0-1", "node2:0"]}, "rollout": {"devices": ["node2:0"], "backend": "torch"}}
# `verl`, with another script for train_ppo.py.
VERL = """
import sys
from pathlib import Path
from verl.cli import launch, main
launch.TRAIN_PPO = Path(sys.argv[1])
sys.exit(main.main(sys.argv[2:]))
"""
RANKS = """
import json, os, signal, sys, time
sys.stdout.reconfigure(line_buffering=True, write_through=False)  # as train_ppo.py does
rank, node = os.environ["RANK"], os.environ["VERL_NODE_NAME"]
def told(*_):
    print("told", rank, flush=True)
    sys.exit(143)
signal.signal(signal.SIGTERM, told)
wanted = {name: os.environ.get(name) for name in ("WORLD_SIZE", "LOCAL_RANK", "VERL_NODE_NAME", "HF_X", "MINE", "NOT")}
print(json.dumps({"rank": int(rank), "argv": sys.argv[1:], "cwd": os.getcwd(), **wanted}), flush=True)
what = os.environ.get("WHAT", "")
if what == "mistake" and node == "node2":
    print("mesh.yaml:1: what is wrong; what to do", file=sys.stderr, flush=True)
    sys.exit(2)
if what == "bug" and node == "node2":
    raise KeyError("a bug")
if what:
    print("up", rank, flush=True)
    time.sleep(1000)
"""


@dataclass
class Launch:
    process: subprocess.Popen[str]
    host: Host
    folder: Path

    @property
    def out(self) -> str:
        return (self.folder / "out").read_text()

    @property
    def err(self) -> str:
        return (self.folder / "err").read_text()

    def wait(self, seconds: float) -> int:
        return self.process.wait(seconds)

    def wait_for(self, text: str, times: int) -> None:
        there = lambda: self.out.count(text) >= times or self.process.poll() is not None  # noqa: E731
        wait_until(there, START, lambda: self.out + self.err)
        assert self.out.count(text) >= times, self.out + self.err

    def signal(self, number: signal.Signals) -> None:
        self.host.signal(self.process, number)


@dataclass
class Cluster:
    nodes: list[Host]
    ssh_config: Path
    folder: Path

    def launch(self, name: str, *arguments: str, mesh: dict[str, object] = MESH, what: str = "") -> Launch:
        """From node1."""
        folder = self.nodes[0].shared / name
        folder.mkdir()
        (folder / "ranks.py").write_text(RANKS)
        (folder / "mesh.yaml").write_text(yaml.safe_dump(mesh))
        (folder / "run.yaml").write_text(yaml.safe_dump(SETTINGS))
        files = ["--config", "run.yaml", "--device_mesh", "mesh.yaml", "--ssh-config", str(self.ssh_config)]
        given = [*files, *(["--env", f"WHAT={what}"] if what else []), *arguments]
        return self.start(folder, ["-c", VERL, str(folder / "ranks.py"), "launch", *given])

    def start(self, folder: Path, command: list[str]) -> Launch:
        with (folder / "out").open("w") as out, (folder / "err").open("w") as err:
            process = self.nodes[0].start([sys.executable, *command], cwd=folder, stdout=out, stderr=err)
        return Launch(process, self.nodes[0], folder)

    def assert_nothing_left(self, seconds: float) -> None:
        left = lambda: [process for node in self.nodes for process in others(node) + sessions(node)]  # noqa: E731
        wait_until(lambda: not left(), seconds, lambda: f"left: {[' '.join(p.cmdline()) for p in left()]}")


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with hosts(2, tmp_path / "hosts") as nodes, sshd_on(nodes, tmp_path / "ssh") as ssh_config:
        yield Cluster(nodes, ssh_config, tmp_path)


def reports(launch: Launch) -> dict[int, tuple[str, dict[str, object]]]:
    """By rank: the node in front of its line, and what it says of itself."""
    found = {}
    for line in launch.out.splitlines():
        node, _, text = line.partition(" | ")
        if text.startswith("{"):
            said = json.loads(text)
            found[said["rank"]] = (node, said)
    return found


def test_ranks_start_on_every_node_with_what_they_are_to_have(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_X", "for all")
    monkeypatch.setenv("MINE", 'it\'s $HOME; "quoted"')
    monkeypatch.setenv("NOT", "forwarded")
    odd = "trainer.experiment_name='a b $HOME \"[x]\" `id`'"
    launch = cluster.launch("normal", "--env", "MINE", "--", odd)
    assert launch.wait(START) == 0, launch.err
    found = reports(launch)
    assert sorted(found) == [0, 1, 2]
    assert sorted(node for node, _ in found.values()) == ["node1", "node1", "node2"]
    folder = launch.folder
    for node, said in found.values():
        assert said["VERL_NODE_NAME"] == node and said["WORLD_SIZE"] == "3"
        assert said["HF_X"] == "for all" and said["MINE"] == 'it\'s $HOME; "quoted"'
        assert said["NOT"] == ("forwarded" if node == "node1" else None), "node1 is where the launcher itself runs"
        assert said["cwd"] == str(folder)
        assert said["argv"] == ["--config", f"{folder}/run.yaml", "--device_mesh", f"{folder}/mesh.yaml", odd]
    assert {said["LOCAL_RANK"] for node, said in found.values() if node == "node1"} == {"0", "1"}
    assert "3 processes on 2 nodes (node1 (here): 2, node2: 1)" in launch.err
    cluster.assert_nothing_left(END)


def test_a_login_machine_starts_a_job_that_it_is_no_part_of(cluster: Cluster) -> None:
    mesh: dict[str, object] = {role: {"devices": ["node2:0-1"]} for role in ("actor", "rollout")}
    launch = cluster.launch("login", mesh=mesh)
    assert launch.wait(START) == 0, launch.err
    assert [node for node, _ in reports(launch).values()] == ["node2", "node2"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_launcher_ends_the_job_on_every_node(cluster: Cluster, number: signal.Signals) -> None:
    launch = cluster.launch("signal", what="sleep")
    launch.wait_for("up", 3)
    launch.signal(number)
    assert launch.wait(END) == 128 + number
    assert sorted(line for line in launch.out.splitlines() if "told" in line) == [
        "node1 | told 0", "node1 | told 1", "node2 | told 2",
    ]  # fmt: skip
    cluster.assert_nothing_left(END)


def test_nothing_stays_where_the_launcher_is_killed(cluster: Cluster) -> None:
    launch = cluster.launch("killed", what="sleep")
    launch.wait_for("up", 3)
    launch.signal(signal.SIGKILL)
    launch.wait(END)
    cluster.assert_nothing_left(END)


def test_nothing_stays_where_a_connection_is_cut(cluster: Cluster) -> None:
    launch = cluster.launch("cut", what="sleep")
    launch.wait_for("up", 3)
    for session in sessions(cluster.nodes[1]):
        session.kill()
    assert launch.wait(END) == 1
    assert "the connection to node2 is lost; node1 will be stopped" in launch.err
    cluster.assert_nothing_left(END)


@pytest.mark.slow
def test_nothing_stays_where_the_network_breaks(cluster: Cluster) -> None:
    """Nobody is told of it: both sides find out by themselves, in about a minute."""
    launch = cluster.launch("network", what="sleep")
    launch.wait_for("up", 3)
    begin = time.monotonic()
    cluster.nodes[1].link_down()
    assert launch.wait(SEVERED) == 1, launch.out + launch.err
    wait_until(lambda: not others(cluster.nodes[1]), SEVERED, lambda: str(others(cluster.nodes[1])))
    assert time.monotonic() - begin > 30.0, "a hitch of the network is none"
    wait_until(lambda: not others(cluster.nodes[0]), END, lambda: str(others(cluster.nodes[0])))


def test_nodes_that_cannot_be_reached_are_named_together_and_nothing_starts(cluster: Cluster) -> None:
    """One has no address, the other no sshd."""
    (listener,) = [process for process in cluster.nodes[1].processes() if process not in sessions(cluster.nodes[1])]
    listener.kill()
    mesh: dict[str, object] = {role: {"devices": ["node1:0", "node2:0", "node9:0"]} for role in ("actor", "rollout")}
    launch = cluster.launch("unreachable", mesh=mesh)
    assert launch.wait(START) == 2
    assert "verl launch: nothing was started:\n" in launch.err
    assert "node9: ssh: Could not resolve hostname node9" in launch.err
    assert "add node9 to ~/.ssh/config" in launch.err
    assert "node2: ssh: connect to host node2 port 2222: Connection refused\n  sshd does not listen there" in launch.err
    assert "node1: " not in launch.err and "Traceback" not in launch.err and launch.out == ""
    cluster.assert_nothing_left(END)


def test_a_stranger_s_host_key_is_not_taken(cluster: Cluster) -> None:
    known = cluster.ssh_config.parent / "known_hosts"
    known.write_text("".join(line for line in known.read_text().splitlines(keepends=True) if "node2" not in line))
    launch = cluster.launch("stranger")
    assert launch.wait(START) == 2
    assert "node2: " in launch.err and "Host key verification failed" in launch.err
    assert "look at its host key once, by hand: ssh node2" in launch.err


def test_a_mistake_of_the_users_gives_2_and_its_message_alone(cluster: Cluster) -> None:
    launch = cluster.launch("mistake", what="mistake")
    assert launch.wait(START + END) == 2
    assert "node2 | mesh.yaml:1: what is wrong; what to do" in launch.err
    assert "Traceback" not in launch.err
    cluster.assert_nothing_left(END)


def test_a_failure_gives_1_and_the_others_are_ended(cluster: Cluster) -> None:
    launch = cluster.launch("bug", what="bug")
    assert launch.wait(START + END) == 1
    assert "node2 | KeyError: 'a bug'" in launch.err
    assert "verl launch: node2 ended with code 1; node1 will be stopped" in launch.err
    cluster.assert_nothing_left(END)


@pytest.mark.slow
def test_training_on_two_nodes(cluster: Cluster) -> None:
    task = Task.make(cluster.nodes[0].shared / "task", num_prompts=8)
    config = task.config("two nodes", data__train_batch_size=4, trainer__total_training_steps=2)
    folder = task.folder
    write_config(config, folder / "run.yaml")
    roles = {"actor": ["node1:0", "node2:0"], "critic": ["node1:0"], "reward": ["node2:0"], "rollout": ["node2:0"]}
    mesh: dict[str, dict[str, object]] = {role: {"devices": d, "dtype": "float32"} for role, d in roles.items()}
    mesh["rollout"]["backend"] = "torch"
    (folder / "mesh.yaml").write_text(yaml.safe_dump(mesh))
    given = ["--config", "run.yaml", "--device_mesh", "mesh.yaml", "--ssh-config", str(cluster.ssh_config)]
    launch = cluster.start(folder, ["-m", "verl", "launch", *given, "--env", "OMP_NUM_THREADS=1"])
    assert launch.wait(START + TRAINING) == 0, launch.err
    assert [line["step"] for line in metrics(Path(config.trainer.run_dir)) if "actor/pg_loss" in line] == [1, 2]
    cluster.assert_nothing_left(END)
