"""train_ppo.py as users start it: real processes, alone and under torchrun."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
TRAIN_PPO = ROOT / "train_ppo.py"
SPLIT = ROOT / "configs" / "device_mesh" / "split_2.yaml"

STAND_IN = f"""
import os, runpy, sys, types

def train(config, mesh):
    rank = os.environ.get("RANK", "0")
    where = f"on {{len(mesh.roles)}} roles from {{sys.argv[1:]}}"
    print(f"rank {{rank}} trains with n={{config.rollout.n}} {{where}}", flush=True)
    if rank == os.environ.get("FAIL_ON_RANK"):
        raise RuntimeError("the cable is out")

sys.modules["verl.train"] = types.ModuleType("verl.train")
sys.modules["verl.train"].train = train
sys.path.insert(0, {str(ROOT)!r})
sys.argv[0] = {str(TRAIN_PPO)!r}
runpy.run_path({str(TRAIN_PPO)!r}, run_name="__main__")
"""


@pytest.fixture
def driver(tmp_path: Path) -> Path:
    """train_ppo.py with a stand-in for verl.train, which needs a model."""
    path = tmp_path / "driver.py"
    path.write_text(STAND_IN)
    return path


def start(*command: object, cwd: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    outer = {
        name: value
        for name, value in os.environ.items()
        if name not in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "HYDRA_FULL_ERROR", "PYTHONPATH", "VERL_MODEL")
    }
    return subprocess.run(
        [sys.executable, *map(str, command)],
        cwd=cwd,
        env=outer | environ,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )


def torchrun(driver: Path, *arguments: object, **environ: str) -> subprocess.CompletedProcess[str]:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")
    return start(*launcher, driver, *arguments, cwd=driver.parent, **environ)


def test_help_needs_no_torch_and_leaves_no_file(tmp_path: Path):
    shown = start("-X", "importtime", TRAIN_PPO, "--help", cwd=tmp_path)
    assert shown.returncode == 0
    assert shown.stdout.startswith("usage: train_ppo.py [--config FILE] [--device_mesh FILE] [setting=value ...]")
    assert "  actor.clip_ratio=0.2\n      PPO's epsilon:" in shown.stdout
    imported = {line.rpartition("|")[2].strip() for line in shown.stderr.splitlines()}
    assert "omegaconf" in imported and not imported & {"torch", "transformers"}
    assert list(tmp_path.iterdir()) == []


def test_cfg_job_shows_the_settings_of_the_run(tmp_path: Path):
    shown = start(TRAIN_PPO, "rollout.n=7", "--cfg", "job", "--package", "rollout", "data.shuffle=false", cwd=tmp_path)
    assert (shown.returncode, shown.stderr) == (0, "")
    assert shown.stdout.startswith("# @package rollout\ntemperature: 1.0\ntop_p: 1.0\ntop_k: 0\n'n': 7\n")
    resolved = start(TRAIN_PPO, "--cfg=job", "--resolve", cwd=tmp_path, VERL_MODEL="org/model")
    assert "  path: org/model\n" in resolved.stdout and "  adv_estimator: gae\n" in resolved.stdout


def test_cfg_job_refuses_what_a_run_would_refuse(tmp_path: Path):
    shown = start(TRAIN_PPO, "--cfg", "job", "+rolout.n=7", cwd=tmp_path)
    assert (shown.returncode, shown.stdout) == (2, "")
    assert shown.stderr == "command line: rolout: unknown setting; did you mean rollout?\n"


def test_info_and_hydras_help(tmp_path: Path):
    shown = start(TRAIN_PPO, "--info", "defaults", cwd=tmp_path)
    assert shown.returncode == 0 and "| ppo_config " in shown.stdout
    assert "== Flags ==" in start(TRAIN_PPO, "--hydra-help", cwd=tmp_path).stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["rollout.nn=3"], "command line: rollout.nn: unknown setting; did you mean rollout.n?\n"),
        (["rollout.n=few"], 'command line: rollout.n: needs a whole number, got "few"\n'),
        (["trainer.resume=maybe"], 'command line: trainer.resume: needs one of auto, never, path, got "maybe"\n'),
        (["--cofnig", "x"], "command line: --cofnig: unknown flag; did you mean --config?\n"),
        (
            ["--device_mesh", SPLIT, "device_mesh.critic.devices=[cuda:1]"],
            'command line: critic.devices[0]: "cuda:1" is not how a device is named here; write 1, or "node1:1" in a '
            "job of several nodes\n",
        ),
    ],
)
def test_a_mistake_is_one_message_and_exit_code_2(arguments: list[object], message: str, tmp_path: Path):
    shown = start(TRAIN_PPO, *arguments, cwd=tmp_path)
    assert (shown.returncode, shown.stdout, shown.stderr) == (2, "", message)


def test_one_process_trains_and_writes_nothing_itself(driver: Path):
    shown = start(driver, "rollout.n=3", cwd=driver.parent)
    assert (shown.returncode, shown.stderr) == (0, "")
    assert shown.stdout == "rank 0 trains with n=3 on 5 roles from ['rollout.n=3']\n"
    assert list(driver.parent.iterdir()) == [driver]


def test_one_process_that_fails_shows_the_whole_traceback(driver: Path):
    shown = start(driver, cwd=driver.parent, FAIL_ON_RANK="0")
    assert shown.returncode == 1
    assert shown.stderr.count("RuntimeError: the cable is out") == 1
    assert shown.stderr.rstrip().endswith("RuntimeError: the cable is out") and ", in train\n" in shown.stderr


def test_another_package_called_verl_is_refused(tmp_path: Path):
    """As with PyPI's: Python is told to look elsewhere first."""
    other = tmp_path / "site" / "verl" / "__init__.py"
    other.parent.mkdir(parents=True)
    other.write_text("raise ImportError('it must not even be imported')")
    site = str(tmp_path / "site")
    started = (
        f"import runpy, sys; sys.path.insert(0, {site!r}); runpy.run_path({str(TRAIN_PPO)!r}, run_name='__main__')"
    )
    shown = start("-c", started, cwd=tmp_path)
    assert (shown.returncode, shown.stdout) == (2, "")
    assert shown.stderr == (
        f"train_ppo.py needs the package {ROOT / 'verl' / '__init__.py'}, and Python finds {other}: take the other one "
        f"away (pip uninstall verl, PYTHONPATH), then run `pip install -e {ROOT}`\n"
    )


@pytest.mark.dist
def test_torchrun_prints_help_once(driver: Path):
    shown = torchrun(driver, "--help")
    assert shown.returncode == 0 and shown.stdout.count("usage: train_ppo.py") == 1


@pytest.mark.dist
def test_torchrun_prints_a_mistake_once_without_a_traceback(driver: Path):
    shown = torchrun(driver, "--device_mesh", SPLIT, "rollout.nn=3")
    assert shown.returncode != 0 and shown.stdout == ""
    assert shown.stderr.count("command line: rollout.nn: unknown setting; did you mean rollout.n?") == 1
    assert "exitcode  : 2" in shown.stderr
    assert 'File "' not in shown.stderr.partition("ChildFailedError")[2]


@pytest.mark.dist
def test_torchrun_names_the_rank_that_failed_and_why(driver: Path):
    shown = torchrun(driver, "--device_mesh", SPLIT, FAIL_ON_RANK="1")
    assert shown.returncode != 0
    assert "rank 0 trains with n=1 on 4 roles" in shown.stdout and "rank 1 trains with n=1" in shown.stdout
    summary = shown.stderr.partition("ChildFailedError")[2]
    assert "(local_rank: 1)" in summary and "RuntimeError: the cable is out" in summary


@pytest.mark.dist
def test_torchrun_does_not_sweep(driver: Path):
    shown = torchrun(driver, "-m", "trainer.seed=1,2")
    assert shown.returncode != 0 and shown.stdout == ""
    assert shown.stderr.count("--multirun: runs its jobs in one process, and this is one of torchrun's") == 1
    assert list(driver.parent.iterdir()) == [driver]
