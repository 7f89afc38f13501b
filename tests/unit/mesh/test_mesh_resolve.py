"""A mesh held against jobs of one process, one node and several nodes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl.errors import MeshError
from verl.mesh.parse import parse, single_device
from verl.mesh.resolve import Process, collapse, idle, launch_line, resolve
from verl.mesh.spec import Device, MeshSpec, Parallelism, RolloutSpec


def job(*nodes: tuple[str, int], visible: int | None = None) -> list[Process]:
    """Nodes as (names, processes), the names separated by spaces; ranks are given node by node, as torchrun does."""
    processes: list[Process] = []
    for node_rank, (names, count) in enumerate(nodes):
        processes += [
            Process(
                len(processes) + local, tuple(names.split()), node_rank, local, count if visible is None else visible
            )
            for local in range(count)
        ]
    return processes


def mesh(actor: str, rollout: str, more: str = "") -> MeshSpec:
    return parse(f"actor: {{devices: [{actor}]}}\nrollout: {{devices: [{rollout}]}}\n{more}", "mesh.yaml")


def refusal(spec: MeshSpec, processes: list[Process], *arguments: str) -> str:
    with pytest.raises(MeshError) as caught:
        resolve(spec, processes, arguments)
    return str(caught.value)


def test_integers_are_local_ranks_of_one_node_in_the_listed_order():
    spec = mesh("2, 0", "3", "critic: {devices: [1]}\nreference: {devices: [1, 2]}")
    assert resolve(spec, job(("box", 4))) == {
        "actor": (2, 0),
        "critic": (1,),
        "reference": (1, 2),
        "rollout": (3,),
    }


def test_reference_follows_the_actor_and_absent_roles_stay_absent():
    assert resolve(mesh("1, 0", "1"), job(("box", 2))) == {"actor": (1, 0), "reference": (1, 0), "rollout": (1,)}


def test_the_order_of_processes_does_not_matter():
    spec = mesh('"b:1", "a:0"', '"a:1"')
    assert resolve(spec, job(("a", 2), ("b", 2))[::-1]) == {"actor": (3, 0), "reference": (3, 0), "rollout": (1,)}


@pytest.mark.parametrize("name", ["gpu7", "GPU7", "gpu7.cluster.local", "trainer-a", "node1"])
def test_a_node_answers_to_every_name_of_its_own(name: str):
    processes = job(("gpu3 gpu3.cluster.local", 2), ("gpu7 gpu7.cluster.local trainer-a", 2))
    assert resolve(mesh(f'"{name}:1"', '"gpu3:0"'), processes)["actor"] == (3,)


def test_node_and_rank_is_a_name_only_where_no_host_bears_it():
    # node1 is the first node (group rank 0), so node1 must not mean group rank 1
    processes = job(("node1", 2), ("node2", 2))
    assert resolve(mesh('"node1:0", "node2:1"', '"node0:1"'), processes) == {
        "actor": (0, 3),
        "reference": (0, 3),
        "rollout": (1,),  # no host is called node0
    }


def test_a_name_that_resembles_a_node():
    assert refusal(mesh('"nod1:0"', '"node2:0"'), job(("node1", 1), ("node2", 1))) == (
        "mesh.yaml: mesh needs devices nod1:0; job has node1: 0, node2: 0\n"
        '  nod1:0 (actor at line 1): no node bears the name nod1; did you mean "node1"? write a name that the job '
        "has, or start a node with VERL_NODE_NAME=nod1"
    )


def test_ranges_keep_their_order():
    spec = mesh('"b:0-1", "a:1-2"', '"a:0"')
    assert resolve(spec, job(("a", 3), ("b", 2)))["actor"] == (3, 4, 1, 2)


def test_all_is_every_rank_of_the_job():
    spec = parse("actor: {devices: all}\nrollout: {devices: all, tensor_parallel_size: 2}", "mesh.yaml")
    assert (spec.roles["actor"].everywhere, spec.roles["actor"].devices) == (True, ())
    assert spec.roles["actor"].data_parallel_size == 1  # not counted yet
    for processes in (job(("box", 4)), job(("a", 2), ("b", 2))):
        assert resolve(spec, processes[::-1]) == dict.fromkeys(("actor", "reference", "rollout"), (0, 1, 2, 3))
        assert idle(spec, processes) == ()


def test_all_beside_named_devices():
    spec = mesh('"b:1"', '"a:0"', "critic: {devices: all}")
    assert resolve(spec, job(("a", 1), ("b", 2)))["critic"] == (0, 1, 2)


def test_all_on_one_process():
    assert resolve(parse("actor: {devices: all}\nrollout: {devices: all}", "m"), job(("box", 1)))["actor"] == (0,)


def test_all_is_checked_once_its_devices_are_counted():
    text = """actor: {devices: all, parallelism: {tensor_parallel_size: 2, pipeline_parallel_size: 2}}
critic:
  devices: all
  parallelism: {fsdp: false}
reference: {devices: all, parallelism: {fsdp_size: 4}}
rollout: {devices: all, tensor_parallel_size: 4}
"""
    assert refusal(parse(text, "mesh.yaml"), job(("box", 6))) == (
        "mesh.yaml:1: actor.devices: all is 6 devices here, and 6 devices / (tensor_parallel_size 2 x "
        "pipeline_parallel_size 2) is not whole; list a multiple of 4 devices, or change the sizes\n"
        "mesh.yaml:3: critic.devices: all is 6 devices here, and parallelism.fsdp: false needs a data-parallel degree "
        "of 1, where 6 devices / (tensor_parallel_size 1 x pipeline_parallel_size 1) is 6; set fsdp: true (with "
        "fsdp_size: 1 each data-parallel rank holds a copy), or list fewer devices\n"
        "mesh.yaml:5: reference.devices: all is 6 devices here, and parallelism.fsdp_size: 4 does not divide the "
        "data-parallel degree 6 (6 devices / (tensor_parallel_size 1 x pipeline_parallel_size 1)); set it to 1, 2, 3 "
        "or 6, or take it out for one copy of the model\n"
        "mesh.yaml:6: rollout.devices: all is 6 devices here, and 6 devices / tensor_parallel_size 4 is not whole; "
        "list a multiple of 4 devices, or change the sizes"
    )


def test_everything_is_told_at_once():
    spec = mesh('"a:1", "a.lan:1"', '"c:0"', "critic: {devices: all, parallelism: {tensor_parallel_size: 2}}")
    message = refusal(spec, job(("a a.lan", 2), ("b", 1)))
    assert [line.split(": ")[0] for line in message.splitlines() if not line.startswith(" ")] == [
        "mesh.yaml",
        "mesh.yaml:1",
        "mesh.yaml:3",
    ]


def test_an_override_is_where_a_device_comes_from():
    spec = parse("actor: {devices: [0]}\nrollout: {devices: [0]}", "mesh.yaml", ["device_mesh.actor.devices=[0-1]"])
    assert spec.place("actor.devices") == "command line"
    assert refusal(spec, job(("a", 1), ("b", 1))) == (
        "command line: actor.devices: an index alone is ambiguous in a job of 2 nodes; name the node too, for example "
        '["a:0", "a:1"]\n'
        "mesh.yaml:2: rollout.devices: an index alone is ambiguous in a job of 2 nodes; name the node too, for example "
        '["a:0"]'
    )


def test_node_names_work_on_one_node():
    assert resolve(mesh('"box:1"', '"node0:0"'), job(("box", 2)))["actor"] == (1,)


def test_integers_are_refused_on_several_nodes_with_the_spelling_to_use():
    assert refusal(mesh("0, 1", "0"), job(("a", 2), ("b", 2))) == (
        "mesh.yaml:1: actor.devices: an index alone is ambiguous in a job of 2 nodes; name the node too, for example "
        '["a:0", "a:1"]\n'
        "mesh.yaml:2: rollout.devices: an index alone is ambiguous in a job of 2 nodes; name the node too, for example "
        '["a:0"]'
    )


def test_everything_that_is_missing_is_named():
    spec = mesh('"a:0", "a:5", "b:7"', '"c:0", "a:5"', 'critic: {devices: ["c:1"]}')
    assert refusal(spec, job(("a", 4), ("b", 4), visible=8)) == (
        "mesh.yaml: mesh needs devices a:5, b:7, c:0, c:1; job has a: 0-3, b: 0-3\n"
        "  a:5, b:7 (actor at line 1, rollout at line 2): 8 devices visible and 4 processes there: start "
        "torchrun with --nproc_per_node=8\n"
        "  c:0, c:1 (critic at line 3, rollout at line 2): no node bears the name c: write a name that the "
        "job has, or start a node with VERL_NODE_NAME=c"
    )


def test_a_device_that_is_not_visible():
    assert refusal(mesh("0", "3"), job(("box", 2))) == (
        "mesh.yaml: mesh needs devices 3; job has box: 0-1\n"
        "  3 (rollout at line 2): 2 devices visible and 2 processes there: check CUDA_VISIBLE_DEVICES and "
        "--nproc_per_node, or change the mesh"
    )


def test_a_visible_device_without_a_process():
    assert refusal(mesh("0", "3, 5"), job(("box", 2), visible=8)) == (
        "mesh.yaml: mesh needs devices 3, 5; job has box: 0-1\n"
        "  3, 5 (rollout at line 2): 8 devices visible and 2 processes there: start torchrun with "
        "--nproc_per_node=6"
    )


def test_a_name_of_two_nodes():
    message = refusal(mesh('"pod:0"', '"node1:0"'), job(("pod", 2), ("pod", 2)))
    assert message == (
        "mesh.yaml: mesh needs devices pod:0; job has node0: 0-1, node1: 0-1\n"
        "  pod:0 (actor at line 1): 2 nodes bear the name pod: start each with a VERL_NODE_NAME of its own"
    )


def test_one_device_under_two_names():
    message = refusal(mesh('"a:1", "a.lan:1"', '"b:0"'), job(("a a.lan", 2), ("b", 2)))
    assert message == "mesh.yaml:1: actor.devices: a:1 and a.lan:1 are one device; name it once"


def test_a_process_that_does_not_see_its_device():
    processes = [Process(rank, ("box",), 0, rank, 1) for rank in range(2)]  # each was given a single device
    assert refusal(mesh("0", "1"), processes) == (
        "mesh.yaml: rank 1 on box sees 1 device, and the mesh gives it number 1; start all processes of a node with "
        "one CUDA_VISIBLE_DEVICES that lists all its devices"
    )


def test_one_process_is_told_how_to_start_the_job():
    spec = mesh("0, 1", "3")
    arguments = ["--device_mesh", "my mesh.yaml", "rollout.n=2"]
    assert refusal(spec, job(("box", 1)), *arguments) == (
        "mesh.yaml: the mesh has 3 devices (0, 1, 3), and this is one process. Start it with\n"
        "  torchrun --standalone --nproc_per_node=4 train_ppo.py --device_mesh 'my mesh.yaml' rollout.n=2\n"
        "or put all its roles on device 0 with debug.collapse_mesh=true"
    )
    assert "--nproc_per_node=4 train_ppo.py ...\n" in refusal(spec, job(("box", 1)))


def test_one_process_and_a_mesh_of_two_nodes():
    assert launch_line(mesh('"node1:0", "node2:3"', '"node1:1"')) == (
        "Start it on each of the 2 nodes with\n"
        "  torchrun --nnodes=2 --rdzv_backend=c10d --rdzv_endpoint=node1:29400 --rdzv_id=verl --nproc_per_node=4 "
        "train_ppo.py ..."
    )


def test_one_process_holds_a_mesh_of_one_device():
    assert set(resolve(single_device(), job(("box", 1))).values()) == {(0,)}
    assert resolve(mesh('"box:0"', '"box:0"'), job(("box", 1)))["actor"] == (0,)


def test_a_long_list_of_devices_is_cut():
    spec = mesh(", ".join(map(str, range(64))), "0")
    assert "the mesh has 64 devices (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15 and 48 more)" in refusal(
        spec, job(("box", 1))
    )


def test_idle_processes():
    assert [process.rank for process in idle(mesh("0", "3"), job(("box", 5)))] == [1, 2, 4]
    assert idle(mesh("0", "1"), job(("box", 2))) == ()


def test_collapse_puts_every_role_on_device_0_and_keeps_the_rest():
    spec = parse(
        """
        actor: {devices: ["a:0", "a:1"], dtype: float32, parallelism: {tensor_parallel_size: 2}}
        critic: {devices: ["b:0"], parallelism: {fsdp: false}}
        rollout: {devices: ["b:0", "b:1"], tensor_parallel_size: 2, backend: torch, max_num_seqs: 3}
        """,
        "mesh.yaml",
    )
    small = collapse(spec)
    assert {entry.devices for entry in small.roles.values()} == {(Device(None, 0),)}
    assert small.roles["actor"].parallelism == Parallelism(True, 1, 1) and small.roles["actor"].dtype == "float32"
    assert small.roles["critic"].parallelism == Parallelism(False, 1, 1)
    rollout = small.roles["rollout"]
    assert isinstance(rollout, RolloutSpec)
    assert (rollout.tensor_parallel_size, rollout.backend, rollout.max_num_seqs) == (1, "torch", 3)
    assert set(resolve(small, job(("box", 1))).values()) == {(0,)}


def test_process_from_torchruns_environment():
    environ = {
        "RANK": "5",
        "GROUP_RANK": "1",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "4",
        "WORLD_SIZE": "8",
        "VERL_NODE_NAME": "trainer-b",
    }
    process = Process.from_environment(environ, ["gpu7.cluster.local"], 8)
    assert process == Process(5, ("trainer-b", "gpu7.cluster.local", "gpu7"), 1, 1, 8)
    assert Process.from_environment(environ, ["gpu7"], None).num_devices == 4  # no accelerators: its node's processes
    assert Process.from_environment({}, ["box"], None) == Process(0, ("box",), 0, 0, 1)


@st.composite
def jobs_and_meshes(draw: st.DrawFn) -> tuple[list[Process], MeshSpec, dict[str, tuple[int, ...]]]:
    """A job, a mesh that fits it, and the ranks counted by hand."""
    sizes = draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    everything = [(node, index) for node, size in enumerate(sizes) for index in range(size)]
    first_rank = [sum(sizes[:node]) for node in range(len(sizes))]
    named = len(sizes) > 1 or draw(st.booleans())
    lines, expected = [], {}
    for role in ("actor", "critic", "reference", "reward", "rollout"):
        if role in ("actor", "rollout") or draw(st.booleans()):
            chosen = draw(st.lists(st.sampled_from(everything), min_size=1, unique=True))
            spelled = [f'"host{node}:{index}"' if named else str(index) for node, index in chosen]
            lines.append(f"{role}: {{devices: [{', '.join(spelled)}]}}")
            expected[role] = tuple(first_rank[node] + index for node, index in chosen)
    expected.setdefault("reference", expected["actor"])
    processes = job(*((f"host{node}", size) for node, size in enumerate(sizes)))
    return draw(st.permutations(processes)), parse("\n".join(lines), "mesh.yaml"), expected


@given(jobs_and_meshes())
def test_any_mesh_that_fits_resolves_to_its_ranks(case: tuple[list[Process], MeshSpec, dict[str, tuple[int, ...]]]):
    processes, spec, expected = case
    assert resolve(spec, processes) == expected
    used = {rank for ranks in expected.values() for rank in ranks}
    assert {process.rank for process in idle(spec, processes)} == {process.rank for process in processes} - used
