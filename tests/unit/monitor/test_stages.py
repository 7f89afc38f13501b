import json
import os
import subprocess
import sys
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl.monitor.metrics import Metrics
from verl.monitor.stages import Span, Stages, timings
from verl.monitor.timeline import Timeline, chrome_trace, overlap, read_timeline


def test_listeners_hear_where_the_process_is():
    heard = []
    stages = Stages([heard.append])
    with stages("step"):
        with stages("gen", role="rollout"):
            pass
        with stages("values", role="critic"):
            pass
    assert heard == ["step", "gen", "step", "values", "step", None]
    assert [(span.name, span.role) for span in stages.drain()] == [
        ("gen", "rollout"),
        ("values", "critic"),
        ("step", None),
    ]
    assert stages.drain() == []


def test_a_failure_leaves_the_listeners_at_the_stage_that_failed():
    heard = []
    stages = Stages([heard.append])
    with pytest.raises(RuntimeError, match="boom"), stages("step"), stages("gen"):
        raise RuntimeError("boom")
    assert heard == ["step", "gen"]
    assert [span.name for span in stages.drain()] == ["gen", "step"]
    with stages("save"):
        assert heard[-1] == "save"
    assert heard[-1] is None


def test_spans_measure_and_lie_inside_each_other():
    stages = Stages()
    before = time.time()
    with stages("step"), stages("gen"):
        time.sleep(0.05)
    inner, outer = stages.drain()
    assert 0.05 <= inner.end - inner.start < 100
    assert before - 0.01 <= outer.start <= inner.start <= inner.end <= outer.end <= time.time() + 0.01


def test_a_step_back_of_the_wall_clock_does_not_reach_the_spans(monkeypatch):
    stages = Stages()
    monkeypatch.setattr(time, "time", lambda: 0.0)
    with stages("gen"):
        pass
    (span,) = stages.drain()
    assert span.end >= span.start > 1e9


def test_timelines_of_two_processes_line_up():
    """The child's span, on its own clock anchor, lies inside the parent's wait for it."""
    program = (
        "import json, time; from verl.monitor.stages import Stages; s = Stages();\n"
        "with s('child'): time.sleep(0.05)\n"
        "(x,) = s.drain(); print(json.dumps([x.start, x.end]))"
    )
    stages = Stages()
    with stages("parent"):
        done = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, check=True, timeout=300, env=os.environ
        )
    (parent,) = stages.drain()
    start, end = json.loads(done.stdout)
    assert parent.start < start < end < parent.end
    assert overlap([parent], [Span("child", start, end)]) == pytest.approx(end - start, abs=1e-5)


def test_timings_add_visits_and_take_the_slowest_rank():
    rank0 = timings([Span("gen", 0.0, 2.0), Span("gen", 3.0, 4.0), Span("values", 0.0, 0.5)])
    rank1 = timings([Span("gen", 0.0, 2.5), Span("values", 0.0, 0.75)])
    assert Metrics.merge([rank0, rank1]).result() == {"timing_s/gen": 3.0, "timing_s/values": 0.75}


spans = st.lists(
    st.tuples(st.integers(0, 30), st.integers(0, 10)).map(lambda p: Span("s", p[0], p[0] + p[1])), max_size=6
)


@given(spans, spans)
def test_overlap_counts_the_seconds_that_both_sides_run(a, b):
    def seconds(side):
        return {second for span in side for second in range(int(span.start), int(span.end))}

    assert overlap(a, b) == len(seconds(a) & seconds(b)) == overlap(b, a)


def test_timeline_round_trip_and_chrome_trace(tmp_path):
    first = [Span("gen", 100.5, 102.0, "rollout"), Span("step", 100.0, 103.0)]
    second = [Span("values", 101.0, 101.25, "critic")]
    for rank, done in enumerate((first, second)):
        timeline = Timeline(tmp_path, rank)
        timeline.log(1, done)
        timeline.log(2, [Span("gen", 200.0, 201.0)])
        timeline.close()
    assert read_timeline(tmp_path, step=1) == {0: first, 1: second}
    assert len(read_timeline(tmp_path)[1]) == 2

    events = json.loads(chrome_trace(tmp_path).read_text())["traceEvents"]
    assert {"ph": "M", "name": "process_name", "pid": 1, "tid": 0, "args": {"name": "rank 1"}} in events
    gen, values = (
        next(e for e in events if e["ph"] == "X" and e["name"] == name and e["args"]["step"] == 1)
        for name in ("gen", "values")
    )
    assert (gen["ts"], gen["dur"], gen["pid"], gen["cat"]) == (0.5e6, 1.5e6, 0, "rollout")
    assert (values["ts"], values["dur"], values["pid"]) == (1e6, 0.25e6, 1)


def test_a_resumed_timeline_forgets_the_steps_that_come_again(tmp_path):
    timeline = Timeline(tmp_path, 0)
    for step in (1, 2, 3):
        timeline.log(step, [Span("gen", step, step + 0.5)])
    timeline.close()
    resumed = Timeline(tmp_path, 0, first_step=3)
    resumed.log(3, [Span("gen", 30.0, 31.0)])
    resumed.close()
    assert [span.start for span in read_timeline(tmp_path)[0]] == [1, 2, 30.0]


def test_without_a_timeline_the_trace_says_how_to_get_one(tmp_path):
    with pytest.raises(ValueError, match=r"debug\.timeline=true"):
        chrome_trace(tmp_path)
