"""Meshes that are read, and malformed ones with the exact message that the user sees."""

import pytest

from verl.errors import MeshError
from verl.mesh.parse import parse, parse_value, single_device
from verl.mesh.spec import Device, HybridEngine, MeshSpec, Parallelism, RoleSpec, RolloutSpec

GOOD = "rollout: {devices: [0]}\n"
"""Completes a mesh whose lines above are looked at."""

ROLES = "(roles: actor, critic, reference, reward, rollout)"
NUMBER = "needs a whole number from 1 to 1000000"


def devices(*indices: int) -> tuple[Device, ...]:
    return tuple(Device(None, index) for index in indices)


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


def test_ranges_are_written_out_in_their_order():
    spec = parse('actor: {devices: ["b:2-3", "a:0", "a:5-5"]}\nrollout: {devices: ["a:0"]}', "mesh.yaml")
    assert [str(device) for device in spec.roles["actor"].devices] == ["b:2", "b:3", "a:0", "a:5"]
    assert parse("actor: {devices: [4-6, 0]}\n" + GOOD, "m").roles["actor"].devices == devices(4, 5, 6, 0)


def test_places_are_known_by_name():
    text = """
    actor:
      devices: [0-1]
      parallelism:
        tensor_parallel_size: 2
    rollout: {devices: [0]}
    """
    spec = parse(text, "mesh.yaml", ["device_mesh.rollout.engine_kwargs.block_size=1"])
    assert spec.place("actor.parallelism.tensor_parallel_size") == "mesh.yaml:5"
    assert spec.place("actor.parallelism.pipeline_parallel_size") == "mesh.yaml:4"  # what it would stand under
    assert spec.place("rollout.engine_kwargs.block_size") == "command line"
    assert spec.place("critic.devices") == "mesh.yaml"


def test_hybrid_engine_may_stand_under_parallelism():
    below = "actor: {devices: [0], parallelism: {hybrid_engine: {activation_checkpointing: true}}}\n" + GOOD
    beside = "actor: {devices: [0], hybrid_engine: {activation_checkpointing: true}}\n" + GOOD
    assert parse(below, "m").roles == parse(beside, "m").roles
    assert parse(below, "m").roles["actor"].hybrid_engine.activation_checkpointing


def test_copies_and_offloading():
    text = """
    actor:
      devices: [0-7]
      parallelism: {fsdp_size: 2, tensor_parallel_size: 2}
      hybrid_engine: {offload_parameters: true, offload_optimizer: true}
    reward: {devices: [0], hybrid_engine: {offload_parameters: true}}
    rollout: {devices: [0]}
    """
    actor, reward, _ = parse(text, "mesh.yaml").roles.values()
    assert (actor.parallelism.fsdp_size, actor.data_parallel_size) == (2, 4)
    assert actor.hybrid_engine == HybridEngine(offload_parameters=True, offload_optimizer=True)
    assert reward.hybrid_engine == HybridEngine(offload_parameters=True)
    assert reward.parallelism.fsdp_size is None


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
            "+device_mesh.rollout.engine_kwargs.block_size=7",
            "++rollout.tensor_parallel_size=1",
            "rollout.tensor_parallel_size=2",
            "device_mesh.reward.devices=[1]",
            "device_mesh.reference.devices=[0-1]",
        ],
    )
    assert spec.roles["actor"].tensor_parallel_size == 2
    assert spec.roles["critic"].tensor_parallel_size == 1  # the alias keeps what the file says
    assert spec.roles["rollout"].tensor_parallel_size == 2
    assert spec.roles["rollout"].engine_kwargs == {"block_size": 7}  # type: ignore[attr-defined]
    assert spec.roles["reward"].devices == devices(1)
    assert spec.roles["reference"].devices == devices(0, 1)


def test_an_override_may_be_the_whole_job():
    assert parse(TWO, "mesh.yaml", ["device_mesh.critic.devices=all"]).roles["critic"].everywhere


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
        (
            "device_mesh.actor.devices=[0-2, 1]",
            "command line: actor.devices[1]: 1 stands at [0] too; name it once",
        ),
        (
            "device_mesh.actor.devices=0-2",
            'command line: actor.devices: needs a list, for example [0, 1], or all, got "0-2"; write ["0-2"]',
        ),
        ("device_mesh.actr.devices=[0]", f'command line: actr: unknown role; did you mean "actor"? {ROLES}'),
        (
            "device_mesh.actor.devices=[0",
            "command line: actor.devices: not valid YAML: while parsing a flow sequence, expected ',' "
            "or ']', but got '<stream end>'; close the bracket, and part its entries by commas",
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
