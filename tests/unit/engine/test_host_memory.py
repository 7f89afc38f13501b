"""Memory of tensors, as the kernel tells of it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
SWITCH = Path("/sys/kernel/mm/transparent_hugepage/enabled")
SCRIPT = """
import re
from verl.engine.host_memory import ask_for_huge_pages
ask_for_huge_pages()
import torch
def huge():
    return int(re.search(r"AnonHugePages: +([0-9]+) kB", open("/proc/self/smaps_rollup").read())[1]) >> 10
before = huge()
tensor = torch.ones(64 << 18)
print(huge() - before)
"""


def grown_by(**environment: str) -> int:
    """MiB in huge pages that a tensor of 64 MiB has brought."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=300, cwd=ROOT, env=environment
    )
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


@pytest.mark.skipif(
    not SWITCH.exists() or "[madvise]" not in SWITCH.read_text(), reason="huge pages are not given on request here"
)
def test_tensors_lie_in_huge_pages_unless_the_environment_says_otherwise():
    assert grown_by() >= 32  # of what the kernel finds free; it need not have all
    assert grown_by(THP_MEM_ALLOC_ENABLE="0") == 0
