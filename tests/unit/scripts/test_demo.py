"""The demo's launch line and its table."""

from __future__ import annotations

import io
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from rich.console import Console

from scripts.demo import launch_command, main, result_table, run_folder, train
from verl.cli.command_line import load
from verl.config import Resume
from verl.monitor.names import SAMPLES_PER_SECOND, STEP_SECONDS, STEP_TOKENS, VALIDATION_SCORE

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize(("num_gpus", "num_processes"), [(0, 2), (1, 1), (2, 2), (8, 2)])
def test_processes_for_the_gpus_there_are(num_gpus: int, num_processes: int) -> None:
    command = launch_command(num_gpus, None, 1)
    assert command[:4] == ["torchrun", "--standalone", f"--nproc_per_node={num_processes}", "train_ppo.py"]
    assert ("debug.collapse_mesh=true" in command) is (num_gpus == 1)


def test_the_line_has_the_two_flags_and_the_overrides() -> None:
    line = " ".join(launch_command(0, 3, 2))
    assert "--config configs/experiment/products.yaml --device_mesh configs/device_mesh/demo_2.yaml " in line
    assert "trainer.total_training_steps=3" in line
    assert "trainer.seed=2" in line
    assert "trainer.run_dir=outputs/demo/seed2-3steps" in line
    assert "total_training_steps" not in " ".join(launch_command(0, None, 2))


@pytest.mark.parametrize("num_gpus", [0, 1])
def test_train_ppo_understands_the_line(num_gpus: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    config, mesh = load(launch_command(num_gpus, 3, 2)[4:])
    assert (config.trainer.total_training_steps, config.trainer.seed) == (3, 2)
    assert config.trainer.run_dir == str(run_folder(3, 2))
    assert config.trainer.resume is Resume.never
    used = {device for role in mesh.roles.values() for device in role.devices}
    assert len(used) == (1 if num_gpus == 1 else 2)


def test_a_short_run_and_another_seed_have_folders_of_their_own() -> None:
    assert len({run_folder(steps, seed) for steps in (None, 3, 4) for seed in (1, 2)}) == 6


def test_the_table_says_what_came_of_it(tmp_path: Path) -> None:
    speed = {STEP_SECONDS: 10.0, STEP_TOKENS: 5000.0, SAMPLES_PER_SECOND: 6.4}
    lines = [
        {"step": 0, "time": 1000.0, VALIDATION_SCORE: 0.25},
        {"step": 1, "time": 1010.0, **speed},
        {"step": 2, "time": 1020.0, **speed, VALIDATION_SCORE: 0.9625},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "checkpoints").mkdir()
    val_file = tmp_path / "val.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"prompt": ["?"] * 41}), val_file)
    table = result_table(tmp_path, val_file, train_seconds=75.4, setup_seconds=130)
    written = io.StringIO()
    Console(width=200, file=written).print(table)
    rows = dict(line.split("│")[1:3] for line in written.getvalue().splitlines() if line.count("│") == 3)
    rows = {name.strip(): value.strip() for name, value in rows.items()}
    assert rows["validation reward before"].startswith("0.25")
    assert rows["validation reward after"].startswith("0.9625")
    assert float(rows["samples/s"]) == 6.4
    assert float(rows["tokens/s"]) == 500
    assert rows["held-out prompts"] == "41 (greedy)"
    assert rows["training, start to end"] == "0:01:15"
    assert rows["set-up before it"] == "0:02:10"
    assert rows["checkpoints"] == str(tmp_path / "checkpoints")
    assert rows["metrics"] == str(tmp_path / "metrics.jsonl")


def test_a_failed_training_is_raised() -> None:
    with pytest.raises(subprocess.CalledProcessError):
        train([sys.executable, "-c", "raise SystemExit(3)"])


def test_training_ends_with_the_demo(tmp_path: Path) -> None:
    training = f"import os, time; open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()) + ' '); time.sleep(1000)"
    program = f"import sys; from scripts.demo import train; train([sys.executable, '-c', {training!r}])"
    demo = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT)
    try:
        while not ((tmp_path / "pid").exists() and (tmp_path / "pid").read_text().endswith(" ")):
            assert demo.poll() is None
            time.sleep(0.05)
        demo.terminate()
        assert demo.wait(300) == 128 + signal.SIGTERM
    finally:
        demo.kill()
    assert not Path("/proc", (tmp_path / "pid").read_text().strip()).exists()


@pytest.mark.parametrize(
    ("words", "expected"),
    [(["STEPS=3", "SEED=2"], "demo.sh --steps 3 --seed 2"), ([], "demo.sh --seed 1")],
)
def test_make_demo_passes_steps_and_seed(words: list[str], expected: str) -> None:
    shown = subprocess.run(
        ["make", "--no-print-directory", "-n", "demo", *words], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    assert " ".join(shown.split()).endswith(expected)


def test_zero_steps_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["--steps", "0"])
    assert stopped.value.code == 2
    assert "--steps 0: at least 1" in capsys.readouterr().err
