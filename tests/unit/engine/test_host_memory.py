"""Memory of tensors: freed, it stays with the process; it is asked for in large pages."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
SWITCH = Path("/sys/kernel/mm/transparent_hugepage/enabled")
PROGRAM = """
import resource, sys, torch
from verl.engine.host_memory import keep_freed_memory

if sys.argv[1] == "kept":
    keep_freed_memory()

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        torch.ones(16 << 20)  # 64 MiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

faults()
print(faults())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries are left alone")
def test_the_next_tensor_has_no_page_faults() -> None:
    def run(how: str) -> int:
        command = [sys.executable, "-c", PROGRAM, how]
        return int(subprocess.run(command, check=True, capture_output=True, text=True, timeout=300).stdout)

    assert run("given back") > 300  # ten times 64 MiB, in pages of 4 KiB or of 2 MiB
    assert run("kept") < 100


SCRIPT = """
from verl.engine.host_memory import ask_for_huge_pages
ask_for_huge_pages()
import torch
tensor = torch.ones(64 << 18)
middle = tensor.data_ptr() + tensor.nbytes // 2
inside = False
for line in open("/proc/self/smaps"):
    first, *others = line.split()
    if "-" in first and not first.endswith(":"):
        low, high = (int(end, 16) for end in first.split("-"))
        inside = low <= middle < high
    elif inside and first == "VmFlags:":
        print("hg" in others)  # advised: huge
"""


def asks(**environment: str) -> str:
    """Whether the memory of a tensor of 64 MiB is asked for in huge pages. How many come is the kernel's affair."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=300, cwd=ROOT, env=environment
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.skipif(not SWITCH.exists(), reason="this kernel has no huge pages")
def test_tensors_lie_in_huge_pages_unless_the_environment_says_otherwise():
    assert asks() == "True" and asks(THP_MEM_ALLOC_ENABLE="0") == "False"
