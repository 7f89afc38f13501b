"""The facts of all ranks held against each other: what keeps them from being one job. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from verl.preflight.facts import Facts
from verl.preflight.files import SOURCE
from verl.preflight.network import GLOO, NCCL

ABSENT = "missing"
NOT_SET = "not set"
REACHABLE = "an address that all nodes reach"


@dataclass(frozen=True)
class Problem:
    """What is wrong on one node."""

    node: str
    ranks: tuple[int, ...]
    what: str
    here: str
    """As it is."""
    wanted: str
    """As it is elsewhere, or has to be."""
    remedy: str


def compare(facts: Sequence[Facts]) -> list[Problem]:
    """What differs and may not, and what no node may be like. Empty: these ranks can be a job.

    The odd nodes are those that differ from most of the others; where as many differ as agree, from rank 0's.
    """
    names = node_names(facts)
    found = [*_accelerators(facts, names), *_versions(facts, names), *_settings(facts, names), *_files(facts, names)]
    if len(names) > 1:
        found += [*_run_dir(facts, names), *_network(facts, names)]
    return found


def node_names(facts: Sequence[Facts]) -> dict[int, str]:
    """How messages call each node, by its group rank: its name, and its number too where two bear one name."""
    first = {f.node: f.process.hosts[0] for f in sorted(facts, key=lambda f: -f.rank)}
    shared = {name for name, count in Counter(first.values()).items() if count > 1}
    return {node: f"{name} (group rank {node})" if name in shared else name for node, name in sorted(first.items())}


@dataclass(frozen=True)
class _Odd:
    """Ranks of one node with a value that is not the usual one."""

    node: int
    ranks: tuple[int, ...]
    here: str
    usual: str
    usual_node: int
    """The first node that has it."""


def _odd(facts: Sequence[Facts], values: Mapping[int, str]) -> list[_Odd]:
    """`values`: by rank; ranks without one have no say. Each node has one vote."""
    by_node: dict[int, list[int]] = defaultdict(list)
    for f in sorted(facts, key=lambda f: f.rank):
        if f.rank in values:
            by_node[f.node].append(f.rank)
    if not by_node:
        return []
    # most_common keeps the order of first appearance among equals, and nodes come in the order of their first ranks
    own = {node: Counter(values[rank] for rank in ranks).most_common(1)[0][0] for node, ranks in by_node.items()}
    usual = Counter(own.values()).most_common(1)[0][0]
    usual_node = next(node for node, value in own.items() if value == usual)
    odd: dict[tuple[int, str], list[int]] = defaultdict(list)
    for node, ranks in by_node.items():
        for rank in ranks:
            if values[rank] != usual:
                odd[node, values[rank]].append(rank)
    return [_Odd(node, tuple(ranks), here, usual, usual_node) for (node, here), ranks in odd.items()]


def _differences(
    facts: Sequence[Facts], names: Mapping[int, str], what: str, values: Mapping[int, str], remedy: str
) -> Iterator[Problem]:
    """`remedy` may name the odd {node}, the {usual} value and a node {like} which it should be."""
    for odd in _odd(facts, values):
        node, like = names[odd.node], names[odd.usual_node]
        where = "" if odd.node == odd.usual_node else f" ({like})"
        advice = remedy.replace("{node}", node).replace("{usual}", odd.usual).replace("{like}", like)
        yield Problem(node, odd.ranks, what, odd.here, f"{odd.usual}{where}", advice)


# -- devices ---------------------------------------------------------------------------------------------------------


def _accelerators(facts: Sequence[Facts], names: Mapping[int, str]) -> Iterator[Problem]:
    visible = {f.rank: text for node in names for f, text in _visible([f for f in facts if f.node == node])}
    odd = list(
        _differences(facts, names, "CUDA_VISIBLE_DEVICES", visible, "on {node}: export CUDA_VISIBLE_DEVICES={usual}")
    )
    yield from (_unset(problem) if problem.wanted.startswith(NOT_SET) else problem for problem in odd)
    blamed = {rank for problem in odd for rank in problem.ranks}
    if any(f.accelerators for f in facts):
        kinds = {f.rank: "GPUs" if f.accelerators else "none, so that it runs on the CPU" for f in facts}
        remedy = "on {node}: nvidia-smi, and python -c 'import torch; print(torch.cuda.is_available())'"
        for problem in _differences(facts, names, "accelerators", _without(kinds, blamed), remedy):
            blamed |= set(problem.ranks)
            yield problem
        yield from _too_few(facts, names, blamed)


def _visible(node: Sequence[Facts]) -> Iterator[tuple[Facts, str]]:
    """CUDA_VISIBLE_DEVICES of the ranks of one node, as far as it matters that nodes agree.

    UUIDs are each node's own, so only their number counts; and a variable that is not set shows all devices in order.
    """
    alike = len({f.visible for f in node}) == 1
    for f in node:
        if f.visible is None:
            text = ",".join(map(str, range(len(f.accelerators)))) or NOT_SET
        else:
            entries = [entry.strip() for entry in f.visible.split(",") if entry.strip()]
            by_uuid = any(not entry.lstrip("-").isdigit() for entry in entries)
            text = f"{len(entries)} UUIDs" if by_uuid and alike else ",".join(entries) or "empty"
        yield f, text


def _unset(problem: Problem) -> Problem:
    return replace(problem, remedy=f"on {problem.node}: unset CUDA_VISIBLE_DEVICES")


def _too_few(facts: Sequence[Facts], names: Mapping[int, str], blamed: set[int]) -> Iterator[Problem]:
    for node, name in names.items():
        lacking = [f for f in facts if f.node == node and f.rank not in blamed and f.local_world_size > _seen(f)]
        if lacking:
            seen = _seen(lacking[0])
            yield Problem(
                name,
                tuple(sorted(f.rank for f in lacking)),
                "devices",
                f"{seen} visible",
                f"{lacking[0].local_world_size}, one a process",
                f"on {name}: make more devices visible (CUDA_VISIBLE_DEVICES), or torchrun --nproc_per_node={seen}",
            )


def _seen(facts: Facts) -> int:
    return len(facts.accelerators)


def _without(values: Mapping[int, str], ranks: set[int]) -> dict[int, str]:
    return {rank: value for rank, value in values.items() if rank not in ranks}


# -- software and settings -------------------------------------------------------------------------------------------

_VERSION_REMEDIES = {
    "python": "on {node}: start torchrun from an environment of Python {usual}",
    "nccl": "on {node}: the NCCL of the others' torch; LD_LIBRARY_PATH or LD_PRELOAD may bring another",
}


def _versions(facts: Sequence[Facts], names: Mapping[int, str]) -> Iterator[Problem]:
    """What is not installed on some nodes (vLLM where nothing is generated) is no difference."""
    for name in dict.fromkeys(name for f in facts for name in f.versions):
        known = {f.rank: version for f in facts if (version := f.versions.get(name)) is not None}
        remedy = _VERSION_REMEDIES.get(name, f"on {{node}}: pip install '{name}=={{usual}}'")
        yield from _differences(facts, names, name, known, remedy)


def _settings(facts: Sequence[Facts], names: Mapping[int, str]) -> Iterator[Problem]:
    told = [f for f in facts if f.settings]
    remedy = "start {node} as {like}: the same command, configuration and mesh files, and environment variables"
    for name in dict.fromkeys(name for f in told for name in f.settings):
        values = {f.rank: f.settings.get(name, ABSENT) for f in told}
        yield from _differences(facts, names, name, values, remedy)


# -- files -----------------------------------------------------------------------------------------------------------


def _files(facts: Sequence[Facts], names: Mapping[int, str]) -> Iterator[Problem]:
    """What a node says nothing of, since the folder around it is missing, is no second difference."""
    for what in dict.fromkeys(what for f in facts for what in f.files):
        values = {f.rank: f.files[what] or ABSENT for f in facts if what in f.files}
        remedy = (
            "on {node}: the same commit of verl as on {like} (git status, git rev-parse HEAD)"
            if what == SOURCE
            else "copy it from {like} to {node}, or use a path that all nodes share"
        )
        yield from _differences(facts, names, what, values, remedy)


def _run_dir(facts: Sequence[Facts], names: Mapping[int, str]) -> Iterator[Problem]:
    first = names[min(facts, key=lambda f: f.rank).node]
    for f in facts:
        if f.run_dir_fault is not None:
            yield Problem(
                names[f.node],
                _ranks_of(f.node, facts),
                "trainer.run_dir",
                f.run_dir_fault,
                f"one folder for all nodes ({first})",
                f"set trainer.run_dir to a folder on storage that all nodes mount at one path; it is {f.run_dir}",
            )


# -- network ---------------------------------------------------------------------------------------------------------


def _network(facts: Sequence[Facts], names: Mapping[int, str]) -> Iterator[Problem]:
    stacks = {f.network.stack for f in facts}
    if len(stacks) == 1 and "" not in stacks:
        return  # one machine plays all nodes, and its loopback reaches them all
    faulty = {}
    for f in facts:
        if f.network.fault is not None and f.node not in faulty:
            ranks, remedy = _ranks_of(f.node, facts), f"on {names[f.node]}: export {interface_setting(f)}"
            faulty[f.node] = Problem(names[f.node], ranks, "network", f.network.fault, REACHABLE, remedy)
    yield from faulty.values()
    for f in facts:
        for other, tried in f.unreachable.items():
            if f.node not in faulty and other not in faulty:
                name, there = names[f.node], names[other]
                yield Problem(
                    name,
                    _ranks_of(f.node, facts),
                    "network",
                    f"no connection to {there} at {tried}",
                    "any port of any node is reached",
                    f"open the firewall between {name} and {there}, or choose {there}'s interface by {GLOO} and {NCCL}",
                )


def interface_setting(facts: Facts) -> str:
    """The variables by which gloo and NCCL take the interface that leads to the others."""
    way = facts.network.toward_others or "INTERFACE"
    return f"{GLOO}={way} {NCCL}={way}"


def _ranks_of(node: int, facts: Sequence[Facts]) -> tuple[int, ...]:
    return tuple(sorted(f.rank for f in facts if f.node == node))
