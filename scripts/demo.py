"""Trains SmolLM2-135M with PPO to multiply two digits, and shows what came of it.

    bash scripts/demo.sh [--steps N] [--seed N]            (or: make demo [STEPS=N] [SEED=N])

demo.sh makes the environment and runs this in it. Training is a plain torchrun line, which is shown: without a GPU two
processes on the CPU, with GPUs two processes on two of them, and with one GPU a single process that plays all roles.
Everything is written under outputs/demo/.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import pyarrow.parquet
import torch
from rich.console import Console
from rich.table import Table

from verl.monitor.summary import summarise

ROOT = Path(__file__).resolve().parents[1]
OUT = Path("outputs/demo")
"""From the root, where everything here runs."""
STOP_LIMIT = 90.0
"""Seconds that torchrun has to stop its ranks; it gives them 30."""


def say(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", flush=True)


def prepare() -> None:
    """The model and the prompts; a model that is there already is not made again."""
    scripts = ROOT / "scripts"
    say("model: SmolLM2-135M-Instruct")
    subprocess.run([sys.executable, scripts / "prepare_model.py", "--out", OUT / "model"], check=True)
    say("prompts: one digit times one digit")
    data = [sys.executable, scripts / "prepare_data.py", "--task", "products", "--out", OUT / "data"]
    subprocess.run(data, check=True)


def run_folder(steps: int | None, seed: int) -> Path:
    """A short run does not replace a whole one, nor one seed another."""
    return OUT / (f"seed{seed}" if steps is None else f"seed{seed}-{steps}steps")


def launch_command(num_gpus: int, steps: int | None, seed: int) -> list[str]:
    """The torchrun line, as one would type it in the root."""
    num_processes = 1 if num_gpus == 1 else 2
    command = ["torchrun", "--standalone", f"--nproc_per_node={num_processes}", "train_ppo.py"]
    command += ["--config", "configs/experiment/products.yaml", "--device_mesh", "configs/device_mesh/demo_2.yaml"]
    command += [f"trainer.run_dir={run_folder(steps, seed)}", f"trainer.seed={seed}", "trainer.resume=never"]
    if steps is not None:
        command.append(f"trainer.total_training_steps={steps}")
    if num_processes == 1:
        command.append("debug.collapse_mesh=true")
    return command


def train(command: list[str]) -> None:
    """Run it with its output on this terminal; it ends when this process is interrupted or told to terminate.

    Raises CalledProcessError if it fails.
    """
    threads = max(1, (os.cpu_count() or 2) // 2)
    environment = {
        "OMP_NUM_THREADS": str(threads),
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    process = subprocess.Popen(command, env=environment)
    try:
        status = process.wait()
    finally:  # torchrun stops its ranks on SIGTERM; subprocess.run would kill it and leave them behind
        process.terminate()
        process.wait(STOP_LIMIT)
        signal.signal(signal.SIGTERM, before)
    if status != 0:
        raise subprocess.CalledProcessError(status, command)


def result_table(run_dir: Path, val_file: Path, *, train_seconds: float, setup_seconds: float) -> Table:
    """The run's own summary, and what only the demo knows."""
    table = summarise(run_dir).table()
    table.add_row("held-out prompts", f"{pyarrow.parquet.read_metadata(val_file).num_rows} (greedy)")
    table.add_row("generation by", "torch" if importlib.util.find_spec("vllm") is None else "vLLM")
    table.add_row("training, start to end", str(timedelta(seconds=round(train_seconds))))
    table.add_row("set-up before it", str(timedelta(seconds=round(setup_seconds))))
    return table


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, help="training steps; left out: those of configs/experiment/products.yaml")
    parser.add_argument("--seed", type=int, default=1, help="seed of every draw")
    parser.add_argument("--setup-seconds", type=float, default=0.0, help="what was spent before this, for the table")
    arguments = parser.parse_args(argv)
    if arguments.steps is not None and arguments.steps < 1:
        parser.error(f"--steps {arguments.steps}: at least 1")
    os.chdir(ROOT)
    started = time.monotonic()
    run_dir = run_folder(arguments.steps, arguments.seed)
    command = launch_command(torch.cuda.device_count(), arguments.steps, arguments.seed)
    try:
        prepare()
        if run_dir.exists():
            say(f"replacing the earlier run in {run_dir}")
            shutil.rmtree(run_dir)
        say(f"training: {' '.join(command)}")
        setup_seconds = arguments.setup_seconds + time.monotonic() - started
        started = time.monotonic()
        train(command)
    except subprocess.CalledProcessError as error:
        print(f"error: {Path(error.cmd[0]).name} ended with status {error.returncode}; see above", file=sys.stderr)
        return 1
    table = result_table(
        run_dir,
        OUT / "data" / "val.parquet",
        train_seconds=time.monotonic() - started,
        setup_seconds=setup_seconds,
    )
    Console().print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
