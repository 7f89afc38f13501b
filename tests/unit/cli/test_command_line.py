"""load(): files, overrides and mesh become settings, or one error with the place of every mistake."""

import os
import sys
import time
from pathlib import Path

import pytest

from verl.cli import command_line
from verl.cli.command_line import load
from verl.config import ActorConfig, AdvantageEstimator, PPOConfig, Resume
from verl.errors import ConfigError, SharedError, UserError
from verl.mesh.spec import Device, MeshSpec, RolloutSpec

CONFIGS = Path(__file__).parents[3] / "configs"
USABLE = "model: {path: some/model}\ndata: {train_files: [train.parquet]}\n"


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of its own, and no torchrun around the test."""
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "VERL_MODEL"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def write(name: str, text: str) -> str:
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return name


def mistakes(*argv: str) -> list[str]:
    with pytest.raises(UserError) as caught:
        load(argv)
    return list(caught.value.problems)


def test_alone_it_trains_the_demos_model(monkeypatch: pytest.MonkeyPatch):
    config, mesh = load([])
    assert type(config) is PPOConfig and type(config.actor) is ActorConfig
    assert config.model.path == "outputs/demo/model"
    assert config.trainer.run_dir == "outputs/verl/ppo"
    assert {entry.devices for entry in mesh.roles.values()} == {(Device(None, 0),)}
    monkeypatch.setenv("VERL_MODEL", "org/other")
    assert load([])[0].model.path == "org/other"


def test_files_overrides_and_mesh_together():
    config_file = write("sub/mine.yaml", USABLE + "actor: {optim: {lr: 1e-5}}\nrollout: {n: 2}\n")
    mesh_file = write("sub/mesh.yaml", "actor: {devices: [0, 1]}\ncritic: {devices: [0]}\nrollout: {devices: [1]}\n")
    config, mesh = load(
        [
            "algorithm.adv_estimator=grpo",
            f"--device_mesh={mesh_file}",
            "device_mesh.rollout.backend=torch",
            "--config",
            config_file,
            "rollout.n=4",
            "data.train_files=[a.parquet,b.parquet]",
            "reward.function.kwargs={strict: true}",
            "trainer.resume=never",
        ]
    )
    assert config.actor.optim.lr == 1e-5 and config.rollout.n == 4
    assert config.algorithm.adv_estimator is AdvantageEstimator.grpo and config.trainer.resume is Resume.never
    assert config.data.train_files == ["a.parquet", "b.parquet"] and config.reward.function.kwargs == {"strict": True}
    assert type(config.data.train_files) is list and type(config.reward.function.kwargs) is dict
    assert config.device_mesh == mesh_file and mesh.source == mesh_file
    rollout = mesh.roles["rollout"]
    assert isinstance(rollout, RolloutSpec) and rollout.backend == "torch"


def test_the_mesh_may_be_a_path_or_stand_in_the_settings():
    by_path = write("a.yaml", USABLE + f"device_mesh: {CONFIGS}/device_mesh/split_2.yaml\n")
    inline = write(
        "b.yaml",
        USABLE + "device_mesh:\n  actor: {devices: [0]}\n  critic: {devices: [1]}\n  rollout: {devices: [1]}\n",
    )
    assert load(["--config", by_path])[1].roles["actor"].devices == (Device(None, 0),)
    assert load(["--config", inline])[1].roles["critic"].devices == (Device(None, 1),)
    changed = load(["--config", inline, "device_mesh.critic.devices=[0, 1]"])[1]
    assert len(changed.roles["critic"].devices) == 2
    assert load(["--config", inline, "--device_mesh", f"{CONFIGS}/device_mesh/split_2.yaml"])[1].roles[
        "critic"
    ].devices == (Device(None, 1),)
    assert load(
        ["--config", by_path, "device_mesh={actor: {devices: [1]}, critic: {devices: [1]}, rollout: {devices: [1]}}"]
    )[1].roles["actor"].devices == (Device(None, 1),)
    assert len(load(["--config", inline, "device_mesh=null"])[1].roles) == 5


def test_collapse_mesh():
    spec = load([f"--device_mesh={CONFIGS}/device_mesh/hybrid_engine_8.yaml", "debug.collapse_mesh=true"])[1]
    assert {entry.devices for entry in spec.roles.values()} == {(Device(None, 0),)}
    assert spec.roles["actor"].tensor_parallel_size == 1


def test_a_defaults_list_composes():
    write("experiment/small.yaml", "# @package _global_\nrollout: {n: 6}\nalgorithm: {lam: 0.5}\n")
    config_file = write("mine.yaml", f"defaults: [experiment/small, _self_]\n{USABLE}algorithm: {{lam: 0.9}}\n")
    config, _ = load(["--config", config_file])
    assert (config.rollout.n, config.algorithm.lam) == (6, 0.9)
    # the shipped ones are found from any folder, in a file as on the command line
    shipped = write("other.yaml", f"defaults: [experiment/grpo, _self_]\n{USABLE}")
    assert load(["--config", shipped])[0].algorithm.adv_estimator is AdvantageEstimator.grpo
    assert load(["--config", config_file, "+experiment=grpo"])[0].rollout.n == 8
    assert (
        load(["--config", config_file, "--config-dir", "further", "trainer.seed=2"])[0].trainer.seed == 2
        if (Path("further").mkdir() is None)
        else False
    )


@pytest.mark.parametrize("name", sorted(path.stem for path in (CONFIGS / "experiment").glob("*.yaml")))
def test_every_shipped_experiment_loads(name: str):
    assert isinstance(load([f"+experiment={name}"])[0], PPOConfig)


@pytest.mark.parametrize("name", sorted(path.stem for path in CONFIGS.glob("*.yaml")))
def test_every_shipped_config_loads(name: str):
    assert isinstance(load([f"--config={CONFIGS / name}.yaml"])[0], PPOConfig)


@pytest.mark.parametrize("mesh", ["single", "colocated_2", "split_2", "article_4"])
def test_every_shipped_mesh_of_today_goes_with_the_default_settings(mesh: str):
    assert isinstance(load([f"--device_mesh={CONFIGS}/device_mesh/{mesh}.yaml"])[1], MeshSpec)


def test_every_mistake_of_a_file_is_told_with_its_line():
    write("experiment/odd.yaml", "# @package _global_\n\ntrainer:\n  sead: 3\n")
    config_file = write(
        "mine.yaml",
        """defaults: [experiment/odd, _self_]
model:
  path: m
data:
  train_files: train.parquet
  train_bach_size: 8
actor: {clip_ratio: high, use_kl_loss: 2}
algorithm:
  kl_penalty: k4
  kl_ctrl: 0.1
rollout:
  stop_token_ids: [1, x]
rolout: {n: 3}
""",
    )
    assert mistakes("--config", config_file, "trainer.total_epochs=1.5", "+extra=1", "critic.path=[a]") == [
        'mine.yaml:5: data.train_files: needs a list, for example [a, b], got "train.parquet"; write [train.parquet]',
        "mine.yaml:6: data.train_bach_size: unknown setting; did you mean data.train_batch_size?",
        'mine.yaml:7: actor.clip_ratio: needs a number, got "high"',
        "mine.yaml:7: actor.use_kl_loss: needs true or false, got 2",
        "command line: critic.path: needs text or null, got ['a']",
        "mine.yaml:12: rollout.stop_token_ids: needs a list, for example [1, 2], got [1, 'x']",
        'mine.yaml:9: algorithm.kl_penalty: needs one of k1, k2, k3, got "k4"',
        "mine.yaml:10: algorithm.kl_ctrl: holds settings (algorithm.kl_ctrl.KEY=VALUE), got 0.1",
        "command line: trainer.total_epochs: needs a whole number, got 1.5",
        "experiment/odd.yaml:4: trainer.sead: unknown setting; did you mean trainer.seed?",
        "mine.yaml:13: rolout: unknown setting; did you mean rollout?",
        "command line: extra: unknown setting; train_ppo.py --help lists all",
    ]


def test_a_file_in_a_group_without_a_package_header_is_still_found():
    write("data/mine.yaml", "train_batch_sise: 8\n")
    config_file = write("mine.yaml", f"defaults: [data/mine, _self_]\n{USABLE}")
    (problem,) = mistakes("--config", config_file)
    assert problem.startswith(
        "data/mine.yaml:1: data.train_batch_sise: unknown setting; did you mean data.train_batch_size"
    )


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "data.train_bach_size=3",
            "command line: data.train_bach_size: unknown setting; did you mean data.train_batch_size?",
        ),
        ("train_batch_size=3", "command line: train_batch_size: unknown setting; did you mean data.train_batch_size?"),
        ("n=3", "command line: n: unknown setting; did you mean rollout.n, rollout.val.n?"),
        ("zzz=3", "command line: zzz: unknown setting; train_ppo.py --help lists all"),
        (
            "model.path.x=3",
            "command line: model.path.x: unknown setting; did you mean model.path, reward.model.path?",
        ),
        (
            "actor.clip_ratio=[",
            "command line: actor.clip_ratio=[: no viable alternative at input '['; close what is open, and quote the "
            "whole for the shell where it holds brackets, spaces or quotation marks: 'name=[a, b]'",
        ),
        ("model.path=${nope}", "command line: model.path: Interpolation key 'nope' not found"),
        (
            "model.path=${oc.env:NOPE}",
            'command line: model.path: KeyError raised while resolving interpolation: "Environment variable '
            "'NOPE' not found\"",
        ),
        ("=3", "Config group override must be a string or a list. Got int"),
        (
            "data.train_files={a: b}",
            "Error merging override data.train_files={a: b}: Cannot merge DictConfig with ListConfig",
        ),
        ("~rollout.q", "Could not delete from config. 'rollout.q' does not exist."),
        (
            "device_mesh=nope.yaml",
            "command line: device_mesh: nope.yaml: No such file or directory (working directory: HERE)",
        ),
        (
            "device_mesh=[",
            "command line: device_mesh: not valid YAML: while parsing a flow node, expected the node content, "
            "but found '<stream end>'",
        ),
        ("device_mesh=3", "command line: a mesh maps each role to its devices, and this is 3"),
        (
            "device_mesh.actor.devices=[x]",
            'command line: actor.devices[0]: "x" is not a device; write an index (0), a range (0-3) or either of a '
            'node ("node1:0", "node1:0-3")',
        ),
        (
            "data.train_batch_size=7",
            "command line: actor.ppo_mini_batch_size=16: data.train_batch_size=7 is not a multiple of it; take a "
            "divisor of 7",
        ),
        ("rollout.top_p=0", "command line: rollout.top_p=0.0: must be above 0 and at most 1"),
    ],
)
def test_a_mistake_on_the_command_line(override: str, message: str, elsewhere: Path):
    expected = message.replace("HERE", str(elsewhere))
    if override.startswith("data.train_batch_size"):
        expected = expected.removeprefix("command line: ")  # the mini-batch is a default
    assert mistakes(override) == [expected]


def test_a_value_that_looks_like_a_sweep():
    (problem,) = mistakes("actor.clip_ratio=0.1,0.2")
    assert problem.startswith("Ambiguous value for argument 'actor.clip_ratio=0.1,0.2'") and "--multirun" in problem


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [", "bad.yaml:1: not valid YAML: while parsing a flow node, expected the node content, but found"),
        (
            "model: {path: a}\nmodel: {path: b}",
            "bad.yaml:2: model: stands twice, first at bad.yaml:1; keep one of them",
        ),
        ("- a", "bad.yaml:1: settings have names and values, and this is a list"),
        ("defaults: [nope]", "In 'bad': Could not load 'nope'."),
        ("defaults: 3", "Invalid defaults list in 'bad', defaults must be a list (got int)"),
        ("defaults: [bad]", "maximum recursion depth exceeded"),
        ("hydra: 3", "In 'bad': ValidationError raised while composing config: Merge error: int is not a subclass of"),
        ("", "model.path: required; set model.path=VALUE"),
        (
            USABLE + "trainer: {resume_path: x}",
            "bad.yaml:3: trainer.resume_path=x: is used with trainer.resume=path only;",
        ),
        (
            USABLE + "device_mesh:\n  actor: {devices: [0]}\n  rolout: 3",
            "bad.yaml:5: rolout: unknown role; did you mean",
        ),
        (USABLE + "device_mesh: {actor: {devices: [0]}}", "bad.yaml:3: no rollout; every mesh names actor and rollout"),
        (USABLE + "device_mesh: nope.yaml", "bad.yaml:3: device_mesh: nope.yaml: No such file or directory (working"),
        (USABLE + "device_mesh: 3", "bad.yaml:3: a mesh maps each role to its devices, and this is 3"),
    ],
)
def test_a_mistake_in_the_config_file(text: str, message: str):
    assert mistakes("--config", write("bad.yaml", text))[0].startswith(message)


def test_a_broken_file_further_down_is_named():
    write("experiment/broken.yaml", "a: 1\nb: [\n")
    config_file = write("mine.yaml", f"defaults: [experiment/broken]\n{USABLE}")
    (problem,) = mistakes("--config", config_file)
    assert problem.startswith("experiment/broken.yaml:3: not valid YAML: ")


def test_files_that_are_not_there_or_not_text(elsewhere: Path):
    assert mistakes("--config", "nope.yaml") == [
        f"command line: --config: nope.yaml: No such file or directory (working directory: {elsewhere})"
    ]
    assert mistakes("--device_mesh", "sub") == [
        f"command line: device_mesh: sub: No such file or directory (working directory: {elsewhere})"
    ]
    Path("binary.yaml").write_bytes(b"\xff\xfe\x00")
    assert "not UTF-8 text" in mistakes("--config", "binary.yaml")[0]
    assert "not UTF-8 text" in mistakes("--device_mesh", "binary.yaml")[0]
    assert "rename it" in mistakes("--config", write("mine.yml", USABLE))[0]


def test_training_roles_may_be_split():
    _, mesh = load(["--device_mesh", f"{CONFIGS}/device_mesh/hybrid_engine_8.yaml"])
    actor = mesh.roles["actor"]
    assert (actor.pipeline_parallel_size, actor.tensor_parallel_size, actor.data_parallel_size) == (2, 2, 2)


def test_a_mesh_without_the_critic_that_gae_trains():
    mesh_file = write("mesh.yaml", "actor: {devices: [0]}\nrollout: {devices: [0]}\n")
    with pytest.raises(
        ConfigError, match=r"^algorithm.adv_estimator=gae: trains a critic, and the device mesh has none"
    ):
        load(["--device_mesh", mesh_file])


def test_loading_is_of_one_run(elsewhere: Path):
    assert load(["-m", "trainer.seed=3", "hydra.mode=MULTIRUN"])[0].trainer.seed == 3
    assert list(elsewhere.iterdir()) == []


def test_loading_leaves_no_trace(elsewhere: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "argv", ["pytest", "--its-own"])
    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")
    load(["actor.optim.lr=1"])
    mistakes("nope=1")
    assert sys.argv == ["pytest", "--its-own"]
    assert os.environ["HYDRA_FULL_ERROR"] == "0"
    assert list(elsewhere.iterdir()) == []


def seen(monkeypatch: pytest.MonkeyPatch, *argv: str) -> tuple[int, list[tuple[PPOConfig, MeshSpec, list[str]]]]:
    """The exit code of run(), and what it gave to train."""
    given: list[tuple[PPOConfig, MeshSpec, list[str]]] = []
    monkeypatch.setattr(sys, "argv", ["train_ppo.py", *argv])
    code = command_line.run(lambda config, mesh: given.append((config, mesh, sys.argv)), argv)
    return code, given


def test_run_trains_once_and_shows_train_the_users_argv(monkeypatch: pytest.MonkeyPatch):
    mesh_file = write("mesh.yaml", "actor: {devices: [0]}\ncritic: {devices: [0]}\nrollout: {devices: [0]}\n")
    argv = ["--device_mesh", mesh_file, "rollout.n=3"]
    code, given = seen(monkeypatch, *argv)
    ((config, mesh, argv_in_train),) = given
    assert code == 0 and config.rollout.n == 3 and mesh.source == "mesh.yaml"
    assert argv_in_train == ["train_ppo.py", *argv]


def test_run_in_one_process_refuses_a_larger_mesh(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    mesh = f"{CONFIGS}/device_mesh/split_2.yaml"
    assert seen(monkeypatch, "--device_mesh", mesh) == (2, [])
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.endswith(
        "split_2.yaml: the mesh has 2 devices (0, 1), and this is one process. Start it with\n"
        f"  torchrun --standalone --nproc_per_node=2 train_ppo.py --device_mesh {mesh}\n"
        "or put all its roles on device 0 with debug.collapse_mesh=true\n"
    )
    monkeypatch.setenv("WORLD_SIZE", "2")
    code, given = seen(monkeypatch, "--device_mesh", mesh)
    assert code == 0 and len(given) == 1


def test_run_lets_other_exceptions_out_whole(monkeypatch: pytest.MonkeyPatch):
    def train(config: PPOConfig, mesh: MeshSpec) -> None:
        raise OSError("disk full")  # of a kind that composing may raise too

    with pytest.raises(OSError, match="disk full"):
        command_line.run(train, [])

    def leave(config: PPOConfig, mesh: MeshSpec) -> None:
        raise SystemExit(7)

    with pytest.raises(SystemExit, match="7"):
        command_line.run(leave, [])


def test_run_prints_a_users_mistake_of_the_training_once(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    def train(config: PPOConfig, mesh: MeshSpec) -> None:
        raise UserError("no GPU here", "and none there")

    assert command_line.run(train, []) == 2
    assert capsys.readouterr() == ("", "no GPU here\nand none there\n")


def test_a_further_process_of_a_node_leaves_the_report_to_the_first_but_never_loses_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setattr(command_line, "OTHERS_WAIT_SECONDS", 0.5)
    started = time.monotonic()
    assert command_line.run(lambda config, mesh: None, ["nope=1"]) == 2
    assert time.monotonic() - started > 0.5
    assert capsys.readouterr().err.startswith("command line: nope: unknown setting")


def test_a_further_process_of_a_node_never_says_what_all_of_them_have(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """Not even where torchrun, on a busy machine, ends it late."""

    def train(config: PPOConfig, mesh: MeshSpec) -> None:
        raise SharedError("one table")

    monkeypatch.setattr(command_line, "OTHERS_WAIT_SECONDS", 0.0)
    for local_rank, said in (("1", ""), ("0", "one table\n")):
        monkeypatch.setenv("LOCAL_RANK", local_rank)
        assert command_line.run(train, []) == 2
        assert capsys.readouterr() == ("", said)


@pytest.mark.parametrize(("joint", "group_rank", "says"), [("", "1", True), ("1", "0", True), ("1", "1", False)])
def test_where_the_output_of_all_nodes_is_shown_together_one_node_says_what_all_have(
    joint: str, group_rank: str, says: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def shared(config: PPOConfig, mesh: MeshSpec) -> None:
        raise SharedError("one table")

    def own(config: PPOConfig, mesh: MeshSpec) -> None:
        raise UserError("here alone")

    monkeypatch.setattr(command_line, "OTHERS_WAIT_SECONDS", 0.0)
    monkeypatch.setenv("GROUP_RANK", group_rank)
    if joint:
        monkeypatch.setenv("VERL_JOINT_OUTPUT", joint)
    assert command_line.run(shared, []) == 2
    assert capsys.readouterr() == ("", "one table\n" if says else "")
    assert command_line.run(own, []) == 2
    assert capsys.readouterr() == ("", "here alone\n")


def test_multirun_gives_each_job_a_folder_of_its_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], elsewhere: Path
):
    code, given = seen(monkeypatch, "actor.optim.lr=1e-6,1e-5", "--multirun", "trainer.experiment_name=sweep")
    assert code == 0
    assert [config.actor.optim.lr for config, _, _ in given] == [1e-6, 1e-5]
    assert [config.trainer.run_dir for config, _, _ in given] == [
        str(elsewhere / "outputs/verl/sweep/actor.optim.lr=1e-06"),
        str(elsewhere / "outputs/verl/sweep/actor.optim.lr=1e-05"),
    ]
    assert {path.name for path in elsewhere.iterdir()} == {"outputs"}
    assert "Launching 2 jobs locally" in capsys.readouterr().out


def test_multirun_names_the_job_of_a_mistake(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    code, given = seen(monkeypatch, "-m", "actor.clip_ratio=0.1,2")
    assert code == 2 and len(given) == 1
    assert capsys.readouterr().err == "job 1: command line: actor.clip_ratio=2.0: must be above 0 and below 1\n"


def test_multirun_is_refused_under_torchrun(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setenv("RANK", "0")
    assert seen(monkeypatch, "-m", "trainer.seed=1,2") == (2, [])
    assert capsys.readouterr().err.startswith(
        "command line: --multirun: runs its jobs in one process, and this is one of"
    )


def test_hydras_own_settings_still_work(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("VERL_TEST_SETTING", raising=False)
    values: list[str | None] = []
    command_line.run(
        lambda config, mesh: values.append(os.environ.get("VERL_TEST_SETTING")),
        ["+hydra.job.env_set.VERL_TEST_SETTING=yes"],
    )
    assert values == ["yes"] and "VERL_TEST_SETTING" not in os.environ
