"""The end of a process by itself; with its parent and with all its descendants: tests/unit/rewards and tests/e2e."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run(script: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300, cwd=ROOT)


@pytest.mark.parametrize("code", [0, 2])
def test_the_exit_code_the_output_the_threads_and_the_handlers_are_as_with_sys_exit(code):
    done = run(f"""
import atexit, threading, time
from verl.processes import exit_with

def main():
    atexit.register(lambda: print("handler", end=" "))
    threading.Thread(target=lambda: (time.sleep(0.3), print("thread", end=" "))).start()
    print("main", end=" ")
    return {code}

exit_with(main)
""")
    assert (done.returncode, done.stdout.split(), done.stderr) == (code, ["main", "thread", "handler"], "")


@pytest.mark.parametrize(("leaving", "code"), [("raise SystemExit(143)", 143), ("raise KeyError('gone')", 1)])
def test_an_exception_ends_the_process_as_ever(leaving, code):
    done = run(f"""
from verl.processes import exit_with

def main():
    {leaving}

exit_with(main)
""")
    assert done.returncode == code and ("KeyError: 'gone'" in done.stderr) == (code == 1)


def test_a_thread_in_a_call_of_torch_does_not_abort_a_process_that_is_done():
    """Its call ends in the midst of finalisation, which the object that takes long to go draws out."""
    done = run("""
import datetime, threading, time
import torch.distributed as dist
from verl.processes import exit_with

class SlowToGo:
    def __del__(self, sleep=time.sleep):  # by then the module's names are None
        sleep(3)

slow, store = SlowToGo(), dist.TCPStore("127.0.0.1", 0, is_master=True)
started = threading.Event()

def wait():
    started.set()
    try:
        store.wait(["never"], datetime.timedelta(seconds=1))
    except dist.DistStoreError:
        pass

def main():
    threading.Thread(target=wait, daemon=True).start()
    started.wait()
    return 0

exit_with(main)
""")
    assert (done.returncode, done.stderr) == (0, "")
