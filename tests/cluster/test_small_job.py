"""Two hosts with a process each: a whole run, and what ends one that cannot work, within seconds and on both nodes."""

from __future__ import annotations

import json
import re
import shutil
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.hosts import Host, hosts, requires_hosts
from tests.support.jobs import wait_until, write_config
from tests.support.node_jobs import OnHost, make_checkout, started
from tests.support.runs import REWARD, Task

pytestmark = [pytest.mark.cluster, requires_hosts, pytest.mark.timeout(600)]

MESH = {
    "actor": {"devices": ["node1:0", "node2:0"], "dtype": "float32"},
    "critic": {"devices": ["node1:0"], "dtype": "float32"},
    "rollout": {"devices": ["node2:0"], "backend": "torch", "dtype": "float32"},
}
START = 500.0
"""Seconds that interpreters may take to import torch and transformers on a busy machine."""
LIMIT = 20.0
"""trainer.stage_timeout where a link is cut."""
SLACK = 60.0
"""What torchrun, cut off too, may take to end."""


class Cluster:
    """Two hosts, all that a run reads in their shared folder, and the command that starts it."""

    def __init__(self, pair: list[Host]) -> None:
        self.node1, self.node2 = pair
        self.checkout = make_checkout(self.node1.shared / "verl", yaml.safe_dump(MESH))
        self.task = Task.make(self.node1.shared / "task", num_prompts=4)
        self.number = 0

    def command(self, *further: str, **changes: Any) -> list[str]:
        """torchrun's, for a run of its own. `changes`: of the settings, as in Task.config. `further`: arguments."""
        self.number += 1
        settings: dict[str, Any] = {
            "data__train_batch_size": 2,
            "trainer__progress": False,
            "trainer__total_training_steps": 1,
        }
        config = self.task.config(f"run {self.number}", **settings | changes)
        file = write_config(config, self.node1.shared / f"config_{self.number}.yaml")
        return [
            "torchrun", "--nnodes=2", "--nproc_per_node=1", "--rdzv_backend=c10d", "--rdzv_endpoint=node1:29400",
            f"--rdzv_id=run_{self.number}", "train_ppo.py", "--config", str(file), "--device_mesh",
            "device_mesh.yaml", *further,
        ]  # fmt: skip

    @property
    def run_dir(self) -> Path:
        """Of the newest command."""
        return self.task.folder / "runs" / f"run {self.number}"

    def refused(
        self,
        command: Sequence[str],
        on_node2: Sequence[str] | None = None,
        env_of_node2: Mapping[str, str] | None = None,
    ) -> list[str]:
        """What each node says of a job that is refused. `on_node2`: the command there, where it is another one."""
        with started(
            self.checkout, (self.node1, command, {}), (self.node2, on_node2 or command, env_of_node2 or {})
        ) as parts:
            codes = [part.wait(START) for part in parts]
            said = [own_words(part) for part in parts]
        assert codes == [1, 1], said
        return said


def own_words(part: OnHost) -> str:
    """Without torchrun's, and without the warnings of torch's C++."""
    lines = [line for line in part.said.splitlines() if not re.match(r"\[W\d+ ", line)]
    foreign = r"^[EWI]\d{4} |^Traceback|^Exception raised from"
    return re.split(foreign, "\n".join(lines), maxsplit=1, flags=re.MULTILINE)[0].strip()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with hosts(2, tmp_path_factory.mktemp("small")) as pair:
        yield Cluster(pair)


def test_a_run_over_two_nodes_of_which_one_comes_late(cluster: Cluster) -> None:
    command = cluster.command()
    with started(cluster.checkout, (cluster.node1, command, {})) as (one,):
        time.sleep(3.0)
        with started(cluster.checkout, (cluster.node2, command, {})) as (two,):
            codes = [one.wait(START), two.wait(START)]
        assert codes == [0, 0], (one.said + two.said)[-6000:]
    nodes = r"2 nodes:\nnode1: rank 0, .*, eth0 10\.213\.7\.1\nnode2: rank 1, .*, eth0 10\.213\.7\.2\n"
    assert re.search(nodes, one.said)
    lines = [json.loads(line) for line in (cluster.run_dir / "metrics.jsonl").read_text().splitlines()]
    (trained,) = [line for line in lines if "actor/pg_loss" in line]
    assert trained["actor/grad_norm"] > 0 and trained["rollout/logprob_gap_max"] < 1e-4
    assert not list(cluster.run_dir.glob(".seen*")), "the mark of the pre-flight"


def test_all_that_differs_between_the_nodes_is_in_one_table(cluster: Cluster) -> None:
    node1, node2 = cluster.node1, cluster.node2
    shutil.copytree(cluster.task.folder / "model", node1.disk / "model")
    (node1.disk / "reward.py").write_text(REWARD)
    (node2.disk / "reward.py").write_text(REWARD.replace("/ 10", "/ 11"))
    # another version of a library that no rank imports, as Python's own list of what is installed tells it
    info = node2.disk / "lib" / "vllm-0.31.9.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Name: vllm\nVersion: 0.31.9\n")
    command = cluster.command(
        model__path=str(node1.local / "model"),
        reward__function__path=f"{node1.local / 'reward.py'}:compute_score",
        trainer__run_dir=str(node1.local / "run"),
    )
    env = {"CUDA_VISIBLE_DEVICES": "1,0", "PYTHONPATH": str(node2.local / "lib")}
    one, two = cluster.refused(command, [*command, "actor.optim.lr=2e-6"], env)
    assert one == two
    title, heads, *rows = one.splitlines()
    assert title.startswith("These nodes cannot run this job together.")
    assert heads.split() == ["node", "ranks", "what", "is", "should", "be", "remedy"]
    assert all(re.match(r"node2  1 ", row) for row in rows)
    whats = [re.split(r"  +", row)[2] for row in rows]
    assert whats == [
        "CUDA_VISIBLE_DEVICES", "vllm", "actor.optim.lr", "model.path", "reward.function.path",
        "trainer.run_dir",
    ]  # fmt: skip
    for remedy in (
        "on node2: unset CUDA_VISIBLE_DEVICES",
        "on node2: pip install 'vllm==",
        "start node2 as node1: the same command",
        "copy it from node1 to node2, or use a path that all nodes share",
        "set trainer.run_dir to a folder on storage that all nodes mount",
    ):
        assert remedy in one


def test_the_table_is_shown_once_where_the_output_of_all_nodes_is_together(cluster: Cluster) -> None:
    """As under `verl launch` and in Slurm's log."""
    command = cluster.command()
    joint = {"VERL_JOINT_OUTPUT": "1"}
    on_node2 = [*command, "actor.optim.lr=2e-6"]
    with started(cluster.checkout, (cluster.node1, command, joint), (cluster.node2, on_node2, joint)) as parts:
        codes = [part.wait(START) for part in parts]
        said = "\n".join(own_words(part) for part in parts)
    assert codes == [1, 1], said
    assert said.count("These nodes cannot run this job together.") == 1
    assert len([line for line in said.splitlines() if re.match(r"node2  1 +actor\.optim\.lr ", line)]) == 1, said


@pytest.mark.slow
def test_a_mistake_that_only_one_node_finds_ends_the_other_too(cluster: Cluster) -> None:
    """Before the ranks have met: this node's arguments cannot be read at all."""
    command = cluster.command()
    one, two = cluster.refused(command, [*command, "actor.optim.lrr=2e-6"])
    assert two.startswith("command line: actor.optim.lrr: ")
    assert one == f"on node2: {two}"


@pytest.mark.slow
def test_a_mesh_with_a_name_that_no_node_bears(cluster: Cluster) -> None:
    one, two = cluster.refused(cluster.command("device_mesh.rollout.devices=[node3:0]"))
    assert one.endswith(two), "after what rank 0 says of the nodes"
    assert "no node bears the name node3" in one and "job has node1: 0, node2: 0" in one
    assert "start a node with VERL_NODE_NAME=node3" in one


@pytest.mark.slow
def test_a_node_with_fewer_processes(cluster: Cluster) -> None:
    command = cluster.command("device_mesh.critic.devices=[node2:1]")
    wider = [word.replace("--nproc_per_node=1", "--nproc_per_node=2") for word in command]
    one, two = cluster.refused(wider, command)
    assert one.endswith(two), "after what rank 0 says of the nodes"
    assert "mesh needs devices node2:1; job has node1: 0-1, node2: 0" in one
    assert "1 process there: check CUDA_VISIBLE_DEVICES and --nproc_per_node" in one


@pytest.mark.slow
def test_a_host_name_that_leads_to_the_node_itself(cluster: Cluster) -> None:
    """As Debian's installer writes it. gloo would tell the others to connect to 127.0.1.1."""
    table = cluster.node2.disk.parent / "hosts"
    before = table.read_text()
    table.write_text(re.sub(r"\S+ node2\n", "127.0.1.1 node2\n", before))
    try:
        one, two = cluster.refused(cluster.command())
    finally:
        table.write_text(before)
    assert one == two
    assert re.search(r"^node2  1 +network +lo 127\.0\.1\.1, which is this node's alone", one, re.MULTILINE)
    assert "on node2: export GLOO_SOCKET_IFNAME=eth0 NCCL_SOCKET_IFNAME=eth0" in one


@pytest.mark.slow
def test_a_shm_that_is_too_small_for_an_engine_over_two_devices(tmp_path: Path) -> None:
    with hosts(2, tmp_path, shm_mib=8) as pair:
        cluster = Cluster(pair)
        rollout = 'device_mesh.rollout={devices: ["node2:0", "node2:1"], backend: vllm, tensor_parallel_size: 2}'
        command = [
            word.replace("=1", "=2") if word == "--nproc_per_node=1" else word for word in cluster.command(rollout)
        ]
        one, two = cluster.refused(command)
    assert one == two
    found = r"^node2  2-3 +/dev/shm +8 MiB free of 8 MiB +\d+ MiB: vLLM with tensor_parallel_size 2"
    assert re.search(found, one, re.MULTILINE)
    assert "--shm-size=1g" in one and "emptyDir: {medium: Memory}" in one


@pytest.mark.slow
def test_a_link_that_is_cut_ends_the_job_on_both_nodes_and_each_says_whom_it_waits_for(cluster: Cluster) -> None:
    command = cluster.command(
        trainer__stage_timeout=LIMIT, trainer__total_training_steps=1000, trainer__total_epochs=1000
    )
    with started(cluster.checkout, (cluster.node1, command, {}), (cluster.node2, command, {})) as parts:
        log = cluster.run_dir / "metrics.jsonl"
        wait_until(lambda: log.exists() and log.read_text().count("\n") >= 2, START, lambda: parts[0].said[-4000:])
        cluster.node2.link_down()
        try:
            cut = time.monotonic()
            codes = [part.wait(LIMIT + SLACK) for part in parts]
        finally:
            cluster.node2.link_up()
        assert time.monotonic() - cut < LIMIT + SLACK
        one, two = (part.said for part in parts)
    assert codes == [1, -signal.SIGKILL], one + two  # torchrun on node2 hangs in the store until TCP gives up
    limit = f"for trainer.stage_timeout = {LIMIT:g} s. Where every rank is"
    assert f"verl: rank 0 (node1) waits, and rank 1 (node2) has shown no sign of life {limit}:\n" in one
    assert (
        f"verl: rank 1 (node2) has had no answer from the job's store on node1 {limit}, as far as it was seen:\n" in two
    )
    for said in (one, two):
        assert re.search(r"^  rank 0 \(node1\): ", said, re.M) and re.search(r"^  rank 1 \(node2\): ", said, re.M)
