"""At the start of every run: the facts of all ranks are brought together, and a job that cannot work ends at once."""

from __future__ import annotations

import json
import logging
import os
import secrets
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from verl.config import PPOConfig
from verl.errors import SharedError
from verl.flow.meeting import Meeting
from verl.mesh.spec import MeshSpec
from verl.preflight.compare import compare, node_names
from verl.preflight.facts import Facts, gather
from verl.preflight.needs import shortages
from verl.preflight.network import listen, unreached
from verl.preflight.table import summary, table

logger = logging.getLogger(__name__)

SHARED_SECONDS = 5.0
"""How long a node waits for rank 0's file to appear: a network file system may be late."""
_MARK = ".seen_by_all_nodes_"
_TITLE = "These nodes cannot run this job together. Mend what each line names on its node, then start again:\n"
_TITLE_OF_ONE = "This node cannot run this job:\n"


def check_cluster(config: PPOConfig, mesh: MeshSpec, meeting: Meeting) -> Sequence[str]:
    """On every rank, before there is a process group: the node of each rank; () in a job of one node.

    Raises SharedError with one table of all that is wrong.

    What is done depends on torchrun's variables alone, never on settings, which may be what differs.
    """
    nodes = int(os.environ.get("GROUP_WORLD_SIZE", "1"))
    first_here = os.environ.get("LOCAL_RANK", "0") == "0"
    facts = gather(os.environ, config, mesh, read_files=nodes > 1 and first_here)
    with ExitStack() as closing:
        if nodes > 1:
            facts = _look_for_run_dir(facts, meeting, first_here, closing)
            facts = _try_links(facts, meeting, first_here, closing)
        everyone = [Facts.load(told) for told in meeting.gather("the facts of their nodes", facts.dump())]
        verdict = json.dumps(_verdict(everyone, config, mesh)) if everyone else ""
        verdict = meeting.announce("the pre-flight's verdict", verdict)
    problem, names = json.loads(verdict)
    if problem:
        meeting.part()
        raise SharedError(problem)
    if nodes > 1 and meeting.rank == 0:
        logger.info("%d nodes:\n%s", nodes, summary(everyone))
    return names if nodes > 1 else ()


def _verdict(everyone: list[Facts], config: PPOConfig, mesh: MeshSpec) -> tuple[str, list[str]]:
    """What is wrong, and each rank's node; for rank 0, the only one that has all facts."""
    names = node_names(everyone)
    found = compare(everyone) or shortages(everyone, config, mesh)
    title = _TITLE if len(names) > 1 else _TITLE_OF_ONE
    return title + table(found) if found else "", [names[f.node] for f in everyone]


# -- the run's folder ------------------------------------------------------------------------------------------------


def _look_for_run_dir(facts: Facts, meeting: Meeting, first_here: bool, closing: ExitStack) -> Facts:
    """Rank 0 puts a file into run_dir, and a rank of each node looks for it in its own."""
    assert facts.run_dir is not None
    name = _MARK + secrets.token_hex(8)
    fault = None
    if meeting.rank == 0:
        fault = _mark(Path(facts.run_dir) / name, closing)
    name = meeting.announce("the mark in run_dir", "" if fault else name)
    if name and first_here and meeting.rank != 0:
        fault = _look(Path(facts.run_dir) / name)
    return replace(facts, run_dir_fault=fault)


def _mark(file: Path, closing: ExitStack) -> str | None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    except OSError as error:
        return f"cannot be written: {error.strerror}"
    closing.callback(file.unlink, missing_ok=True)
    return None


def _look(file: Path) -> str | None:
    deadline = time.monotonic() + SHARED_SECONDS
    while not file.exists():
        if time.monotonic() > deadline:
            return "what rank 0 writes is not seen"
        time.sleep(0.1)
    return None if os.access(file.parent, os.W_OK) else "cannot be written"


# -- the network -----------------------------------------------------------------------------------------------------


def _try_links(facts: Facts, meeting: Meeting, first_here: bool, closing: ExitStack) -> Facts:
    """A rank of each node connects to those of all others, as gloo is about to."""
    server = listen(facts.network.address) if first_here and facts.network.fault is None else None
    mine = ""
    if server is not None:
        closing.enter_context(server)
        mine = json.dumps([facts.node, *server.getsockname()])
    told = meeting.gather("their addresses", mine)
    everyone = json.loads(meeting.announce("the nodes' addresses", f"[{','.join(filter(None, told))}]"))
    if server is None:
        return facts
    peers = {node: (address, port) for node, address, port in everyone if node != facts.node}
    return replace(facts, unreachable=unreached(peers))
