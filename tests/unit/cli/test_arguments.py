"""Sorting a command line: flags and overrides in any order."""

import itertools
from pathlib import Path

import pytest

from verl.cli.arguments import DEFAULT_CONFIG, Arguments, sort_arguments
from verl.errors import ConfigError


def test_nothing_is_the_default_config():
    assert sort_arguments([]) == Arguments(config=DEFAULT_CONFIG)
    assert DEFAULT_CONFIG.is_file()


def test_any_order_and_both_spellings():
    parts = (["--config", "a b.yaml"], ["--device_mesh=m.yaml"], ["actor.optim.lr=1e-5"], ["-m"], ["+x.y=2", "~z"])
    expected = Arguments(
        config=Path("a b.yaml"),
        device_mesh=Path("m.yaml"),
        overrides=("actor.optim.lr=1e-5", "+x.y=2", "~z"),
        flags=("-m",),
    )
    for order in itertools.permutations(parts):
        sorted_arguments = sort_arguments([token for part in order for token in part])
        assert set(sorted_arguments.overrides) == set(expected.overrides)
        assert (sorted_arguments.config, sorted_arguments.device_mesh) == (expected.config, expected.device_mesh)
        assert sorted_arguments.flags == expected.flags


def test_overrides_of_the_mesh_are_kept_from_hydra():
    arguments = sort_arguments(
        ["device_mesh.actor.devices=[0]", "++device_mesh.rollout.backend=torch", "data.seed=1", "device_mesh=m.yaml"]
    )
    assert arguments.mesh_overrides == ("device_mesh.actor.devices=[0]", "++device_mesh.rollout.backend=torch")
    assert arguments.device_mesh == "m.yaml" and arguments.overrides == ("data.seed=1",)


def test_hydras_flags_keep_their_values():
    arguments = sort_arguments(["--info", "a.b=1", "--cfg", "job", "--package=data", "--resolve", "--config-dir", "d"])
    assert sorted(arguments.flags) == sorted(["--info", "all", "--cfg", "job", "--package", "data", "--resolve"])
    assert arguments.overrides == ("a.b=1",) and arguments.config_dir == ("--config-dir", "d")
    assert sort_arguments(["--info", "searchpath", "a=1"]).flags == ("--info", "searchpath")
    assert sort_arguments(["--info=defaults"]).flags == ("--info", "defaults")


def test_a_value_with_an_equals_sign_or_a_dash():
    arguments = sort_arguments(["--config", "dir=1/x.yaml", "a='b=c -d'", "e=-1"])
    assert arguments.config == Path("dir=1/x.yaml") and arguments.overrides == ("a='b=c -d'", "e=-1")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--confg", "x"], "command line: --confg: unknown flag; did you mean --config?"),
        (["--device-mesh", "x"], "command line: --device-mesh: unknown flag; did you mean --device_mesh?"),
        (["--nope"], "command line: --nope: unknown flag; train_ppo.py --help lists all"),
        (["--config"], "command line: --config: needs a value"),
        (["a=1", "--cfg"], "command line: --cfg: needs a value"),
        (
            ["x.yaml"],
            "command line: x.yaml: neither a flag nor setting=value; write --config x.yaml for settings, "
            "--device_mesh x.yaml for a mesh",
        ),
        (
            ["actor.optim.lr", "1e-6"],
            "command line: actor.optim.lr: neither a flag nor setting=value; write actor.optim.lr=VALUE, without "
            "spaces",
        ),
        ([""], "command line: : neither a flag nor setting=value"),
        (["--config-name", "x"], "command line: --config-name: not used here; give the file's path with --config FILE"),
        (
            ["--device_mesh", "a", "device_mesh=b"],
            "command line: 2 meshes by --device_mesh and device_mesh=VALUE; keep one of them",
        ),
    ],
)
def test_what_cannot_be_sorted(argv: list[str], message: str):
    with pytest.raises(ConfigError) as caught:
        sort_arguments(argv)
    assert str(caught.value) == message
