"""`verl launch`: torchrun on every node of a mesh, from one of them or from a login machine."""

from __future__ import annotations

import argparse
import difflib
import os
import secrets
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from verl.cli.arguments import sort_arguments
from verl.errors import UserError
from verl.launch import ssh
from verl.launch.plan import Job, NodePlan, forwarded, is_here, plan_nodes, processes_by_node, ssh_command
from verl.launch.run import launch

TRAIN_PPO = Path(__file__).resolve().parents[2] / "train_ppo.py"
_PORT = 29400  # torchrun's own default
_FLAGS = ("--device_mesh", "--config", "--ssh-config", "--rdzv-port", "--rdzv-id", "--env", "--workdir", "--dry-run")

_DESCRIPTION = """\
Starts torchrun on every node that the mesh names, over ssh where that is another machine, shows what they write with
the node in front, and ends all of them together. Nothing but sshd has to run there.
"""
_EPILOG = """\
What stands behind -- goes to train_ppo.py on every node, which gets --config and --device_mesh too:
  verl launch --device_mesh configs/device_mesh/two_nodes_8.yaml -- actor.optim.lr=2e-6

Exit code: 0 done, 1 failed, 2 your mistake (it says what to do), 128 + number after a signal here. Ctrl-C stops the job
on all nodes, a second one kills it. docs/launch.md has the rest, and Slurm and Kubernetes.
"""


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "launch",
        help="start a job on every node of a mesh over ssh",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="verl launch --device_mesh FILE [--config FILE] [options] [-- setting=value ...]",
        allow_abbrev=False,
    )
    parser.set_defaults(rest=[])
    parser.add_argument("--device_mesh", metavar="FILE", type=Path, help="the mesh; may be in the config instead")
    parser.add_argument("--config", metavar="FILE", type=Path, help="the settings (default: configs/ppo_config.yaml)")
    parser.add_argument("--ssh-config", metavar="FILE", type=Path, help="for ssh, instead of ~/.ssh/config")
    parser.add_argument(
        "--rdzv-port", metavar="PORT", type=int, default=_PORT, help=f"on the mesh's first node (default: {_PORT})"
    )
    parser.add_argument("--rdzv-id", metavar="ID", help="of this job (default: a fresh one)")
    parser.add_argument(
        "--env",
        metavar="NAME[=VALUE]",
        action="append",
        default=[],
        help="set on every node; repeatable. HF_*, NCCL_*, GLOO_* and CUDA_* go there by themselves",
    )
    parser.add_argument("--workdir", metavar="DIR", type=Path, help="where ranks run, on every node (default: here)")
    parser.add_argument("--dry-run", action="store_true", help="show what would run on each node, and run nothing")


def run(arguments: argparse.Namespace) -> int:
    plans, config = _plans(arguments), _ssh_config(arguments)
    if arguments.dry_run:
        print("\n".join(line for plan in plans for line in _shown(plan, config)))
        return 0
    if len(plans) > 1:
        nodes = ", ".join(f"{plan.name}{' (here)' * plan.is_here}: {plan.num_processes}" for plan in plans)
        total = sum(plan.num_processes for plan in plans)
        print(f"verl launch: {total} processes on {len(plans)} nodes ({nodes})", file=sys.stderr)
    return launch(plans, sys.executable, config)


def _plans(arguments: argparse.Namespace) -> list[NodePlan]:
    if not 1 <= arguments.rdzv_port <= 65535:
        raise UserError(f"verl launch: --rdzv-port {arguments.rdzv_port}: a port is a number from 1 to 65535")
    if not TRAIN_PPO.is_file():
        raise UserError(f"verl launch: {TRAIN_PPO} is not there; verl launch needs a checkout: pip install -e CHECKOUT")
    train_arguments = _train_arguments(arguments)
    from verl.cli import command_line  # not above: --help need not wait for Hydra

    _, mesh = command_line.load(train_arguments)
    counts = processes_by_node(mesh) or {"": _num_devices()}
    own_names = [socket.gethostname(), socket.getfqdn(), "localhost", os.environ.get("VERL_NODE_NAME", "")]
    names = [name for name in own_names if name]
    remote = len(counts) > 1 or not is_here(next(iter(counts)), names)
    job = Job(
        script=str(TRAIN_PPO),
        arguments=tuple(train_arguments),
        python=sys.executable,
        environment=forwarded(os.environ, arguments.env),
        workdir=str((arguments.workdir or Path()).absolute()),
        port=arguments.rdzv_port,
        run_id=arguments.rdzv_id or f"verl-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}",
    )
    addresses = ssh.addresses(list(counts), _ssh_config(arguments)) if remote else {}
    return plan_nodes(counts, job, names, addresses)


def _train_arguments(arguments: argparse.Namespace) -> list[str]:
    """What train_ppo.py gets. Files by their absolute paths: ranks may run in another folder than this process."""
    given: list[str] = []
    for flag, path in (("--config", arguments.config), ("--device_mesh", arguments.device_mesh)):
        given += [flag, str(path.absolute())] if path is not None else []
    rest: list[str] = arguments.rest
    split = rest.index("--") if "--" in rest else len(rest)
    for token in rest[:split]:
        if token.startswith("-"):
            close = difflib.get_close_matches(token.partition("=")[0], _FLAGS, n=1)
            raise UserError(
                f"verl launch: unknown flag {token}{f', did you mean {close[0]}?' if close else ';'} "
                "`verl launch --help` lists them; what is meant for train_ppo.py stands behind --"
            )
    given += [*rest[:split], *rest[split + 1 :]]
    flags = sort_arguments(given).flags
    if flags:
        raise UserError(f"verl launch: {flags[0]} shows or sweeps; use it with train_ppo.py itself, in one process")
    return given


def _ssh_config(arguments: argparse.Namespace) -> str | None:
    if arguments.ssh_config is None:
        return None
    if not arguments.ssh_config.is_file():
        raise UserError(
            f"verl launch: --ssh-config {arguments.ssh_config}: no such file (working directory: {Path.cwd()})"
        )
    return str(arguments.ssh_config.absolute())


def _num_devices() -> int:
    """For a mesh that says `all` and nothing else."""
    import torch

    return max(1, torch.cuda.device_count())


def _shown(plan: NodePlan, config: str | None) -> Sequence[str]:
    where = plan.name or "this machine"
    way = "without ssh" if plan.is_here else " ".join(ssh_command(plan.name, sys.executable, config)[:-1])
    processes = f"{plan.num_processes} process{'es' * (plan.num_processes > 1)}"
    return [f"{where}: {processes}, {way}", f"  {plan.order.shell_line()}"]
