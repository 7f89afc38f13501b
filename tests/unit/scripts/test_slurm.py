"""scripts/slurm/train.sbatch as far as it needs no Slurm; tests/cluster/test_slurm.py has the rest."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

SBATCH = Path(__file__).resolve().parents[3] / "scripts" / "slurm" / "train.sbatch"


def test_bash_can_read_it() -> None:
    subprocess.run(["bash", "-n", SBATCH], check=True)


def test_submitted_from_elsewhere_it_says_from_where(tmp_path: Path) -> None:
    environment = {"PATH": os.environ["PATH"], "SLURM_SUBMIT_DIR": str(tmp_path)}
    done = subprocess.run(["bash", SBATCH], env=environment, capture_output=True, text=True)
    assert done.returncode == 2
    assert f"{tmp_path}/.venv/bin/python" in done.stderr and "submit it from the checkout" in done.stderr
