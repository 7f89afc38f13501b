import io
import json

import pytest
from rich.console import Console

from verl.monitor.log import LoggedSample, MetricsLog, SampleLog
from verl.monitor.names import throughput
from verl.monitor.summary import summarise


def write(run_dir, lines):
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_a_run_from_its_metrics(tmp_path):
    """300 tokens and 6 samples in 1 s, then 900 and 6 in 5 s: 200 tokens/s, not the mean of 300 and 180."""
    write(
        tmp_path,
        [
            {"step": 0, "time": 1000.0, "val/score/mean": 0.25},
            {"step": 1, "time": 1002.0, "critic/score/mean": 0.5, **throughput(300, 6, 1.0, 2)},
            {"step": 1, "time": 1003.0, "val/score/mean": 0.75},
            {
                "step": 2,
                "time": 1009.0,
                "critic/score/mean": 0.625,
                **throughput(900, 6, 5.0, 2),
                "actor/grad_norm": None,
            },
            {"step": 2, "time": 1060.0, "val/score/mean": 0.5},
        ],
    )
    SampleLog(tmp_path).log(1, [LoggedSample("p", "r", 1.0, "r")])
    summary = summarise(tmp_path)
    assert (summary.validation_first, summary.validation_last) == ((0, 0.25), (2, 0.5))
    assert summary.validation_best == (1, 0.75)
    assert (summary.train_first, summary.train_last) == ((1, 0.5), (2, 0.625))
    assert summary.steps == 2
    assert (summary.tokens_per_s, summary.samples_per_s) == (200.0, 2.0)
    assert summary.wall_time == 60.0
    assert summary.paths == {"metrics": tmp_path / "metrics.jsonl", "samples": tmp_path / "samples"}

    out = io.StringIO()
    Console(file=out, width=200).print(summary.table())
    shown = out.getvalue()
    for text in (
        "0.2500 (step 0)",
        "0.5000 (step 2)",
        "0.7500 (step 1)",
        "200.00",
        "0:01:00",
        str(tmp_path / "samples"),
    ):
        assert text in shown


def test_a_run_without_validation_or_speed(tmp_path):
    log = MetricsLog(tmp_path)
    log.log(1, {"critic/score/mean": float("nan")})
    log.close()
    summary = summarise(tmp_path)
    assert summary.validation_best is None and summary.train_first is None and summary.tokens_per_s is None
    assert summary.wall_time == 0.0
    Console(file=io.StringIO()).print(summary.table())


def test_a_folder_without_metrics_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"metrics\.jsonl is missing or empty"):
        summarise(tmp_path)
