"""Meshes that are read, and malformed ones with the exact message that the user sees."""

import pytest

from verl.errors import MeshError
from verl.mesh.parse import parse, parse_value, single_device
from verl.mesh.spec import Device, HybridEngine, MeshSpec, Parallelism, RoleSpec, RolloutSpec

GOOD = "rollout: {devices: [0]}\n"
"""Completes a mesh whose lines above are looked at."""

ROLES = "(roles: actor, critic, reference, reward, rollout)"
ROLLOUT_KEYS = (
    "(keys: devices, backend, tensor_parallel_size, max_num_seqs, enable_prefix_caching, dtype, engine_kwargs)"
)
NUMBER = "needs a whole number from 1 to 1000000"
DEVICE = 'write an index (0) or "node:index" ("node1:0")'
REPLICAS = "take it out: a replica of the rollout is tensor_parallel_size devices, and further devices are replicas"


def devices(*indices: int) -> tuple[Device, ...]:
    return tuple(Device(None, index) for index in indices)


def actor(body: str) -> str:
    """A mesh with these entries under the actor, from line 2 on."""
    return "actor:\n" + "".join(f"  {line}\n" for line in body.splitlines()) + GOOD


def rollout(body: str) -> str:
    return "rollout:\n" + "".join(f"  {line}\n" for line in body.splitlines()) + "actor: {devices: [0]}\n"


def test_everything_that_can_be_said():
    text = """
    actor:
      devices: [3, 0, 1, 2]
      dtype: bfloat16
      parallelism: {fsdp: true, tensor_parallel_size: 2, pipeline_parallel_size: 2}
      hybrid_engine: {enable: true, activation_checkpointing: true, offload_activations: false}
    critic: {devices: [0, 1]}
    reference: {devices: [1], parallelism: {fsdp: false}}
    reward: {devices: [2], dtype: "float32"}
    rollout:
      devices: [4, 5]
      backend: vllm
      max_num_seqs: 8
      tensor_parallel_size: 2
      enable_prefix_caching: no
      engine_kwargs: {gpu_memory_utilization: 0.5, swap: 1e-3, nested: {a: [1, two, null]}}
    """
    assert parse(text, "mesh.yaml") == MeshSpec(
        {
            "actor": RoleSpec(
                devices(3, 0, 1, 2), Parallelism(True, 2, 2), "bfloat16", HybridEngine(True, True, False)
            ),
            "critic": RoleSpec(devices(0, 1)),
            "reference": RoleSpec(devices(1), Parallelism(fsdp=False)),
            "reward": RoleSpec(devices(2), dtype="float32"),
            "rollout": RolloutSpec(
                devices(4, 5),
                Parallelism(False, 2, 1),
                backend="vllm",
                max_num_seqs=8,
                enable_prefix_caching=False,
                engine_kwargs={"gpu_memory_utilization": 0.5, "swap": 0.001, "nested": {"a": [1, "two", None]}},
            ),
        },
        "mesh.yaml",
    )


def test_what_is_not_said_has_the_documented_defaults():
    spec = parse("actor: {devices: [0, 1]}\n" + GOOD, "mesh.yaml")
    assert spec.roles["actor"] == RoleSpec(
        devices(0, 1), Parallelism(True, 1, 1), None, HybridEngine(True, False, False)
    )
    assert spec.roles["rollout"] == RolloutSpec(
        devices(0), Parallelism(False, 1, 1), backend="auto", max_num_seqs=64, enable_prefix_caching=True
    )
    assert list(spec.roles) == ["actor", "rollout"]


def test_data_parallel_size_is_what_is_left():
    spec = parse(
        "actor: {devices: [0,1,2,3,4,5,6,7], parallelism: {tensor_parallel_size: 2, pipeline_parallel_size: 2}}\n"
        "rollout: {devices: [0,1,2,3,4,5], tensor_parallel_size: 3}",
        "mesh.yaml",
    )
    assert spec.roles["actor"].data_parallel_size == 2
    assert spec.roles["rollout"].data_parallel_size == 2


def test_nodes_are_kept_in_the_listed_order():
    spec = parse('actor: {devices: [gpu-7.cluster.local:1, "node1:0"]}\nrollout: {devices: ["10:3"]}', "mesh.yaml")
    assert spec.roles["actor"].devices == (Device("gpu-7.cluster.local", 1), Device("node1", 0))
    assert spec.roles["rollout"].devices == (Device("10", 3),)  # to YAML 1.1 10:3 alone is the number 603


@pytest.mark.parametrize("devices_text", ["[10:3]", '["10:3"]'])
def test_a_node_with_a_number_for_a_name(devices_text: str):
    spec = parse(f"actor: {{devices: {devices_text}}}\nrollout: {{devices: {devices_text}}}", "mesh.yaml")
    assert spec.roles["actor"].devices == (Device("10", 3),)


def test_hybrid_engine_may_stand_under_parallelism():
    below = "actor: {devices: [0], parallelism: {hybrid_engine: {activation_checkpointing: true}}}\n" + GOOD
    beside = "actor: {devices: [0], hybrid_engine: {activation_checkpointing: true}}\n" + GOOD
    assert parse(below, "m").roles == parse(beside, "m").roles
    assert parse(below, "m").roles["actor"].hybrid_engine.activation_checkpointing


def test_anchors_aliases_and_merge_keys():
    text = """
    actor: &all {devices: &both [0, 1], dtype: float32}
    critic: *all
    reward: {<<: *all, dtype: bfloat16}
    rollout: {devices: *both}
    """
    spec = parse(text, "mesh.yaml")
    assert {role: entry.devices for role, entry in spec.roles.items()} == dict.fromkeys(spec.roles, devices(0, 1))
    assert {role: entry.dtype for role, entry in spec.roles.items()} == {
        "actor": "float32",
        "critic": "float32",
        "reward": "bfloat16",
        "rollout": None,
    }


MALFORMED = [
    # the document
    ("", "mesh.yaml: the mesh is empty; name at least actor and rollout with their devices"),
    ("# nothing\n", "mesh.yaml: the mesh is empty; name at least actor and rollout with their devices"),
    ("{}", "mesh.yaml: the mesh is empty; name at least actor and rollout with their devices"),
    ("[0, 1]", "mesh.yaml:1: a mesh maps each role to its devices, and this is a list"),
    ("actor", 'mesh.yaml:1: a mesh maps each role to its devices, and this is "actor"'),
    (
        "actor: [0\n",
        "mesh.yaml:2: not valid YAML: while parsing a flow sequence, expected ',' or ']', but got '<stream end>'",
    ),
    (
        "actor:\n\t- 0",
        "mesh.yaml:2: not valid YAML: while scanning for the next token, found character '\\t' "
        "that cannot start any token",
    ),
    (
        "a: 1\n---\nb: 2",
        "mesh.yaml:2: not valid YAML: expected a single document in the stream, but found another document",
    ),
    (
        "a: \x07",
        "mesh.yaml: not valid YAML: unacceptable character #x0007: special characters are not "
        'allowed in "<unicode string>", position 3',
    ),
    ("[" * 200, "mesh.yaml:1: more than 100 levels of lists and mappings are not read"),
    ("a: *b", "mesh.yaml:1: not valid YAML: found undefined alias 'b'"),
    ("a: &a [*a]", "mesh.yaml:1: this value contains itself; an alias may not stand inside its own anchor"),
    ("a: &a {<<: *a}", "mesh.yaml:1: this value contains itself; an alias may not stand inside its own anchor"),
    (actor("devices: [0]\ndevices: [1]"), "mesh.yaml:3: devices: stands twice, first at mesh.yaml:2; keep one of them"),
    (actor("devices: !!python/tuple [0]"), "mesh.yaml:2: the tag python/tuple is not read; write the value alone"),
    (actor("devices: [!!int '0']"), "mesh.yaml:2: the tag int is not read; write the value alone"),
    ("<<: 3\n" + actor("devices: [0]"), "mesh.yaml:1: << merges mappings, not 3"),
    ("? [a]\n: 1\n" + actor("devices: [0]"), "mesh.yaml:1: a key must be a name, not a list or a mapping"),
    # roles
    (
        actor("devices: [0]") + "critc: {devices: [0]}",
        f'mesh.yaml:4: critc: unknown role; did you mean "critic"? {ROLES}',
    ),
    (
        actor("devices: [0]") + "ref: {devices: [0]}",
        f'mesh.yaml:4: ref: unknown role; did you mean "reference"? {ROLES}',
    ),
    (actor("devices: [0]") + "1: {devices: [0]}", f"mesh.yaml:4: 1: unknown role {ROLES}"),
    ("actor: {devices: [0]}", "mesh.yaml: no rollout; every mesh names actor and rollout with their devices"),
    (GOOD, "mesh.yaml: no actor; every mesh names actor and rollout with their devices"),
    (
        "actor: [0, 1]\n" + GOOD,
        "mesh.yaml:1: actor: needs keys and values (devices, parallelism, dtype, hybrid_engine), got a list",
    ),
    (
        "actor:\n" + GOOD,
        "mesh.yaml:1: actor: needs keys and values (devices, parallelism, dtype, hybrid_engine), got nothing",
    ),
    # devices
    (
        actor("dtype: float32"),
        "mesh.yaml:1: actor.devices: missing; name the role's devices, for example devices: [0, 1]",
    ),
    (actor("devices: []"), "mesh.yaml:2: actor.devices: the list is empty; name at least one device, for example [0]"),
    (actor("devices: 3"), "mesh.yaml:2: actor.devices: needs a list, for example [0, 1], got 3; write [3]"),
    (
        actor("devices: all"),
        'mesh.yaml:2: actor.devices: needs a list, for example [0, 1], got "all"; write every device',
    ),
    (
        actor("devices: node1:0"),
        'mesh.yaml:2: actor.devices: needs a list, for example [0, 1], got "node1:0"; write ["node1:0"]',
    ),
    (actor("devices: {0: 1}"), "mesh.yaml:2: actor.devices: needs a list, for example [0, 1], got a mapping"),
    (actor("devices:"), "mesh.yaml:2: actor.devices: needs a list, for example [0, 1], got nothing"),
    (
        actor('devices: [0, "cuda:1"]'),
        'mesh.yaml:2: actor.devices[1]: "cuda:1" is not how a device is named here; write 1, or "node1:1" in a job of '
        "several nodes",
    ),
    (
        actor("devices:\n- cuda"),
        'mesh.yaml:3: actor.devices[0]: "cuda" is not how a device is named here; write 0, or "node1:0" in a job of '
        "several nodes",
    ),
    (actor("devices: ['2']"), 'mesh.yaml:2: actor.devices[0]: "2" is text; write 2 without quotes'),
    (actor("devices: [0-3]"), 'mesh.yaml:2: actor.devices[0]: "0-3" is a range; write every device: 0, 1, 2, 3'),
    (
        actor("devices: ['node1:0-1']"),
        'mesh.yaml:2: actor.devices[0]: "node1:0-1" is a range; write every device: "node1:0", "node1:1"',
    ),
    (actor("devices: [3-0]"), 'mesh.yaml:2: actor.devices[0]: "3-0" is a range; write every device'),
    (actor("devices: [node1]"), f'mesh.yaml:2: actor.devices[0]: "node1" is not a device; {DEVICE}'),
    (actor("devices: ['node1:']"), f'mesh.yaml:2: actor.devices[0]: "node1:" is not a device; {DEVICE}'),
    (actor("devices: [':0']"), f'mesh.yaml:2: actor.devices[0]: ":0" is not a device; {DEVICE}'),
    (actor("devices: ['a:0:1']"), f'mesh.yaml:2: actor.devices[0]: "a:0:1" is not a device; {DEVICE}'),
    (actor("devices: [-1]"), "mesh.yaml:2: actor.devices[0]: needs an index from 0 to 999999, got -1"),
    (actor("devices: [1.0]"), 'mesh.yaml:2: actor.devices[0]: needs an index (0) or "node:index" ("node1:0"), got 1.0'),
    (
        actor("devices: [true]"),
        'mesh.yaml:2: actor.devices[0]: needs an index (0) or "node:index" ("node1:0"), got true',
    ),
    (
        actor("devices: [[0]]"),
        'mesh.yaml:2: actor.devices[0]: needs an index (0) or "node:index" ("node1:0"), got a list',
    ),
    (
        actor("devices: [null]"),
        'mesh.yaml:2: actor.devices[0]: needs an index (0) or "node:index" ("node1:0"), got nothing',
    ),
    (actor("devices: [1, 0, 1]"), "mesh.yaml:2: actor.devices[2]: 1 stands at [0] too; name it once"),
    (
        "actor: {devices: ['a:0', 'a:0']}\nrollout: {devices: ['a:0']}",
        "mesh.yaml:1: actor.devices[1]: a:0 stands at [0] too; name it once",
    ),
    (
        actor("devices: [0, 'node1:1']"),
        'mesh.yaml:2: actor.devices: mixes an index alone with "node:index"; spell all devices one way',
    ),
    (
        actor("devices: ['node1:0']"),
        'mesh.yaml:3: rollout.devices: an index alone, where actor has "node:index"; spell all devices one way',
    ),
    # keys, types and degrees
    (
        actor("devices: [0]\nparalelism: {}"),
        'mesh.yaml:3: actor.paralelism: unknown key; did you mean "parallelism"? (keys: devices, '
        "parallelism, dtype, hybrid_engine)",
    ),
    (
        actor("devices: [0]\ntensor_parallel_size: 1"),
        "mesh.yaml:3: actor.tensor_parallel_size: unknown key; write it under parallelism",
    ),
    (actor("devices: [0]\nfsdp: true"), "mesh.yaml:3: actor.fsdp: unknown key; write it under parallelism"),
    (
        actor("devices: [0]\nparallelism: 2"),
        "mesh.yaml:3: actor.parallelism: needs keys and values (fsdp, tensor_parallel_size, "
        "pipeline_parallel_size, hybrid_engine), got 2",
    ),
    (
        actor("devices: [0]\nparallelism: {data_parallel_size: 1}"),
        "mesh.yaml:3: actor.parallelism.data_parallel_size: unknown key; take it out: it is devices / "
        "(tensor_parallel_size x pipeline_parallel_size)",
    ),
    (
        actor("devices: [0]\nparallelism: {fsdp: maybe}"),
        'mesh.yaml:3: actor.parallelism.fsdp: needs true or false, got "maybe"',
    ),
    (actor("devices: [0]\nparallelism: {fsdp: 1}"), "mesh.yaml:3: actor.parallelism.fsdp: needs true or false, got 1"),
    (
        actor("devices: [0]\nparallelism: {tensor_parallel_size: 0}"),
        f"mesh.yaml:3: actor.parallelism.tensor_parallel_size: {NUMBER}, got 0",
    ),
    (
        actor("devices: [0]\nparallelism: {tensor_parallel_size: -2}"),
        f"mesh.yaml:3: actor.parallelism.tensor_parallel_size: {NUMBER}, got -2",
    ),
    (
        actor("devices: [0]\nparallelism: {pipeline_parallel_size: 1.5}"),
        f"mesh.yaml:3: actor.parallelism.pipeline_parallel_size: {NUMBER}, got 1.5",
    ),
    (
        actor("devices: [0]\nparallelism: {pipeline_parallel_size: true}"),
        f"mesh.yaml:3: actor.parallelism.pipeline_parallel_size: {NUMBER}, got true",
    ),
    (
        actor("devices: [0]\nparallelism: {tensor_parallel_size: '2'}"),
        f'mesh.yaml:3: actor.parallelism.tensor_parallel_size: {NUMBER}, got "2"',
    ),
    (
        actor("devices: [0, 1, 2]\nparallelism: {tensor_parallel_size: 2}"),
        "mesh.yaml:1: actor: 3 devices / (tensor_parallel_size 2 x pipeline_parallel_size 1) is not whole; list a "
        "multiple of 2 devices, or lower the sizes",
    ),
    (
        actor("devices: [0, 1]\nparallelism: {tensor_parallel_size: 2, pipeline_parallel_size: 2}"),
        "mesh.yaml:1: actor: 2 devices / (tensor_parallel_size 2 x pipeline_parallel_size 2) is not whole; list a "
        "multiple of 4 devices, or lower the sizes",
    ),
    (
        actor("devices: [0, 1, 2, 3]\nparallelism:\n  tensor_parallel_size: 2\n  fsdp: false"),
        "mesh.yaml:5: actor.parallelism.fsdp: false needs a data-parallel degree of 1, and 4 devices / "
        "(tensor_parallel_size 2 x pipeline_parallel_size 1) is 2; set fsdp: true, or list fewer devices",
    ),
    (
        actor("devices: [0]\ndtype: bf16"),
        'mesh.yaml:3: actor.dtype: needs bfloat16, float16 or float32, got "bf16"; did you mean "bfloat16"?',
    ),
    (actor("devices: [0]\ndtype: 16"), "mesh.yaml:3: actor.dtype: needs bfloat16, float16 or float32, got 16"),
    # hybrid engine
    (
        actor("devices: [0]\nhybrid_engine: true"),
        "mesh.yaml:3: actor.hybrid_engine: needs keys and values (enable, "
        "activation_checkpointing, offload_activations), got true",
    ),
    (
        actor("devices: [0]\nhybrid_engine: {enabled: true}"),
        'mesh.yaml:3: actor.hybrid_engine.enabled: unknown key; did you mean "enable"? (keys: '
        "enable, activation_checkpointing, offload_activations)",
    ),
    (
        actor("devices: [0]\nhybrid_engine: {enable: true}\nparallelism: {hybrid_engine: {enable: true}}"),
        "mesh.yaml:4: actor.parallelism.hybrid_engine: stands at mesh.yaml:3 too, directly under "
        "actor; keep one of them",
    ),
    (
        actor("devices: [0]") + "critic: {devices: [0], hybrid_engine: {enable: true}}",
        "mesh.yaml:4: critic.hybrid_engine.enable: unknown key; only the actor's weights are resharded for the rollout",
    ),
    (
        actor("devices: [0]") + "reward: {devices: [0], hybrid_engine: {}}",
        "mesh.yaml:4: reward.hybrid_engine: unknown key; only actor and critic are trained and take it",
    ),
    # rollout
    (
        rollout("devices: [0]\nbackend: vlm"),
        'mesh.yaml:3: rollout.backend: needs vllm, torch or auto, got "vlm"; did you mean "vllm"?',
    ),
    (rollout("devices: [0]\nbackend: off"), "mesh.yaml:3: rollout.backend: needs vllm, torch or auto, got off"),
    (rollout("devices: [0]\nmax_num_seqs: 0"), f"mesh.yaml:3: rollout.max_num_seqs: {NUMBER}, got 0"),
    (
        rollout("devices: [0]\nenable_prefix_caching: sure"),
        'mesh.yaml:3: rollout.enable_prefix_caching: needs true or false, got "sure"',
    ),
    (
        rollout("devices: [0]\nparallelism: {}"),
        "mesh.yaml:3: rollout.parallelism: unknown key; write tensor_parallel_size directly under rollout",
    ),
    (
        rollout("devices: [0]\npipeline_parallel_size: 2"),
        f"mesh.yaml:3: rollout.pipeline_parallel_size: unknown key; {REPLICAS}",
    ),
    (
        rollout("devices: [0]\nmax_num_seq: 2"),
        f'mesh.yaml:3: rollout.max_num_seq: unknown key; did you mean "max_num_seqs"? {ROLLOUT_KEYS}',
    ),
    (
        rollout("devices: [0]\nhybrid_engine: {}"),
        "mesh.yaml:3: rollout.hybrid_engine: unknown key; write it under actor",
    ),
    (
        rollout("devices: [0]\nengine_kwargs: [1]"),
        "mesh.yaml:3: rollout.engine_kwargs: needs keys and values, got a list",
    ),
    (
        rollout("devices: [0]\nengine_kwargs: {dtype: half}"),
        "mesh.yaml:3: rollout.engine_kwargs.dtype: not here; write it directly under rollout",
    ),
    (
        rollout("devices: [0]\nengine_kwargs: {data_parallel_size: 2}"),
        f"mesh.yaml:3: rollout.engine_kwargs.data_parallel_size: not here; {REPLICAS}",
    ),
    (
        rollout("devices: [0, 1, 2]\ntensor_parallel_size: 2"),
        "mesh.yaml:1: rollout: 3 devices / (tensor_parallel_size 2 x pipeline_parallel_size 1) is not whole; list a "
        "multiple of 2 devices, or lower the sizes",
    ),
]


@pytest.mark.parametrize(("text", "message"), MALFORMED)
def test_malformed_mesh(text: str, message: str):
    with pytest.raises(MeshError) as caught:
        parse(text, "mesh.yaml")
    assert len(caught.value.problems) == 1
    assert str(caught.value) == message


def test_all_problems_are_told_at_once():
    text = """actor:
  devices: [0, 0]
  parallelism: {fsdp: 3, tensor_parallel_size: 0}
critic: {devices: cuda}
rollout: {devices: [0], backend: triton}
"""
    with pytest.raises(MeshError) as caught:
        parse(text, "mesh.yaml")
    assert [problem.split(": ")[:2] for problem in caught.value.problems] == [
        ["mesh.yaml:2", "actor.devices[1]"],
        ["mesh.yaml:3", "actor.parallelism.fsdp"],
        ["mesh.yaml:3", "actor.parallelism.tensor_parallel_size"],
        ["mesh.yaml:4", "critic.devices"],
        ["mesh.yaml:5", "rollout.backend"],
    ]


def test_a_flood_of_problems_is_cut():
    with pytest.raises(MeshError) as caught:
        parse("".join(f"role{i}: 1\n" for i in range(200)), "mesh.yaml")
    assert len(caught.value.problems) == 51
    assert caught.value.problems[-1] == "mesh.yaml: and 152 problems more"


TWO = "actor: &two {devices: [0, 1], parallelism: {fsdp: true}}\ncritic: *two\nrollout: {devices: [0, 1]}\n"


def test_overrides_come_after_the_file():
    spec = parse(
        TWO,
        "mesh.yaml",
        [
            "device_mesh.actor.parallelism.tensor_parallel_size=2",
            "+device_mesh.rollout.engine_kwargs.seed=7",
            "++rollout.tensor_parallel_size=1",
            "rollout.tensor_parallel_size=2",
            "device_mesh.reward.devices=[1]",
        ],
    )
    assert spec.roles["actor"].tensor_parallel_size == 2
    assert spec.roles["critic"].tensor_parallel_size == 1  # the alias keeps what the file says
    assert spec.roles["rollout"].tensor_parallel_size == 2
    assert spec.roles["rollout"].engine_kwargs == {"seed": 7}  # type: ignore[attr-defined]
    assert spec.roles["reward"].devices == devices(1)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "device_mesh.actor.parallelism.tensor_parallel_size=4x",
            f'command line: actor.parallelism.tensor_parallel_size: {NUMBER}, got "4x"',
        ),
        (
            "device_mesh.actor.devices=[0, cuda:1]",
            'command line: actor.devices[1]: "cuda:1" is not how a device is named here; write 1, or '
            '"node1:1" in a job of several nodes',
        ),
        ("device_mesh.actr.devices=[0]", f'command line: actr: unknown role; did you mean "actor"? {ROLES}'),
        (
            "device_mesh.actor.devices=[0",
            "command line: actor.devices: not valid YAML: while parsing a flow sequence, expected ',' "
            "or ']', but got '<stream end>'",
        ),
        (
            "device_mesh.actor.devices.0=1",
            "command line: actor.devices.0: actor.devices is a list, which has no keys to set",
        ),
        ("device_mesh.actor.devices", "command line: device_mesh.actor.devices: write device_mesh.ROLE.KEY=VALUE"),
        (
            "device_mesh.actor..devices=1",
            "command line: device_mesh.actor..devices=1: write device_mesh.ROLE.KEY=VALUE",
        ),
        (
            "device_mesh.actor=",
            "command line: actor: needs keys and values (devices, parallelism, dtype, hybrid_engine), got nothing",
        ),
    ],
)
def test_malformed_override(override: str, message: str):
    with pytest.raises(MeshError) as caught:
        parse(TWO, "mesh.yaml", [override])
    assert str(caught.value) == message


def test_no_mesh_is_all_roles_on_device_0():
    spec = single_device()
    assert list(spec.roles) == ["actor", "critic", "reference", "reward", "rollout"]
    assert {entry.devices for entry in spec.roles.values()} == {devices(0)}
    rollout_spec = spec.roles["rollout"]
    assert isinstance(rollout_spec, RolloutSpec) and rollout_spec.backend == "auto"
    changed = single_device(["device_mesh.rollout.backend=torch"]).roles["rollout"]
    assert isinstance(changed, RolloutSpec) and changed.backend == "torch"


def test_a_mesh_that_is_data_already_has_its_places_from_the_caller():
    value = {"actor": {"devices": [0, "cuda:0"]}, "rollout": {"devices": [0]}}
    with pytest.raises(MeshError) as caught:
        parse_value(value, "config.yaml", place=lambda path: f"config.yaml:{len(path)}")
    (problem,) = caught.value.problems
    assert problem.startswith('config.yaml:13: actor.devices[1]: "cuda:0" is not')
