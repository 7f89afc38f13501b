"""The benchmarks' arithmetic, tables and command lines. Nothing is measured here."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from scripts.bench import checkpoint, common, generation, layouts, memory, overlap, ppo_step, reshard, runs, training
from scripts.bench.common import Table, by_turns, figure, ratio
from scripts.bench.critical_path import NEEDS, critical_path
from scripts.make_tiny_model import make_tiny_model
from verl.cli.command_line import load
from verl.config import PPOConfig
from verl.mesh.spec import MeshSpec
from verl.monitor.stages import Span

BENCHMARKS = (training, generation, reshard, overlap, ppo_step, memory, checkpoint, layouts)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("bench") / "model", num_layers=1)


@pytest.fixture
def out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for module in (common, *BENCHMARKS):
        monkeypatch.setattr(module, "OUT", tmp_path, raising=False)
    return tmp_path


# -- measuring and tables ----------------------------------------------------------------------------------------------


def test_sides_take_turns_and_the_warm_up_does_not_count() -> None:
    order: list[str] = []

    def side(name: str) -> float:
        order.append(name)
        return float(len(order))

    measured = by_turns({"a": lambda: side("a"), "b": lambda: side("b")}, repetitions=2, warm_up=1)
    assert order == ["a", "b"] * 3
    assert measured == {"a": [3.0, 5.0], "b": [4.0, 6.0]}


def test_a_ratio_is_that_of_the_medians() -> None:
    assert ratio([1.0, 30.0, 2.0], [4.0, 8.0]) == pytest.approx(2 / 6)


@pytest.mark.parametrize(
    ("ours", "theirs", "expected"),
    [([9.0], [10.0], ["9", "10", "0.90", "0.9 met"]), ([8.9], [10.0], ["8.9", "10", "0.89", "0.9 missed"])],
)
def test_a_comparison_says_whether_the_target_is_met(
    ours: list[float], theirs: list[float], expected: list[str]
) -> None:
    table = Table("title", ("what", "ours", "theirs", "ratio", "target"))
    table.compare("case", ours, theirs, target=0.9)
    assert list(table.rows[0]) == ["case", *expected]


def test_the_verdict_is_of_the_ratio_itself_and_not_of_what_is_shown() -> None:
    table = Table("title", ("what", "ours", "theirs", "ratio", "target"))
    table.compare("case", [0.8999], [1.0], target=0.9)
    assert list(table.rows[0][3:]) == ["0.90", "0.9 missed"]


def test_columns_of_numbers_stand_to_the_right() -> None:
    table = Table("title", ("what", "n"), rows=[("long name", "1"), ("x", "1000")], notes=["a note"])
    assert table.text().splitlines() == [
        "title",
        "---------------",
        "what          n",
        "---------------",
        "long name     1",
        "x          1000",
        "---------------",
        "a note",
    ]


@pytest.mark.parametrize(
    ("value", "text"), [(12345.6, "12346"), (100.4, "100"), (99.96, "100"), (12.345, "12.3"), (0.04567, "0.0457")]
)
def test_figures_have_three_digits(value: float, text: str) -> None:
    assert figure(value) == text


def test_the_work_of_a_child_is_not_another_programs() -> None:
    """Half a second of work in a child that has been waited for; `cores` is at least what others did use."""
    before_busy, before_own = common._busy_seconds(), common._own_seconds()
    subprocess.run([sys.executable, "-c", "import time\nwhile time.process_time() < 0.5: pass"], check=True)
    # in ticks of a hundredth of a second, of user and system time each
    assert common._own_seconds() - before_own >= 0.45
    assert common._busy_seconds() - before_busy >= 0.4


# -- the critical path -------------------------------------------------------------------------------------------------


def spans(*stages: tuple[str, float, float]) -> list[Span]:
    return [Span(name, start, end) for name, start, end in stages]


def test_stages_of_one_rank_follow_each_other() -> None:
    timeline = {0: spans(("gen", 10.0, 12.0), ("old_log_prob", 15.0, 16.0), ("adv", 16.0, 16.5))}
    assert critical_path(timeline) == pytest.approx(3.5)  # the pause is no stage's


def test_ranks_work_at_the_same_time() -> None:
    """Log-probs beside values, which take longer, and the critic's update beside the actor's."""
    timeline = {
        0: spans(("gen", 0, 2), ("old_log_prob", 2, 3), ("update_actor", 5.7, 9.7), ("reshard", 9.7, 10.7)),
        1: spans(("values", 2.1, 5.1), ("adv", 5.1, 5.6), ("update_critic", 5.6, 6.6)),
    }
    assert critical_path(timeline) == pytest.approx(2 + 3 + 0.5 + 4 + 1)


def test_what_a_stage_waited_for_its_needs_is_no_work() -> None:
    """adv begins at 3 and has to wait for rank 0 until 6; reshard on rank 1 waits for the actor."""
    timeline = {
        0: spans(("gen", 0, 2), ("old_log_prob", 2, 6), ("update_actor", 7, 9), ("reshard", 9, 10)),
        1: spans(("values", 2, 3), ("adv", 3, 7), ("reshard", 7, 9.5)),
    }
    assert critical_path(timeline) == pytest.approx(2 + 4 + 1 + 2 + 1)


@given(
    st.lists(
        st.tuples(st.sampled_from(sorted(NEEDS)), st.floats(0.1, 5)), min_size=1, max_size=9, unique_by=lambda s: s[0]
    )
)
def test_one_rank_has_no_slack(stages: list[tuple[str, float]]) -> None:
    """Its stages fill its time, so that the longest chain is all of them."""
    now, made = 7.0, []
    for name, seconds in sorted(stages, key=lambda stage: list(NEEDS).index(stage[0])):
        made.append((name, now, now + seconds))
        now += seconds
    assert critical_path({0: spans(*made)}) == pytest.approx(now - 7.0)


def test_no_spans_are_no_time() -> None:
    assert critical_path({0: [], 1: []}) == 0.0


# -- layouts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stages", "virtual", "count", "share"), [(2, 1, 8, 1 / 9), (4, 1, 8, 3 / 11), (2, 2, 8, 1 / 17), (4, 2, 4, 3 / 11)]
)
def test_the_bubble_of_an_even_pipeline(stages: int, virtual: int, count: int, share: float) -> None:
    """Counted in the figures of arXiv:2104.04473: idle slots of all slots."""
    assert layouts.bubble(layouts.Layout("a pipeline", pp=stages, virtual=virtual), count) == pytest.approx(share)


def test_a_layout_s_row_is_its_tokens_by_the_cpu_time_of_all_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    work = layouts.make_work(8, vocab_size=100)
    assert work.num_tokens == 8 * 64 and len(work.micro_batches()) == 2
    chosen = [layouts.Layout("FSDP 2", dp=2), layouts.Layout("PP 1000", pp=1000)]
    costs = {
        layouts.PLAIN: [layouts.Cost(2.0, None, 2)],
        "FSDP 2": [layouts.Cost(s, None, 2) for s in (4.0, 2.5, 1.0)],
        "PP 1000": [layouts.Cost(4.0, 0.5, 2)],
    }
    (speeds,) = layouts.tables(work, chosen, costs)  # no machine has a core for each of that many ranks
    assert [list(row) for row in speeds.rows] == [
        [layouts.PLAIN, "1", "256", "1.00"],
        ["FSDP 2", "2", "205", "0.80"],
        ["PP 1000", "1000", "128", "0.50"],
    ]


# -- checkpoints -------------------------------------------------------------------------------------------------------


def test_what_a_save_costs_is_held_against_a_blocking_one() -> None:
    found = checkpoint.Figures(
        step=[1.0, 1.2, 1.1], blocking=[4.0, 5.0, 9.0], blocked=[0.2, 0.4, 0.3], lost=[0.5, -0.1, 0.25],
        written=[6.0, 7.0, 8.0], size=1_600_000_000,
    )  # fmt: skip
    table = checkpoint.table_of(found, num_ranks=2)
    assert [list(row) for row in table.rows] == [
        ["blocking: the step waits", "5", "100%", ""],
        ["in the background: the step waits", "0.3", "6%", "10% met"],
        ["the next steps lose, together", "0.25", "5%", ""],
        ["until it is published", "7", "140%", ""],
    ]
    assert "1600 MB" in table.title


# -- runs --------------------------------------------------------------------------------------------------------------


def test_a_step_lasts_from_the_end_of_the_last_one() -> None:
    assert runs.step_seconds([{"time": 100.0}, {"time": 103.0}, {"time": 104.5}]) == [3.0, 1.5]


def test_a_failed_command_shows_the_end_of_its_log(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"status 3(.|\n)*the reason"):
        runs.run_command(["bash", "-c", "echo the reason >&2; exit 3"], tmp_path / "log", {})


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("case", ppo_step.CASES, ids=lambda case: case.name)
def test_the_settings_of_a_ppo_step_are_settings(case: ppo_step.Case, recomputes: bool, model: Path, out: Path) -> None:
    prompts = case.prompts(32)
    contest = ppo_step.Contest(
        case,
        model,
        reward=model,
        prompts=runs.write_prompts(out / "prompts.jsonl", prompts),
        max_prompt=runs.longest(model, prompts),
        num_steps=2,
        python=Path("python"),
        mesh=ppo_step.MESH | (ppo_step.RECOMPUTES if recomputes else {}),
        recomputes=recomputes,
        lengths={},
    )
    config, mesh = load_settings(out, contest.settings(), contest.mesh)
    assert config.reward.function.path is None and config.reward.model.path == str(model)
    assert config.data.train_files == [str(out / "prompts.jsonl")]
    assert config.rollout.ignore_eos is not case.stops
    assert len(config.rollout.stop_token_ids) == case.stops
    assert config.trainer.total_training_steps == 2 and not config.trainer.val_before_train
    assert config.algorithm.recompute_old_logprobs is recomputes
    assert [device.index for device in mesh.roles["critic"].devices] == [1]
    assert [device.index for device in mesh.roles["reference"].devices] == ([1] if recomputes else [0, 1])


@pytest.mark.parametrize("num_ranks", sorted(overlap.DISJOINT))
@pytest.mark.parametrize("apart", [False, True])
def test_the_settings_of_a_placement_are_settings(num_ranks: int, apart: bool, model: Path, out: Path) -> None:
    devices = overlap.DISJOINT[num_ranks] if apart else overlap.colocated(num_ranks)
    config, mesh = load_settings(
        out, overlap.make_settings(model, num_steps=3, response_tokens=8), overlap.mesh_of(devices, "torch")
    )
    assert config.debug.timeline
    assert {device.index for role in mesh.roles.values() for device in role.devices} == set(range(num_ranks))


def load_settings(out: Path, settings: dict[str, Any], mesh: dict[str, dict[str, Any]]) -> tuple[PPOConfig, MeshSpec]:
    (out / "mesh.yaml").write_text(yaml.safe_dump(mesh))
    return load(runs.train_arguments(out / "run", out / "mesh.yaml", settings))


def test_prompts_of_the_ragged_case_differ_in_length(model: Path) -> None:
    ragged = {runs.longest(model, [prompt]) for prompt in ppo_step.CASES[1].prompts(32)}
    fixed = {runs.longest(model, [prompt]) for prompt in ppo_step.CASES[0].prompts(32)}
    assert len(fixed) == 1 < len(ragged) and max(ragged) > 3 * min(ragged)


# -- command lines -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("benchmark", BENCHMARKS, ids=lambda module: module.__name__)
def test_help_names_the_command(benchmark: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        benchmark.main(["--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert f"python -m {benchmark.__name__}" in shown and "--quick" in shown


@pytest.mark.parametrize("benchmark", BENCHMARKS, ids=lambda module: module.__name__)
def test_a_model_that_is_not_there_is_named(benchmark: ModuleType, out: Path) -> None:
    with pytest.raises(SystemExit, match=rf"no model in {out}/nowhere(.|\n)*prepare_model"):
        benchmark.main(["--model", str(out / "nowhere")])


@pytest.mark.parametrize(
    ("benchmark", "arguments"),
    [
        (training, ["--threads", "0"]),
        (training, ["--dtype", "float64"]),
        (generation, ["--mode", "fast"]),
        (generation, ["--repetitions", "0"]),
        (overlap, ["--steps", "1"]),
        (overlap, ["--ranks", "3"]),
        (ppo_step, ["--steps", "1"]),
        (ppo_step, ["--case", "other"]),
        (memory, ["--mesh", "other"]),
        (checkpoint, ["--ranks", "0"]),
        (layouts, ["--layouts", "PP 3"]),
    ],
)
def test_what_cannot_be_measured_is_refused(
    benchmark: ModuleType, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        benchmark.main(arguments)
    assert ended.value.code == 2
    assert f"argument {arguments[0]}" in capsys.readouterr().err


def test_make_bench_runs_each_of_them() -> None:
    script = (common.ROOT / "scripts" / "bench" / "run.sh").read_text()
    (line,) = [line for line in script.splitlines() if line.startswith("for bench in ")]
    named = line.removeprefix("for bench in ").removesuffix("; do").split()
    assert [importlib.import_module(f"scripts.bench.{name}") for name in named] == list(BENCHMARKS)
