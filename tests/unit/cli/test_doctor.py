"""`verl doctor` as a user calls it, on this machine."""

from __future__ import annotations

import json
import platform
import socket
from pathlib import Path

import pytest

from verl.cli.main import main

RUN = ["data.train_files=[train.jsonl]", "model.path=/nowhere/model"]


def test_it_shows_this_node(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    said = capsys.readouterr().out
    lines = dict(line.split(maxsplit=1) for line in said.splitlines() if line)
    assert lines["host"].startswith(socket.gethostname())
    assert lines["python"] == platform.python_version()
    assert lines["memory"].count("GiB") >= 2 and "/dev/shm" in lines
    assert said.endswith("Nothing here would keep a run from working.\n")


def test_it_shows_what_a_run_would_miss(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parent)
    assert main(["doctor", *RUN]) == 2
    said = capsys.readouterr().out
    assert "  model.path: missing; should be there\n    copy it to this node, or change the setting" in said
    assert "  data.train_files: train.jsonl: missing; should be there" in said


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json", *RUN]) == 2
    told = json.loads(capsys.readouterr().out)
    assert told["facts"]["versions"]["python"] == platform.python_version()
    assert "model.path" in {problem["what"] for problem in told["problems"]}


def test_arguments_that_no_run_would_take(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "actor.lrr=1"]) == 2
    assert "actor.lrr" in capsys.readouterr().err
