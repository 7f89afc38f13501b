"""Freed memory stays with the process: the next tensor of its size has no page faults."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

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
