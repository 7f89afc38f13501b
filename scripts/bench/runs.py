"""Whole runs for the benchmarks: prompts, a launch by torchrun, and what each step took."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml
from transformers import AutoTokenizer

from scripts.bench.common import ROOT
from verl.monitor.jsonl import read_jsonl, write_jsonl
from verl.monitor.log import METRICS_FILE

STOP_SECONDS = 90.0
"""For torchrun to stop its ranks; it gives them 30."""

Messages = list[dict[str, str]]


def write_prompts(path: Path, prompts: Sequence[Messages]) -> Path:
    """A data set of chat prompts whose responses are scored by a model, or alike whatever they are."""
    write_jsonl(
        path,
        [
            {
                "data_source": "bench",
                "prompt": prompt,
                "reward_model": {"style": "rule", "ground_truth": "0"},
                "extra_info": {"index": index},
            }
            for index, prompt in enumerate(prompts)
        ],
    )
    return path


def longest(folder: Path, prompts: Sequence[Messages]) -> int:
    """Tokens of the longest prompt, with the chat template of the model in `folder`."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = [tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True) for prompt in prompts]
    return max(len(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in texts)


def launch(run_dir: Path, mesh: Mapping[str, Any], num_processes: int, settings: Mapping[str, Any]) -> Path:
    """A run of train_ppo.py from the beginning, in `run_dir`, with one thread a rank. Returns the folder.

    `settings`: by dotted name. Its output goes to run.log.
    """
    shutil.rmtree(run_dir, ignore_errors=True)
    run_dir.mkdir(parents=True)
    mesh_file = run_dir / "device_mesh.yaml"
    mesh_file.write_text(yaml.safe_dump(dict(mesh), sort_keys=False))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={num_processes}"]
    command += ["train_ppo.py", *train_arguments(run_dir, mesh_file, settings)]
    run_command(command, run_dir / "run.log", {"OMP_NUM_THREADS": "1"})
    return run_dir


def train_arguments(run_dir: Path, mesh_file: Path, settings: Mapping[str, Any]) -> list[str]:
    """Of train_ppo.py. Validation, checkpoints, trackers and progress are off."""
    quiet = {
        "data.val_files": [],
        "trainer.val_before_train": False,
        "trainer.save_freq": -1,
        "trainer.resume": "never",
        "trainer.trackers": [],
        "trainer.progress": False,
        "trainer.run_dir": str(run_dir),
    }
    return [
        "--device_mesh",
        str(mesh_file),
        *(f"{name}={_value(value)}" for name, value in (quiet | dict(settings)).items()),
    ]


def run_command(command: Sequence[str | Path], log_path: Path, environment: Mapping[str, str]) -> None:
    """Runs it in the root with its output in a file, and shows the file's end if it fails."""
    log_path.parent.mkdir(parents=True, exist_ok=True)
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, "HF_HUB_OFFLINE": "1", **environment},
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        try:
            status = process.wait()
        finally:  # torchrun stops its ranks on SIGTERM; killed, it would leave them behind
            process.terminate()
            process.wait(STOP_SECONDS)
            signal.signal(signal.SIGTERM, before)
    if status != 0:
        tail = "\n".join(log_path.read_text(errors="replace").splitlines()[-30:])
        raise SystemExit(f"error: {Path(command[0]).name} ended with status {status}. The end of {log_path}:\n{tail}")


def _value(value: Any) -> str:
    """As the command line takes it: JSON, but for strings, which are quoted only where they are no plain word."""
    return "null" if value is None else value if isinstance(value, str) else json.dumps(value)


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    """The lines of the run's training steps, in order."""
    return read_jsonl(run_dir / METRICS_FILE)


def step_seconds(lines: Sequence[Mapping[str, Any]]) -> list[float]:
    """From the end of each step to the end of the next one, so that what lies between steps counts too.

    The first step, in which memory is taken and caches are filled, is thereby left out.
    """
    ends = [line["time"] for line in lines]
    return [end - start for start, end in pairwise(ends)]
