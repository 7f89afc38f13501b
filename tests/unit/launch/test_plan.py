"""A mesh as commands on its nodes."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.errors import UserError
from verl.launch.plan import (
    JOINT_OUTPUT,
    Job,
    NodePlan,
    Order,
    forwarded,
    is_here,
    keeper_command,
    plan_nodes,
    processes_by_node,
    ssh_command,
)
from verl.mesh.parse import parse, parse_value
from verl.monitor.redact import redact_argument

ROOT = Path(__file__).resolve().parents[3]

JOB = Job(
    script="/checkout/train_ppo.py",
    arguments=("--device_mesh", "/m.yaml", "actor.optim.lr=2e-6"),
    python="/venv/bin/python",
    environment={"HF_HOME": "/hub"},
    workdir="/work dir",
    port=29400,
    run_id="verl-1",
)
TEXT = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]))


def counts_of(**devices: Any) -> dict[str, int]:
    mesh = {"actor": {"devices": [0]}, "rollout": {"devices": [0]}}
    return processes_by_node(parse_value(mesh | {role: {"devices": d} for role, d in devices.items()}, "m.yaml"))


def value_of(flag: str, plan: NodePlan) -> str:
    (value,) = [a.removeprefix(flag + "=") for a in plan.order.command if a.startswith(flag + "=")]
    return value


# -- nodes and their processes -----------------------------------------------------------------------------------------


def test_the_shipped_mesh_of_two_nodes() -> None:
    file = ROOT / "configs" / "device_mesh" / "two_nodes_8.yaml"
    assert processes_by_node(parse(file.read_text(), file.name)) == {"node1": 4, "node2": 4}


@pytest.mark.parametrize(
    ("devices", "counts"),
    [
        ({"actor": [0, 3], "rollout": [1]}, {"": 4}),
        ({"actor": ["b:1"], "rollout": ["a:0"]}, {"b": 2, "a": 1}),
        ({"actor": ["a:7"], "rollout": ["a:0", "b:2"], "critic": ["b:0"]}, {"a": 8, "b": 3}),
    ],
)
def test_a_node_has_a_process_for_each_device_up_to_the_last_in_use(
    devices: dict[str, Any], counts: dict[str, int]
) -> None:
    found = counts_of(**devices)
    assert found == counts
    assert list(found) == list(counts), "the first node has the rendezvous"


def test_a_mesh_of_all_devices_says_nothing_of_how_many() -> None:
    assert counts_of(actor="all", rollout="all") == {}
    assert counts_of(actor="all", rollout=["a:1"]) == {"a": 2}


# -- commands ----------------------------------------------------------------------------------------------------------


def test_two_nodes_meet_at_the_first() -> None:
    first, second = plan_nodes({"a": 4, "b": 2}, JOB, ["b.example.org"], {})
    assert [(plan.name, plan.is_here, plan.num_processes) for plan in (first, second)] == [
        ("a", False, 4),
        ("b", True, 2),
    ]
    for plan in (first, second):
        assert plan.order.command[0] == "/venv/bin/python"
        assert plan.order.command[-4:] == ("/checkout/train_ppo.py", *JOB.arguments)
        assert value_of("--nnodes", plan) == "2"
        assert value_of("--rdzv_backend", plan) == "c10d"
        assert value_of("--rdzv_endpoint", plan) == "a:29400"
        assert value_of("--rdzv_id", plan) == "verl-1"
        assert value_of("--local_addr", plan) == plan.name
        assert value_of("--nproc_per_node", plan) == str(plan.num_processes)
        assert plan.order.environment == {"HF_HOME": "/hub", "VERL_NODE_NAME": plan.name, "VERL_JOINT_OUTPUT": "1"}
        assert plan.order.workdir == "/work dir"
    assert value_of("--rdzv_conf", first).startswith("is_host=1")
    assert value_of("--rdzv_conf", second).startswith("is_host=0")


def test_nodes_reach_each_other_by_the_address_that_ssh_has_for_them() -> None:
    first, second = plan_nodes({"a": 1, "b": 1}, JOB, [], {"a": "10.0.0.1", "b": "fd00::2"})
    assert value_of("--rdzv_endpoint", second) == "10.0.0.1:29400"
    assert value_of("--local_addr", first) == "10.0.0.1" and value_of("--local_addr", second) == "fd00::2"
    assert first.order.environment["VERL_NODE_NAME"] == "a", "the mesh's name stays"
    (meets_at_v6, _) = plan_nodes({"b": 1, "a": 1}, JOB, [], {"b": "fd00::2"})
    assert value_of("--rdzv_endpoint", meets_at_v6) == "[fd00::2]:29400"


@pytest.mark.parametrize(("node", "here"), [("", True), ("me", True), ("other", False)])
def test_one_node_needs_no_rendezvous(node: str, here: bool) -> None:
    (plan,) = plan_nodes({node: 4}, JOB, ["me"], {})
    assert plan.is_here == here
    assert "--standalone" in plan.order.command and value_of("--nproc_per_node", plan) == "4"
    assert not [argument for argument in plan.order.command if "rdzv" in argument or "nnodes" in argument]
    assert plan.order.environment.get("VERL_NODE_NAME", "") == node
    assert JOINT_OUTPUT not in plan.order.environment, "there is one node to speak"


@pytest.mark.parametrize(
    ("node", "own", "here"),
    [
        ("gpu7", ["gpu7"], True),
        ("GPU7", ["gpu7.example.org"], True),
        ("gpu7.example.org", ["gpu7.example.org"], True),
        ("gpu7.example.org", ["gpu7"], False),  # another domain may have a gpu7 too
        ("gpu", ["gpu7"], False),
        ("gpu7", ["gpu70", "localhost"], False),
    ],
)
def test_a_node_is_here_if_it_bears_a_name_of_this_machine(node: str, own: list[str], here: bool) -> None:
    assert is_here(node, own) == here


# -- quoting -----------------------------------------------------------------------------------------------------------


@given(command=st.lists(TEXT, min_size=1), environment=st.dictionaries(TEXT, TEXT), workdir=TEXT)
def test_an_order_arrives_as_it_was_sent(command: list[str], environment: dict[str, str], workdir: str) -> None:
    order = Order(tuple(command), environment, workdir)
    line = order.to_line()
    assert line.endswith(b"\n") and line.count(b"\n") == 1
    assert Order.from_line(line) == order


def parsed_by_a_shell(words: str) -> list[str]:
    script = f"for word in {words}; do printf '%s\\0' \"$word\"; done"
    said = subprocess.run(["sh", "-c", script], capture_output=True, check=True).stdout
    return said.decode("utf-8", "surrogateescape").split("\0")[:-1]


NASTY = ["a b", "it's", '"', "$HOME", "`id`", "a=[1,{b: c}]", "*", "\\", "!x", "~", "#", "", "-n", "line\nline", "ü☃"]


@settings(max_examples=40)
@given(python=TEXT.filter(bool))
def test_what_the_remote_shell_parses_is_the_keepers_command(python: str) -> None:
    remote = ssh_command("node", python, None)[-1]
    assert remote.startswith("exec ") and remote.endswith(" --greet")
    assert parsed_by_a_shell(remote.removeprefix("exec ")) == [*keeper_command(python), "--greet"]


@settings(max_examples=40)
@given(arguments=st.lists(TEXT.filter(lambda text: redact_argument(text) == text), min_size=1))
def test_what_a_dry_run_shows_can_be_pasted_into_a_shell(arguments: list[str]) -> None:
    order = Order(tuple(arguments), {"A": "x y"}, "/work dir")
    head, words = order.shell_line().split(" && A='x y' ", 1)
    assert shlex.split(head) == ["cd", "/work dir"]
    assert parsed_by_a_shell(words) == arguments


def test_the_shells_own_characters_are_only_characters() -> None:
    assert parsed_by_a_shell(shlex.join(NASTY)) == NASTY
    order = Order(tuple(NASTY), {}, "/w")
    assert parsed_by_a_shell(order.shell_line().removeprefix("cd /w && ")) == NASTY


def test_a_dry_run_shows_no_secret() -> None:
    line = Order(("python", "trainer.wandb.api_key=k123"), {"HF_TOKEN": "hf_123", "HF_HOME": "/hub"}, "/w").shell_line()
    assert "hf_123" not in line and "k123" not in line
    assert "HF_HOME=/hub" in line and "HF_TOKEN=" in line


def test_a_secret_is_not_on_ssh_s_command_line_where_all_users_see_it() -> None:
    assert "hf_123" not in " ".join(ssh_command("node", "python", None))


def test_a_node_cannot_be_taken_for_an_option() -> None:
    command = ssh_command("-oProxyCommand=x", "python", "/my/config")
    assert command[command.index("--") + 1] == "-oProxyCommand=x"
    assert command[1:3] == ["-F", "/my/config"]


# -- environment -------------------------------------------------------------------------------------------------------


def test_what_libraries_read_goes_along_and_nothing_else_unasked() -> None:
    environ = {"HF_TOKEN": "t", "NCCL_DEBUG": "INFO", "GLOO_SOCKET_IFNAME": "eth0", "CUDA_HOME": "/cuda", "HOME": "/h"}
    expected = {name: environ[name] for name in environ if name != "HOME"}
    assert forwarded(environ, []) == expected
    assert forwarded(environ, ["HOME", "A=b=c", "EMPTY=", "HF_TOKEN=other"]) == expected | {
        "HOME": "/h",
        "A": "b=c",
        "EMPTY": "",
        "HF_TOKEN": "other",
    }


@pytest.mark.parametrize(
    ("entry", "said"), [("NOT_SET", "not set here"), ("a-b=1", "no variable's name"), ("=1", "no variable's name")]
)
def test_an_env_that_cannot_be_is_refused(entry: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        forwarded({}, [entry])
