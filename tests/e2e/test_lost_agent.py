"""`kill -9` of torchrun's agent in the middle of a step: its ranks say so and end, with all that they started."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest

from tests.support.jobs import started, wait_until
from tests.support.runs import Task

pytestmark = [pytest.mark.dist, pytest.mark.timeout(900)]

START = 400.0
"""Seconds that a busy machine may need for anything."""
SLOW = "import subprocess\ndef compute_score(**_):\n    subprocess.run(['setsid', 'sleep', '1000'])\n    return 0.0\n"
"""A reward function that waits for a program which it has started, in a session of its own."""


@pytest.mark.parametrize("ranks", [2, pytest.param(1, marks=pytest.mark.slow)])
def test_ranks_whose_agent_is_killed_end_with_all_that_they_started(ranks: int, tmp_path: Path) -> None:
    task = Task.make(tmp_path, num_prompts=8)
    (tmp_path / "slow.py").write_text(SLOW)
    devices = list(range(ranks))
    mesh = {role: {"devices": devices, "dtype": "float32"} for role in ("actor", "critic", "rollout")}
    config = task.config("run", data__train_batch_size=2, trainer__progress=False)
    config.device_mesh = {**mesh, "rollout": {**mesh["rollout"], "backend": "torch"}}
    config.reward.function.path, config.reward.function.timeout = f"{tmp_path / 'slow.py'}:compute_score", 1000.0
    with started(config, tmp_path / "job", ranks=ranks) as job:
        wait_until(
            lambda: bool(job.find("sleep 1000")) or job.process.poll() is not None, START, lambda: job.stderr[-3000:]
        )
        assert len(job.find("train_ppo.py")) == 1 + ranks, job.stderr[-3000:]  # the agent, too
        job.process.send_signal(signal.SIGKILL)
        job.assert_nothing_left(START)
        said = re.findall(r"verl: rank (\d) ends: torchrun's agent \(process (\d+)\)", job.stderr)
    # of two ranks one may lose the other as its peer before it sees that the agent is gone
    assert said and {int(agent) for _, agent in said} == {job.process.pid}, job.stderr[-3000:]
