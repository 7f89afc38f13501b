"""scripts/slurm/train.sbatch under a real Slurm of two nodes, which are hosts of their own on this machine."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from tests.support.hosts import Host, hosts, requires_hosts
from tests.support.jobs import ROOT, wait_until, write_config
from tests.support.runs import Task, metrics
from tests.support.slurm import Slurm, requires_slurm, slurm_on

pytestmark = [pytest.mark.cluster, pytest.mark.slow, requires_hosts, requires_slurm, pytest.mark.timeout(1500)]

SBATCH = ROOT / "scripts" / "slurm" / "train.sbatch"
START = 400.0
"""Seconds for a job to come up on a busy machine."""
NAMES = ["gpu-a", "gpu-b"]
"""Slurm's names; the hosts call themselves node1 and node2."""

# In place of train_ppo.py.
RANKS = """
import json, os, signal, sys, time
sys.stdout.reconfigure(line_buffering=True, write_through=False)  # as train_ppo.py does
def told(*_):
    print("told", os.environ["RANK"], flush=True)
    sys.exit(143)
signal.signal(signal.SIGTERM, told)
names = ("RANK", "GROUP_RANK", "LOCAL_RANK", "WORLD_SIZE", "VERL_NODE_NAME", "SLURM_NODEID")
print(json.dumps({"argv": sys.argv[1:], "host": os.uname().nodename} | {n: os.environ[n] for n in names}), flush=True)
what, start = sys.argv[1], int(os.environ.get("SLURM_RESTART_COUNT", "0"))
if what == "mistake":
    print("mesh.yaml:1: what is wrong; what to do", file=sys.stderr)
    sys.exit(2)
if what == "sleep" or (what == "sleep at first" and start == 0):
    print("up", flush=True)
    time.sleep(1000)
print("done at start", start, flush=True)
"""


@dataclass
class Job:
    slurm: Slurm
    number: str
    log: Path

    def wait(self, state: str) -> dict[str, str]:
        return self.slurm.wait(self.number, state, START)

    def wait_for(self, text: str, times: int) -> None:
        wait_until(
            lambda: self.text.count(text) >= times, START, lambda: f"{self.text}\n{self.slurm.show(self.number)}"
        )

    @property
    def text(self) -> str:
        return self.log.read_text() if self.log.exists() else ""


@dataclass
class Cluster:
    slurm: Slurm
    nodes: list[Host]

    def submit(self, folder: Path, *arguments: str, **environ: str) -> Job:
        log = self.nodes[0].shared / f"{folder.name}.log"
        given = ["--nodes=2", f"--output={log}", SBATCH, *arguments]
        number = self.slurm.submit(*given, cwd=folder, VERL_PYTHON=sys.executable, **environ)
        return Job(self.slurm, number, log)

    def submit_ranks(self, name: str, *arguments: str) -> Job:
        folder = self.nodes[0].shared / name
        folder.mkdir()
        (folder / "train_ppo.py").write_text(RANKS)
        return self.submit(folder, *arguments, VERL_NPROC="2")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("cluster")
    with hosts(2, folder / "hosts") as nodes, slurm_on(nodes, NAMES, folder / "slurm") as slurm:
        yield Cluster(slurm, nodes)


def test_ranks_are_in_the_order_of_slurms_nodes_and_know_their_names(cluster: Cluster) -> None:
    odd = ["hello", 'it\'s $HOME `id` "[x]"', "a b"]
    job = cluster.submit_ranks("normal", *odd)
    assert job.wait("COMPLETED")["ExitCode"] == "0:0"
    said = [json.loads(line.partition(": ")[2]) for line in job.text.splitlines() if '"argv"' in line]
    found = {int(one["RANK"]): one for one in said}
    assert sorted(found) == [0, 1, 2, 3]
    for rank, one in found.items():
        node = rank // 2
        assert one["argv"] == odd
        assert one["VERL_NODE_NAME"] == NAMES[node] and one["host"] == f"node{node + 1}"
        assert one["GROUP_RANK"] == one["SLURM_NODEID"] == str(node)
        assert one["LOCAL_RANK"] == str(rank % 2) and one["WORLD_SIZE"] == "4"


def test_before_the_time_limit_ranks_are_told_and_the_job_is_queued_again(cluster: Cluster) -> None:
    job = cluster.submit_ranks("limit", "sleep at first")
    job.wait_for("up", 4)
    cluster.slurm.run("scancel", "--batch", "--signal=USR1", job.number)  # what Slurm sends then
    job.wait_for("queued again", 1)
    shown = job.wait("COMPLETED")
    assert shown["Restarts"] == "1" and shown["ExitCode"] == "0:0"
    assert job.text.count("told") == 4 and job.text.count("done at start 1") == 4
    assert "start 1, nodes gpu-a gpu-b" in job.text and "start 2, nodes gpu-a gpu-b" in job.text


def test_a_mistake_is_not_queued_again(cluster: Cluster) -> None:
    job = cluster.submit_ranks("mistake", "mistake")
    shown = job.wait("FAILED")
    assert shown["ExitCode"] == "2:0" and shown["Restarts"] == "0"
    assert "mesh.yaml:1: what is wrong; what to do" in job.text and "Traceback" not in job.text


def test_scancel_tells_the_ranks_and_is_the_end(cluster: Cluster) -> None:
    job = cluster.submit_ranks("cancelled", "sleep")
    job.wait_for("up", 4)
    cluster.slurm.run("scancel", job.number)
    job.wait("CANCELLED")
    job.wait_for("told", 4)


def test_training_goes_on_where_it_was(cluster: Cluster) -> None:
    """The mesh has a node by its number and one by its name."""
    task = Task.make(cluster.nodes[0].shared / "task", num_prompts=8)
    config = task.config("run", data__train_batch_size=4, trainer__total_training_steps=4, trainer__save_freq=1)
    write_config(config, task.folder / "run.yaml")
    roles = {"actor": ["node0:0", "gpu-b:0"], "critic": ["node0:0"], "reward": ["gpu-b:0"], "rollout": ["gpu-b:0"]}
    mesh: dict[str, dict[str, object]] = {role: {"devices": d, "dtype": "float32"} for role, d in roles.items()}
    mesh["rollout"]["backend"] = "torch"
    (task.folder / "mesh.yaml").write_text(yaml.safe_dump(mesh))
    files = ["--config", str(task.folder / "run.yaml"), "--device_mesh", str(task.folder / "mesh.yaml")]
    job = cluster.submit(ROOT, *files)
    run_dir = Path(config.trainer.run_dir)
    wait_until(lambda: (run_dir / "checkpoints" / "step_1").is_dir(), START, lambda: job.text)
    cluster.slurm.run("scancel", "--batch", "--signal=USR1", job.number)
    job.wait_for("queued again", 1)
    assert job.wait("COMPLETED")["Restarts"] == "1"
    assert "resumed after step" in job.text
    steps = [line["step"] for line in metrics(run_dir) if "actor/pg_loss" in line]
    assert steps == [1, 2, 3, 4], "each once"
