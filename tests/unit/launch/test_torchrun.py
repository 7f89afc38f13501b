"""torchrun's exit code, with real ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.jobs import started_command

pytestmark = [pytest.mark.dist, pytest.mark.timeout(500)]

RANKS = """
import os, sys, time
how, rank = sys.argv[1], os.environ["RANK"]
if how == "mistake" and rank == "1":
    print("m.yaml: what to do about it", file=sys.stderr)
    sys.exit(2)
if how == "bug" and rank == "1":
    from torch.distributed.elastic.multiprocessing.errors import record
    @record
    def main():
        raise KeyError("a bug of ours")
    main()
time.sleep(0 if how == "done" else 1000)
"""


@pytest.mark.parametrize(("how", "code"), [("done", 0), ("mistake", 2), ("bug", 1)])
def test_the_exit_code_tells_a_mistake_from_a_failure(how: str, code: int, tmp_path: Path) -> None:
    script = tmp_path / "ranks.py"
    script.write_text(RANKS)
    command = ["-P", "-m", "verl.launch.torchrun", "--standalone", "--nproc_per_node=2", str(script), how]
    with started_command(command, tmp_path / "job") as job:
        assert job.wait(400) == code
        if how == "mistake":
            assert "m.yaml: what to do about it" in job.stderr and "Traceback" not in job.stderr
        if how == "bug":
            assert "Root Cause" in job.stderr and "KeyError: 'a bug of ours'" in job.stderr
            assert "ChildFailedError" not in job.stderr
