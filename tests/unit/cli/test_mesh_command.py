"""`verl mesh check` and `verl mesh show`, as a user types them."""

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from verl.cli.command_line import load
from verl.cli.main import main

SIZES = {
    "model_type": "llama",
    "hidden_size": 48,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "vocab_size": 320,
}
MESH = """\
actor:
  devices: ["node1:0-1"]
  parallelism: {tensor_parallel_size: 2}
critic: {devices: ["node1:2"]}
rollout: {devices: ["node2:0", "node2:2"], backend: vllm}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "mesh.yaml").write_text(MESH)
    (tmp_path / "model.json").write_text(json.dumps(SIZES))
    (tmp_path / "run.yaml").write_text("data: {train_batch_size: 4, max_prompt_length: 8, max_response_length: 8}\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    return tmp_path


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, list[str]]:
    code = main(["mesh", *arguments])
    said = capsys.readouterr()
    assert "Traceback" not in said.err
    return code, said.out, said.err.splitlines()


def test_a_mesh_that_is_well(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "check", "mesh.yaml", "--model", "model.json", "--device-memory", "16")
    assert code == 0
    assert out.splitlines()[0] == "mesh.yaml: 6 devices on 2 nodes"
    assert out.splitlines()[-1] == "ok"
    assert "  node1:0-1: 1.0, when the actor works" in out
    assert err == [
        "warning: mesh.yaml: no role uses node2:1; the process there would only wait: add the device to a role, or "
        "start fewer processes"
    ]


def test_without_a_model_what_can_be_said_is_said(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "check", "mesh.yaml")
    assert code == 0
    assert out.splitlines() == [
        "mesh.yaml: 6 devices on 2 nodes",
        "held against no model: name one with --model FOLDER, config.json or hub id",
        "ok",
    ]


def test_all_problems_of_all_sources_at_once(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "mesh.yaml").write_text(MESH.replace("node1:0-1", "cuda:0").replace("backend: vllm", "backend: vlm"))
    code, out, err = run(
        capsys, "check", "mesh.yaml", "--nodes", "x", "--model", "nowhere", "--device-memory", "much", "rollout.m=1"
    )
    assert (code, out) == (2, "")
    assert [line.split(": ")[0] for line in err] == [
        "--device-memory",
        "command line",
        "mesh.yaml:2",
        "mesh.yaml:5",
        "--nodes",
    ]


def test_degrees_that_do_not_suit(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    override = ["device_mesh.actor.parallelism.tensor_parallel_size=4", 'device_mesh.actor.devices=["node1:0-3"]']
    code, out, err = run(capsys, "check", "mesh.yaml", "--model", "model.json", *override)
    assert (code, out.splitlines()[-1]) == (2, "not usable, as follows")
    assert err[-1].startswith("command line: actor.parallelism.tensor_parallel_size: 4: does not go into the model's ")


def test_nodes_that_lack_something(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "check", "mesh.yaml", "--nodes", "node1:3,nod2:3")
    assert (code, out) == (2, "")
    assert err == [
        "mesh.yaml: mesh needs devices node2:0, node2:2; job has node1: 0-2, nod2: 0-2",
        '  node2:0, node2:2 (rollout at line 5): no node bears the name node2; did you mean "nod2"? write a name that '
        "the job has, or start a node with VERL_NODE_NAME=node2",
    ]


@pytest.mark.parametrize("memory", ["80", "80GiB", "80GB", "80g", "79.6"])
def test_memory_as_people_write_it(folder: Path, capsys: pytest.CaptureFixture[str], memory: str) -> None:
    assert run(capsys, "check", "mesh.yaml", "--model", "model.json", "--device-memory", memory)[0] == 0


@pytest.mark.parametrize("memory", ["0", "-1", "nan", "inf", "1e9", "GiB", ""])
def test_memory_that_is_none(folder: Path, capsys: pytest.CaptureFixture[str], memory: str) -> None:
    code, _, err = run(capsys, "check", "mesh.yaml", "--device-memory", memory)
    assert (code, err) == (2, [f"--device-memory: {memory} is no size; write a number of GiB, such as 80"])


def test_a_device_that_is_too_small(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "check", "mesh.yaml", "--model", "model.json", "--device-memory", "0.5")
    assert code == 2
    assert any(line.startswith("mesh.yaml:2: actor.devices: node1:0-1 would need 1.0 of 0.5 GiB (") for line in err)


def test_settings_count_where_they_are_given(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "check", "mesh.yaml", "--config", "run.yaml", "data.train_batch_size=5")
    assert (code, out.splitlines()[-1]) == (2, "not usable, as follows")
    assert [line.split(":")[0] for line in err if not line.startswith("warning")] == [
        "data.train_batch_size=5",
        "actor.ppo_mini_batch_size=16",
    ]


def test_the_model_of_the_settings(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps(SIZES))
    code, out, _ = run(capsys, "check", "mesh.yaml", "model.path=model", "actor.ppo_mini_batch_size=4")
    assert code == 0 and "an estimate for model;" in out


def test_json(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "check", "mesh.yaml", "--model", "model.json", "--device-memory", "16", "--json")
    assert (code, err) == (0, [])
    said = json.loads(out)
    assert said["ok"] and said["problems"] == [] and len(said["warnings"]) == 1
    assert said["nodes"] == {"node1": 3, "node2": 3}
    assert said["roles"]["actor"] == {
        "devices": ["node1:0", "node1:1"],
        "pp": 1,
        "dp": 1,
        "cp": 1,
        "copies": 1,
        "tp": 2,
    }
    (actor,) = [entry for entry in said["memory"] if "actor" in entry["roles"]]
    assert actor["devices"] == ["node1:0", "node1:1"]
    stays = sum(sum(role["stays"].values()) for role in actor["roles"].values()) + actor["cuda_and_nccl"]
    at_work = max(sum(role["at_work"].values()) for role in actor["roles"].values())
    assert (actor["stays"], actor["peak"]) == (stays, stays + at_work)


def test_what_a_device_puts_into_its_nodes_memory(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["mesh.yaml", "--config", "run.yaml", "trainer.async_save=true", "actor.ppo_mini_batch_size=4"]
    _, out, _ = run(capsys, "check", *arguments, "--model", "model.json")
    assert "in the node's memory checkpoint copy 0.0\n" in out
    _, out, _ = run(capsys, "check", *arguments, "--model", "model.json", "--json")
    actor, critic = (entry["roles"] for entry in json.loads(out)["memory"][:2])
    for role in (actor["actor"], critic["critic"]):
        assert role["on_host"] == {"checkpoint copy": sum(role["stays"].values())}  # 4 and 8 bytes a parameter
    assert actor["reference"]["on_host"] == {}


def test_json_of_what_is_wrong(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "mesh.yaml").write_text("actor: {devices: [0]}")
    code, out, err = run(capsys, "check", "mesh.yaml", "--json")
    assert (code, err) == (2, [])
    assert json.loads(out) == {
        "mesh": "mesh.yaml",
        "ok": False,
        "problems": ["mesh.yaml: no rollout; every mesh names actor and rollout with their devices"],
        "warnings": [],
        "nodes": {},
        "roles": {},
        "memory": [],
    }


def test_a_mesh_in_the_place_of_the_file_s_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "check", "mesh.yaml", "device_mesh=other.yaml")
    assert (code, out) == (2, "")
    assert err == ["command line: device_mesh=other.yaml: the mesh is mesh.yaml; name another in its place"]


def test_the_picture(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "show", "mesh.yaml", "--config", "run.yaml")
    assert code == 2  # a mini-batch of 16 prompts where a step has 4: shown all the same
    assert out.splitlines()[:9] == [
        "mesh.yaml: 6 devices on 2 nodes",
        "",
        "            node1               node2",
        "            0     1     2       0     1     2",
        "actor       t0    t1    .       .     .     .",
        "critic      .     .     whole   .     .     .",
        "reference   t0    t1    .       .     .     .",
        "reward      .     .     .       d0    .     d1",
        "rollout     .     .     .       r0    .     r1",
    ]


def test_what_is_sent(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--config", "run.yaml", "actor.ppo_mini_batch_size=4", "--model", "model.json"]
    code, out, _ = run(capsys, "show", "mesh.yaml", *arguments)
    assert code == 0
    lines = out.splitlines()
    at = lines.index("rows of a step: 4 prompts x 1, at most 8 + 8 tokens each")
    assert lines[at + 1] == (
        "  rollout -> actor, critic, reference, reward: prompt_ids, response_ids, rollout_logprobs, ended, weight, "
        "version"
    )
    # 20 + 6 x 16 bytes of heads, and of each row 6 lengths of 8, 64 + 64 + 32 of tokens and 13 of its own
    assert lines[at + 2] == "    node2:0 -> node1:0: 2 rows, 558 B"
    # 2 x 320 x 48 + 3 x (2 x 48 x 48 + 2 x 48 x 16 + 3 x 48 x 112 + 2 x 48) + 48 numbers of two bytes
    at = lines.index("weights after an update: 191.2 KiB of bfloat16 into 1 memory that engines read")
    assert lines[at + 1 : at + 3] == ["  on node2, read by node2:0, node2:2", "  sent"]
    end = lines.index("    in all 191.2 KiB, 191.2 KiB of it between nodes")
    # all of it is one bucket of at most 64 MiB
    assert lines[end + 1 : end + 3] == [
        "  bucket by bucket: 382.3 KiB for the two that each memory has room for",
        "  and up to 382.3 KiB where messages are sent or received by a socket, as they are not within a node of CPUs",
    ]


def test_an_svg_file(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "show", "mesh.yaml", "--svg", "mesh.svg")
    assert code == 0 and out.splitlines()[-1] == "written: mesh.svg"
    assert ElementTree.parse(folder / "mesh.svg").getroot().tag.endswith("svg")
    code, _, err = run(capsys, "show", "mesh.yaml", "--svg", "nowhere/mesh.svg")
    assert code == 2 and err[-1] == "--svg: nowhere/mesh.svg: No such file or directory"


def test_the_whole_job(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "mesh.yaml").write_text("actor: {devices: all}\nrollout: {devices: all}\n")
    code, _, err = run(capsys, "show", "mesh.yaml")
    assert (code, err) == (
        2,
        ["mesh.yaml: devices: all is as many as the job has; say how many with --nodes node1:8 or 8"],
    )
    code, out, _ = run(capsys, "show", "mesh.yaml", "--nodes", "a:2,b:2")
    assert code == 0 and "actor       d0 d1   d2 d3" in out


def test_train_ppo_takes_ranges_and_the_whole_job_from_its_command_line(folder: Path) -> None:
    given = ["--config", "run.yaml", "--device_mesh", "mesh.yaml", "model.path=m", "data.train_files=[x]"]
    changes = ["device_mesh.actor.devices=[node1:0-1, node2:0-1]", "device_mesh.critic.devices=all"]
    _, mesh = load([*given, *changes, "actor.ppo_mini_batch_size=4"])
    assert [str(device) for device in mesh.roles["actor"].devices] == ["node1:0", "node1:1", "node2:0", "node2:1"]
    assert mesh.roles["critic"].everywhere and mesh.place("critic.devices") == "command line"
