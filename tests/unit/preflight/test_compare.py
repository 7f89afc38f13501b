"""Which differences between ranks stop a job, and which node each of them is laid to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.support.paper_clusters import A800, FILES, GIB, SETTINGS, VERSIONS, changed, cluster, ranks_of
from verl.preflight.compare import compare, node_names
from verl.preflight.facts import Accelerator, Facts
from verl.preflight.network import Network

NODES = st.lists(st.integers(1, 4), min_size=1, max_size=6)

DIFFERENCES: dict[str, tuple[dict[str, Any], str]] = {
    "visible devices": ({"visible": "3,2,1,0"}, "CUDA_VISIBLE_DEVICES"),
    "no device": ({"accelerators": ()}, "accelerators"),
    **{name: ({"versions": VERSIONS | {name: "0.0.1"}}, name) for name in VERSIONS},
    **{f"setting {name}": ({"settings": SETTINGS | {name: "7"}}, name) for name in SETTINGS},
    "a further setting": ({"settings": SETTINGS | {"device_mesh.reward.devices": "[]"}}, "device_mesh.reward.devices"),
    **{f"other {what}": ({"files": FILES | {what: "8 bytes, cc"}}, what) for what in FILES},
    **{f"no {what}": ({"files": FILES | {what: None}}, what) for what in FILES},
    "run_dir": ({"run_dir_fault": "what rank 0 writes there is not seen"}, "trainer.run_dir"),
    "loopback": ({"network": Network("lo", "127.0.1.1", None, "eth0")}, "network"),
    "link-local": ({"network": Network("eth1", "169.254.3.4", None, "eth0")}, "network"),
    "no interface": ({"network": Network(None, None, "ib7", "eth0")}, "network"),
    "a name that leads nowhere": ({"network": Network(None, None, None, "eth0")}, "network"),
}
"""What is other on one node -> what the one problem is about. Ranks are the first of each node where files are."""


def of_first_ranks(what: str) -> bool:
    return what in FILES


@given(NODES)
def test_ranks_that_are_alike_are_a_job(per_node: list[int]) -> None:
    assert compare(cluster(per_node)) == []
    assert compare(cluster(per_node, accelerators=(), visible=None, versions=VERSIONS | {"nccl": None})) == []


@given(
    st.lists(st.integers(1, 4), min_size=3, max_size=6), st.sampled_from(sorted(DIFFERENCES)), st.data(), st.randoms()
)
def test_one_node_that_differs_from_the_others_is_the_one_problem(
    per_node: list[int], name: str, data: st.DataObject, random: Any
) -> None:
    node = data.draw(st.integers(0, len(per_node) - 1))
    changes, what = DIFFERENCES[name]
    facts = cluster(per_node)
    ranks = ranks_of(facts, node)
    if of_first_ranks(what) or what == "trainer.run_dir":
        ranks = ranks[:1]
    spoilt = changed(facts, ranks, **changes)
    random.shuffle(spoilt)
    (problem,) = compare(spoilt)
    assert (problem.node, problem.what) == (f"node{node + 1}", what)
    assert set(problem.ranks) <= set(ranks_of(facts, node)) and set(ranks) <= set(problem.ranks)
    assert f"node{node + 1}" in problem.remedy or what == "trainer.run_dir"


@given(st.lists(st.integers(2, 4), min_size=1, max_size=4), st.data())
def test_one_rank_that_differs_is_named_alone(per_node: list[int], data: st.DataObject) -> None:
    facts = cluster([*per_node, 3])
    rank = data.draw(st.integers(0, len(facts) - 4))
    assume(
        rank != 0 or len(per_node) > 1
    )  # of two ranks that disagree rank 0 speaks for its node, here for half of all
    (problem,) = compare(changed(facts, [rank], versions=VERSIONS | {"torch": "2.12.1"}))
    assert (problem.what, problem.ranks, problem.here) == ("torch", (rank,), "2.12.1")


@pytest.mark.parametrize(("what", "odd"), [("rank 0's node", 0), ("the other node", 1)])
def test_of_two_nodes_rank_0s_is_the_measure(what: str, odd: int) -> None:
    facts = cluster([2, 2])
    (problem,) = compare(changed(facts, ranks_of(facts, odd), versions=VERSIONS | {"torch": "2.12.1"}))
    assert problem.node == "node2" and problem.ranks == (2, 3)
    assert (problem.here, problem.wanted) == (
        ("2.12.1", "2.13.0 (node1)") if odd == 1 else ("2.13.0", "2.12.1 (node1)")
    )


def test_a_node_has_one_vote_however_many_ranks_it_has() -> None:
    facts = cluster([8, 1, 1])
    (problem,) = compare(changed(facts, ranks_of(facts, 0), versions=VERSIONS | {"torch": "2.12.1"}))
    assert problem.node == "node1" and problem.ranks == tuple(range(8))


def test_every_difference_is_told_at_once() -> None:
    facts = changed(
        cluster([2, 2, 2]), [2, 3], versions=VERSIONS | {"torch": "2.12.1"}, settings=SETTINGS | {"trainer.seed": "2"}
    )
    facts = changed(facts, [4], run_dir_fault="what rank 0 writes there is not seen")
    assert [(p.node, p.what) for p in compare(facts)] == [
        ("node2", "torch"),
        ("node2", "trainer.seed"),
        ("node3", "trainer.run_dir"),
    ]


def legitimate() -> dict[str, Callable[[Sequence[Facts]], list[Facts]]]:
    return {
        "UUIDs are each node's own": lambda facts: [
            replace(f, visible=",".join(f"GPU-{f.node}{i}" for i in range(4))) for f in facts
        ],
        "a variable that is not set shows what 0,1,2,3 shows": lambda facts: changed(facts, [0, 1, 2, 3], visible=None),
        "GPUs of another kind": lambda facts: changed(facts, [0, 1, 2, 3], accelerators=(Accelerator("H20", GIB),) * 4),
        "no vLLM where nothing is generated": lambda facts: changed(facts, [4], versions=VERSIONS | {"vllm": None}),
        "spaces": lambda facts: changed(facts, [0, 1, 2, 3], visible="0, 1, 2,3"),
        "memory": lambda facts: changed(facts, [0], memory=replace(facts[0].memory, free=GIB)),
        "other interfaces": lambda facts: changed(facts, [0], network=Network("ens3", "10.0.0.1", None, "ens3")),
    }  # fmt: skip


@pytest.mark.parametrize("what", legitimate())
def test_what_may_differ(what: str) -> None:
    assert compare(legitimate()[what](cluster([4, 4]))) == []


@pytest.mark.parametrize(
    ("visible", "text"),
    [
        ("0,1", "0,1"),
        ("0,1,2", "0,1,2"),
        ("4,5,6,7", "4,5,6,7"),
        ("", "empty"),
        ("GPU-a,GPU-b", "2 UUIDs"),
        (None, "0,1"),
    ],
)
def test_visible_devices_that_differ(visible: str | None, text: str) -> None:
    """Too few devices are not told a second time."""
    facts = cluster([4, 4], visible="0,1,2,3")
    (problem,) = compare(changed(facts, [4, 5, 6, 7], visible=visible, accelerators=(A800, A800)))
    assert (problem.node, problem.what, problem.here) == ("node2", "CUDA_VISIBLE_DEVICES", text)
    assert problem.remedy == "on node2: export CUDA_VISIBLE_DEVICES=0,1,2,3"


def test_the_variable_is_to_be_unset_where_the_others_have_none() -> None:
    facts = cluster([1, 1, 1], visible=None, accelerators=(), versions={"torch": "2.13.0"})
    (problem,) = compare(changed(facts, [1], visible="0"))
    assert problem.remedy == "on node2: unset CUDA_VISIBLE_DEVICES"


def test_a_launcher_that_shows_each_rank_its_own_device_is_told_of() -> None:
    facts = [replace(f, visible=f"GPU-{f.rank}", accelerators=(A800,)) for f in cluster([2, 2])]
    problems = compare(facts)
    assert problems and {p.what for p in problems} <= {"CUDA_VISIBLE_DEVICES", "devices"}


def test_more_processes_than_devices() -> None:
    facts = [replace(f, accelerators=(A800, A800)) for f in cluster([4, 4])]
    assert [(p.node, p.ranks, p.here, p.wanted) for p in compare(facts)] == [
        ("node1", (0, 1, 2, 3), "2 visible", "4, one a process"),
        ("node2", (4, 5, 6, 7), "2 visible", "4, one a process"),
    ]


def test_a_link_that_is_closed_is_told_by_who_tried_it() -> None:
    facts = changed(cluster([1, 1, 1]), [1], unreachable={2: "10.0.0.3: no answer"})
    (problem,) = compare(facts)
    assert problem.node == "node2" and problem.here == "no connection to node3 at 10.0.0.3: no answer"
    assert "firewall between node2 and node3" in problem.remedy


def test_a_node_that_binds_to_a_wrong_address_is_not_blamed_on_those_who_cannot_reach_it() -> None:
    facts = changed(cluster([1, 1, 1]), [2], network=Network("lo", "127.0.1.1", None, "eth0"))
    facts = changed(facts, [0, 1], unreachable={2: "127.0.1.1: no answer"})
    (problem,) = compare(facts)
    assert problem.node == "node3"
    assert problem.remedy == "on node3: export GLOO_SOCKET_IFNAME=eth0 NCCL_SOCKET_IFNAME=eth0"


def test_nodes_that_one_machine_plays_reach_each_other_by_its_loopback() -> None:
    alone = Network("lo", "127.0.0.1", None, "lo", stack="one")
    assert compare(cluster([1, 1], network=alone)) == []
    other = replace(alone, stack="two")
    assert [p.node for p in compare(changed(cluster([1, 1], network=alone), [1], network=other))] == ["node1", "node2"]


def test_nodes_of_one_name_are_told_apart() -> None:
    facts = [replace(f, process=replace(f.process, hosts=("pod",))) for f in cluster([1, 1, 1])]
    assert node_names(facts) == {0: "pod (group rank 0)", 1: "pod (group rank 1)", 2: "pod (group rank 2)"}


@given(NODES)
def test_facts_survive_the_wire(per_node: list[int]) -> None:
    facts = changed(cluster(per_node), [0], unreachable={3: "10.0.0.3: no answer"}, run_dir_fault="no")
    assert [Facts.load(f.dump()) for f in facts] == facts
