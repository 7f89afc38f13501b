import json
import math
import os
import signal
import subprocess
import sys
import time

import pytest

from verl.monitor.jsonl import read_jsonl, write_jsonl
from verl.monitor.log import LoggedSample, MetricsLog, SampleLog


def lines(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n")[:-1]]


def test_a_line_is_there_as_soon_as_it_is_logged(tmp_path):
    log = MetricsLog(tmp_path / "new" / "run")
    log.log(1, {"actor/lr": 0.1, "actor/grad_norm": math.nan, "critic/score/mean": 1 / 3})
    (line,) = lines(tmp_path / "new" / "run" / "metrics.jsonl")
    assert line.pop("time") == pytest.approx(time.time(), abs=300)
    assert line == {"step": 1, "actor/lr": 0.1, "actor/grad_norm": None, "critic/score/mean": 1 / 3}
    log.close()


def test_resume_drops_the_steps_that_come_again(tmp_path):
    log = MetricsLog(tmp_path)
    for step in (0, 1, 2, 2, 3):
        log.log(step, {"x": float(step)})
    log.close()
    resumed = MetricsLog(tmp_path, first_step=2)
    assert [line["step"] for line in lines(tmp_path / "metrics.jsonl")] == [0, 1]
    resumed.log(2, {"x": 20.0})
    resumed.close()
    assert [(line["step"], line["x"]) for line in lines(tmp_path / "metrics.jsonl")] == [(0, 0.0), (1, 1.0), (2, 20.0)]
    assert os.listdir(tmp_path) == ["metrics.jsonl"]


@pytest.mark.parametrize("torn", [b'{"step": 3, "ti', '{"step": 3, "t": "é'.encode()[:-1], b"\x00\x00\x00"])
def test_a_torn_last_line_is_left_out_and_resumed_over(tmp_path, torn):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1, "time": 1.0}\n{"step": 2, "time": 2.0}\n' + torn)
    assert [row["step"] for row in read_jsonl(path)] == [1, 2]
    log = MetricsLog(tmp_path, first_step=3)
    log.log(3, {})
    log.close()
    assert [line["step"] for line in lines(path)] == [1, 2, 3]


def test_a_broken_line_elsewhere_is_named(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\nnot json\n{"step": 2}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl, line 2 is not JSON .*not json"):
        read_jsonl(path)


def test_a_writer_killed_at_any_moment_leaves_a_whole_file(tmp_path):
    """The file is rewritten over and over while SIGKILL falls: readers find either version, never a part of one."""
    path = tmp_path / "metrics.jsonl"
    write_jsonl(path, [{"step": 0}] * 2000)
    program = (
        "import sys; from pathlib import Path; from verl.monitor.jsonl import write_jsonl\n"
        "print('go', flush=True)\n"
        "for i in range(10**9): write_jsonl(Path(sys.argv[1]), [{'step': i}] * 2000)"
    )
    for delay in (0.0, 0.013, 0.047):
        writer = subprocess.Popen([sys.executable, "-c", program, str(path)], stdout=subprocess.PIPE)
        assert writer.stdout and writer.stdout.readline() == b"go\n"
        with pytest.raises(subprocess.TimeoutExpired):
            writer.wait(delay)
        writer.send_signal(signal.SIGKILL)
        writer.wait(100)
        writer.stdout.close()
        rows = read_jsonl(path)
        assert len(rows) == 2000 and len({row["step"] for row in rows}) == 1


def test_samples_are_readable_and_replaced_by_another_attempt(tmp_path):
    samples = SampleLog(tmp_path)
    samples.log(7, [LoggedSample("old", "old", 0.0, None)] * 3)
    odd = "naïve 数\u2028line\nnew \ud800 \x00"
    samples.log(7, [LoggedSample("2+2?", odd, 1.0, {"answer": "4"}), LoggedSample("a", "b", math.nan, {1})])
    path = tmp_path / "samples" / "step_7.jsonl"
    first, second = lines(path)
    assert first == {"prompt": "2+2?", "response": odd, "score": 1.0, "ground_truth": {"answer": "4"}}
    assert second["score"] is None and second["ground_truth"] == "{1}"
    assert "naïve 数" in path.read_text(encoding="utf-8")
    assert read_jsonl(path) == [first, second]
