"""What `verl launch` starts where: for each node of a mesh its torchrun command, environment and folder. Pure."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from verl.errors import UserError
from verl.mesh.spec import MeshSpec
from verl.monitor.redact import redact, redact_argument

FORWARDED = ("HF_", "NCCL_", "GLOO_", "CUDA_")
"""Variables whose names begin so are set on every node as they are where the launch was called."""

JOINT_OUTPUT = "VERL_JOINT_OUTPUT"
"""A variable that tells the ranks that the output of all nodes is shown together, so that one may speak for all."""

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# Nodes import torch at different speeds, the first time from a cold disk: the first to look for the rendezvous waits
# so many seconds until it is there (torch's own default is 60).
_RENDEZVOUS_PATIENCE = 300


@dataclass(frozen=True)
class Order:
    """What a node is told to run."""

    command: tuple[str, ...]
    environment: dict[str, str]
    """Added to the environment that the node has."""
    workdir: str

    def to_line(self) -> bytes:
        return json.dumps(asdict(self)).encode() + b"\n"

    @classmethod
    def from_line(cls, line: bytes) -> Order:
        raw = json.loads(line)
        return cls(tuple(raw["command"]), raw["environment"], raw["workdir"])

    def shell_line(self) -> str:
        """The same for a POSIX shell, to be shown: the values of variables that hold secrets are hidden."""
        shown = redact(self.environment)
        settings = [f"{name}={shlex.quote(shown[name])}" for name in sorted(shown)]
        arguments = [shlex.quote(redact_argument(argument)) for argument in self.command]
        return " ".join(["cd", shlex.quote(self.workdir), "&&", *settings, *arguments])


@dataclass(frozen=True)
class NodePlan:
    name: str
    """As the mesh has it; "" for the one node of a mesh of integers."""
    is_here: bool
    """Started without ssh."""
    num_processes: int
    order: Order


@dataclass(frozen=True)
class Job:
    """What is the same on all nodes."""

    script: str
    """Absolute, like `python`: ssh begins in another folder."""
    arguments: tuple[str, ...]
    python: str
    environment: Mapping[str, str]
    workdir: str
    port: int
    """Of the rendezvous, on the first node."""
    run_id: str


def processes_by_node(mesh: MeshSpec) -> dict[str, int]:
    """How many processes each node needs, in the order in which the mesh names the nodes; "" stands for plain indices.

    Empty where all that the mesh says is `devices: all`.
    """
    counts: dict[str, int] = {}
    for role in mesh.roles.values():
        for device in role.devices:
            node = device.node or ""
            counts[node] = max(counts.get(node, 0), device.index + 1)
    assert "" not in counts or len(counts) == 1, "a mesh spells all devices one way"
    return counts


def is_here(node: str, own_names: Sequence[str]) -> bool:
    """Whether a node's name is one of this machine's: the same, or the short form of it, in any case."""
    names = {form for name in own_names for form in (name.lower(), name.lower().partition(".")[0])}
    return node == "" or node.lower() in names


def plan_nodes(
    counts: Mapping[str, int], job: Job, own_names: Sequence[str], addresses: Mapping[str, str]
) -> list[NodePlan]:
    """The plan of each node, the one with the rendezvous first.

    Args:
        counts: processes by node, whose names are what ssh is called with.
        job: what is started.
        own_names: names of the machine that launches.
        addresses: by which the nodes reach each other, where that is not the name in the mesh.
    """
    first = next(iter(counts))
    plans = []
    for node, count in counts.items():
        meeting = _meeting(job, addresses.get(first, first), addresses.get(node, node), len(counts), node == first)
        told = {"VERL_NODE_NAME": node} if node else {}
        told |= {JOINT_OUTPUT: "1"} if len(counts) > 1 else {}
        torchrun = [job.python, "-P", "-m", "verl.launch.torchrun", *meeting, f"--nproc_per_node={count}"]
        order = Order((*torchrun, job.script, *job.arguments), {**job.environment, **told}, job.workdir)
        plans.append(NodePlan(node, is_here(node, own_names), count, order))
    return plans


def _meeting(job: Job, host: str, address: str, num_nodes: int, is_host: bool) -> list[str]:
    """torchrun's flags for how the nodes find each other."""
    if num_nodes == 1:
        return ["--standalone"]
    endpoint = f"[{host}]:{job.port}" if ":" in host else f"{host}:{job.port}"
    return [
        f"--nnodes={num_nodes}",
        "--rdzv_backend=c10d",
        f"--rdzv_endpoint={endpoint}",
        f"--rdzv_id={job.run_id}",
        # said, since torch guesses it from names, and a node may answer to more of them than it knows
        f"--rdzv_conf=is_host={int(is_host)},read_timeout={_RENDEZVOUS_PATIENCE}",
        f"--local_addr={address}",
    ]


def forwarded(environ: Mapping[str, str], asked: Sequence[str]) -> dict[str, str]:
    """The variables that go to every node: those that begin as in FORWARDED, and NAME or NAME=VALUE in `asked`."""
    chosen = {name: value for name, value in environ.items() if name.startswith(FORWARDED)}
    for entry in asked:
        name, equals, value = entry.partition("=")
        if not _NAME.fullmatch(name):
            raise UserError(f"verl launch: --env {entry}: {name!r} is no variable's name; write NAME or NAME=VALUE")
        if not equals and name not in environ:
            raise UserError(f"verl launch: --env {name}: not set here; export it, or write --env {name}=VALUE")
        chosen[name] = value if equals else environ[name]
    return chosen


def keeper_command(python: str) -> list[str]:
    """What runs on each node, is told the order on its standard input, and ends it when that closes."""
    return [python, "-P", "-m", "verl.launch.node"]


def ssh_command(node: str, python: str, config: str | None) -> list[str]:
    """OpenSSH's client as it starts a node.

    It asks nothing (BatchMode): several nodes would ask at once. It looks whether the other side lives, and shares a
    connection that is there (ControlPath, for sites with a second factor), but leaves none behind.
    """
    options = {"BatchMode": "yes", "ConnectTimeout": "15", "ServerAliveInterval": "15", "ControlMaster": "no"}
    return [
        "ssh",
        *(["-F", config] if config is not None else []),
        "-T",
        *(part for name, value in options.items() for part in ("-o", f"{name}={value}")),
        "--",
        node,
        f"exec {shlex.join(keeper_command(python))} --greet",
    ]
