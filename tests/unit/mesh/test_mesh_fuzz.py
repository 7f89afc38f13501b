"""Whatever the text: a MeshSpec or a MeshError, and soon."""

import re
import time
from typing import Any

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from verl.errors import MeshError
from verl.mesh.document import MAX_CHARACTERS, MAX_VALUES, read
from verl.mesh.parse import parse, parse_value
from verl.mesh.spec import ROLES, MeshSpec, RolloutSpec

VALID = """actor: &a
  devices: [0, 1, 2, 3]
  parallelism: {fsdp: true, tensor_parallel_size: 2}
  hybrid_engine: {enable: true}
critic: {<<: *a, hybrid_engine: {offload_activations: false}}
reward: {devices: [3], dtype: "bfloat16"}
rollout:
  devices: [3]
  backend: "vllm"
  engine_kwargs: {block_size: 1}
"""
KEYS = (
    *ROLES,
    "devices",
    "parallelism",
    "dtype",
    "hybrid_engine",
    "fsdp",
    "fsdp_size",
    "offload_parameters",
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "context_parallel_size",
    "virtual_stages",
    "backend",
    "max_num_seqs",
    "engine_kwargs",
    "enable",
    "<<",
)
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(0, 4),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(
        ["cuda:0", "node1:0", "node2:1", "0-3", "n:2-5", "3-0", "0-999999", "all", "vllm", "bfloat16", "10:3"]
    ),
)
TREES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(st.sampled_from(KEYS), inner, max_size=6),
        st.dictionaries(st.text(max_size=4), inner, max_size=3),
    ),
    max_leaves=20,
)
MESHES = st.fixed_dictionaries(
    {
        role: st.dictionaries(st.sampled_from(KEYS[5:]), TREES, max_size=4)
        | st.fixed_dictionaries({"devices": st.lists(st.integers(0, 9), unique=True, min_size=1)})
        for role in ("actor", "rollout")
    },
    optional=dict.fromkeys(("critic", "reference", "reward", "x"), TREES),
)


def check(text: str, overrides: tuple[str, ...] = ()) -> MeshSpec | None:
    """Parses, and holds a mesh against what every mesh promises."""
    try:
        spec = parse(text, "mesh.yaml", overrides)
    except MeshError as error:
        assert error.problems and all(len(problem) < 1000 and "\n" not in problem for problem in error.problems)
        return None
    assert isinstance(spec, MeshSpec)
    assert {"actor", "rollout"} <= spec.roles.keys() <= set(ROLES)
    for role, entry in spec.roles.items():
        assert isinstance(entry, RolloutSpec) == (role == "rollout")
        assert entry.everywhere == (not entry.devices)
        if not entry.everywhere:
            size = entry.tensor_parallel_size * entry.pipeline_parallel_size * entry.context_parallel_size
            assert len(set(entry.devices)) == len(entry.devices) == entry.data_parallel_size * size
    assert len({device.node is None for entry in spec.roles.values() for device in entry.devices}) <= 1
    return spec


@given(st.text())
@example("\ud800")
@example("a: 0b_")
@example("a: 2024-13-45")
@example("a: !!int ''")
@example("a: !!float ''")
@example("a: !!bool x")
@example("a: !!binary '*'")
@example("a: !!timestamp x")
@example("a: !!set {a}")
@example("? !!python/name:os.system\n: 1")
@example("%YAML 9.9\n---\na: 1")
@example("a: 0x" + "f" * 5000)
@example("a: " + "9" * 5000)
@example("a: 1" + ":1" * 5000)
@example("!!str")
@example("&a [*a, &b {*b : *a}]")
def test_any_text(text: str):
    check(text)


@given(TREES | MESHES, st.booleans())
@settings(max_examples=300)
def test_any_tree(tree: Any, flow: bool):
    check(yaml.safe_dump(tree, default_flow_style=flow, allow_unicode=True))


@given(st.data())
@settings(max_examples=300)
def test_any_change_of_a_valid_mesh(data: st.DataObject):
    start = data.draw(st.integers(0, len(VALID)))
    end = data.draw(st.integers(start, min(len(VALID), start + 12)))
    patch = data.draw(st.text(alphabet="abc01:,-[]{}&*<!#'\"\n\t ?|>%@", max_size=6))
    check(VALID[:start] + patch + VALID[end:])


@given(
    st.lists(
        st.text(max_size=12)
        | st.builds(
            lambda path, value: f"device_mesh.{'.'.join(path)}={value}",
            st.lists(st.sampled_from(KEYS), max_size=4),
            st.text(max_size=6),
        ),
        max_size=4,
    )
)
@settings(max_examples=300)
def test_any_overrides(overrides: list[str]):
    check(VALID, tuple(overrides))


@given(TREES)
def test_data_and_text_are_read_alike(tree: Any):
    """parse_value of what YAML gives is parse of the text."""
    root, problems = read(yaml.safe_dump(tree), "mesh.yaml", numbered=False)
    if root is None or problems:  # such as a merge key that merges no mapping
        return

    def outcome(parsed: Any) -> Any:
        try:
            return parsed()
        except MeshError as error:
            return [problem.partition(": ")[2] for problem in error.problems]

    from_text = outcome(lambda: parse(yaml.safe_dump(tree), "mesh.yaml"))
    assert outcome(lambda: parse_value(root.plain(), "mesh.yaml")) == from_text or "nan" in yaml.safe_dump(tree)


class _Dumper(yaml.SafeDumper):
    """Puts quotes around text that looks like a number with an exponent, too."""


_Dumper.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9_]+[eE][-+]?[0-9]+$"), list("-+0123456789")
)


@given(
    st.recursive(
        SCALARS,
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
        max_leaves=15,
    )
)
@example("0E0")
@settings(max_examples=200)
def test_plain_values_are_those_of_pyyaml(tree: Any):
    """Outside the two places where it differs on purpose (1e-5 is a number, 10:3 is text), in which text has quotes."""
    text = yaml.dump(tree, Dumper=_Dumper)
    root, problems = read(text, "x.yaml")
    assert root is not None and not problems
    assert repr(root.plain()) == repr(yaml.safe_load(text))


def bomb(levels: int) -> str:
    """Each level holds the one before it nine times."""
    lines = ["l0: &l0 [lol]"] + [f"l{i}: &l{i} [{', '.join([f'*l{i - 1}'] * 9)}]" for i in range(1, levels)]
    return "\n".join(lines)


HOSTILE = {
    "billion laughs": bomb(30),
    "billion laughs as engine arguments": bomb(30)
    + "\nactor: {devices: [0]}\nrollout: {devices: [0], engine_kwargs: {a: *l29}}",
    "billion laughs in keys": "\n".join(
        ["a0: &a0 {k: v}"] + [f"a{i}: &a{i} {{x: *a{i - 1}, y: *a{i - 1}}}" for i in range(1, 60)]
    ),
    "a chain of merges": "\n".join(["- &m0 {k0: 0}"] + [f"- &m{i} {{<<: *m{i - 1}, k{i}: 0}}" for i in range(1, 1500)]),
    "one mapping merged often": "a: &a {"
    + ", ".join(f"k{i}: 0" for i in range(2000))
    + "}\nb: {<<: ["
    + ", ".join(["*a"] * 2000)
    + "]}",
    "deep lists": "[" * 20_000,
    "deep mappings": "{a: " * 20_000,
    "deep blocks": "- " * 20_000,
    "many anchors": "[" + ", ".join(f"&a{i} x" for i in range(9000)) + "]",
    "long": "a" * (MAX_CHARACTERS + 1),
    "many unknown roles": "\n".join(f"r{i}: 1" for i in range(5_000)),
    "huge number": "actor: {devices: [0x" + "f" * 100_000 + "]}",
    "sexagesimal number": "actor: {devices: [1" + ":1" * 60_000 + "]}",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_text_ends_soon(name: str):
    started = time.process_time()
    assert check(HOSTILE[name]) is None
    assert check("actor: {devices: [0]}\nrollout: {devices: [0]}", (f"device_mesh.rollout.x={HOSTILE[name]}",)) is None
    assert time.process_time() - started < 20


def test_aliases_within_bounds_are_fine():
    text = "shared: &s [" + ", ".join(["0"] * 100) + "]\nall: [" + ", ".join(["*s"] * 100) + "]"
    root, problems = read(text, "x.yaml")
    assert root is not None and not problems and root.size == 1 + 101 + 1 + 100 * 101 < MAX_VALUES
    assert root.plain()["all"] == [[0] * 100] * 100
