"""`verl doctor`: what the pre-flight finds on this node, and what would keep a run from working on it."""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from verl.errors import EXIT_CODE

if TYPE_CHECKING:
    from verl.preflight.facts import Facts

GIB = 1 << 30


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "doctor",
        help="look this node over",
        description="Shows what a run finds on this node, and what would go wrong here. With the arguments of "
        "train_ppo.py, such as --config and --device_mesh, it looks at what that run needs too. Exit code 2 where "
        "something would go wrong.",
        usage="verl doctor [--json] [arguments of train_ppo.py ...]",
        allow_abbrev=False,
    )
    parser.add_argument("--json", action="store_true", help="for programs: one object with facts and problems")
    parser.set_defaults(rest=[])


def run(arguments: argparse.Namespace) -> int:
    # not above: --help need not wait for torch
    from verl.cli.command_line import load
    from verl.preflight.facts import gather
    from verl.preflight.local import diagnose
    from verl.preflight.table import listing

    config, mesh = load(arguments.rest) if arguments.rest else (None, None)
    facts = gather(os.environ, config, mesh, read_files=True)
    problems = diagnose(facts, config, mesh)
    if arguments.json:
        print(json.dumps({"facts": asdict(facts), "problems": [asdict(problem) for problem in problems]}, indent=2))
    else:
        print("\n".join(f"{name:24} {value}" for name, value in _lines(facts)))
        print(
            "\nThis would go wrong:\n" + listing(problems)
            if problems
            else "\nNothing here would keep a run from working."
        )
    return EXIT_CODE if problems else 0


def _lines(facts: Facts) -> list[tuple[str, str]]:
    from verl.preflight.table import devices

    memory, network = facts.memory, facts.network
    limit = "no limit of a container"
    if memory.limit is not None and memory.left is not None:
        limit = f"the container's limit is {_size(memory.limit)}, of which {_size(memory.left)} are left"
    bound = f"{network.interface} {network.address}" if network.interface else "none"
    return [
        ("host", ", ".join(facts.process.hosts)),
        ("devices", devices(facts)),
        ("visible", f"CUDA_VISIBLE_DEVICES={facts.visible}" if facts.visible is not None else "all"),
        *((name, version or "none") for name, version in facts.versions.items()),
        ("network", f"{bound} ({f'GLOO_SOCKET_IFNAME={network.asked}' if network.asked else 'by the host name'})"),
        ("memory", f"{_size(memory.machine)}, {_size(memory.free)} free; {limit}"),
        ("/dev/shm", f"{_size(memory.shm_size)}, {_size(memory.shm_free)} free"),
        *((what, fingerprint or "missing") for what, fingerprint in facts.files.items()),
    ]


def _size(size: int) -> str:
    return f"{size / GIB:.1f} GiB"
