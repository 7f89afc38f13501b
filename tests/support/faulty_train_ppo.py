"""train_ppo.py with a fault in it: VERL_TEST_FAULT holds a `Fault` as text. A script, for torchrun."""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import train_ppo
from tests.support.faults import Fault
from verl.processes import exit_with

if __name__ == "__main__":
    Fault.parse(os.environ["VERL_TEST_FAULT"]).install()
    exit_with(train_ppo.main)
