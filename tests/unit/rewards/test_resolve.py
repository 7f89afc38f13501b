"""How a reward function is named, and what is said when it cannot be used."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from verl.rewards.auto import BUILT_IN, auto
from verl.rewards.resolve import FunctionSpec, resolve

SAMPLE: dict[str, Any] = {"data_source": "d", "solution_str": "s", "ground_truth": "g", "extra_info": {"e": 1}}

GOOD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return (data_source, solution_str, ground_truth, extra_info)

def weighted(data_source, solution_str, ground_truth, extra_info=None, weight=1.0, *, bonus=0.0):
    return weight + bonus

def anything(**arguments):
    return sorted(arguments)

def in_another_order(extra_info, ground_truth, solution_str, data_source):
    return (data_source, solution_str, ground_truth, extra_info)

class Scorer:
    def __call__(self, data_source, solution_str, ground_truth, extra_info=None):
        return 1.0

scorer = Scorer()
number = 3

def too_few(solution_str, ground_truth):
    return 1.0

def too_many(data_source, solution_str, ground_truth, extra_info, judge):
    return 1.0

async def later(data_source, solution_str, ground_truth, extra_info=None):
    return 1.0
"""


@pytest.fixture(autouse=True)
def _the_path_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "my_reward.py"
    path.write_text(GOOD)
    return str(path)


@pytest.mark.parametrize("name", ["compute_score", "in_another_order"])
def test_a_function_of_a_file(file: str, name: str) -> None:
    assert resolve(FunctionSpec(f"{file}:{name}"))(**SAMPLE) == ("d", "s", "g", {"e": 1})


def test_a_callable_object_and_catch_all_arguments(file: str) -> None:
    assert resolve(FunctionSpec(f"{file}:scorer"))(**SAMPLE) == 1.0
    assert resolve(FunctionSpec(f"{file}:anything", {"more": 1}))(**SAMPLE) == sorted([*SAMPLE, "more"])


def test_kwargs_are_added(file: str) -> None:
    assert resolve(FunctionSpec(f"{file}:weighted", {"weight": 2.0, "bonus": 0.5}))(**SAMPLE) == 2.5


def test_a_relative_path(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(file).parent)
    assert resolve(FunctionSpec("my_reward.py:weighted"))(**SAMPLE) == 1.0


def test_a_function_of_a_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_package").mkdir()
    (tmp_path / "my_package" / "__init__.py").write_text("")
    (tmp_path / "my_package" / "scores.py").write_text(GOOD)
    monkeypatch.syspath_prepend(tmp_path)
    assert resolve(FunctionSpec("my_package.scores:weighted"))(**SAMPLE) == 1.0


def test_a_file_imports_its_neighbours_and_shadows_nothing(tmp_path: Path) -> None:
    (tmp_path / "neighbour_of_reward.py").write_text("TEXT = 'from the neighbour'")
    (tmp_path / "json.py").write_text("raise ImportError('the wrong json')")
    (tmp_path / "uses.py").write_text(
        "import json\nfrom neighbour_of_reward import TEXT\n"
        "def f(data_source, solution_str, ground_truth, extra_info=None): return json.dumps(TEXT)"
    )
    assert resolve(FunctionSpec(f"{tmp_path}/uses.py:f"))(**SAMPLE) == '"from the neighbour"'


def test_dataclasses_of_a_file_find_their_module(tmp_path: Path) -> None:
    (tmp_path / "records.py").write_text(
        "from __future__ import annotations\nfrom dataclasses import dataclass\nfrom typing import ClassVar\n"
        "@dataclass\nclass R:\n    n: ClassVar[int] = 1\n"
        "def f(data_source, solution_str, ground_truth, extra_info=None): return R().n"
    )
    assert resolve(FunctionSpec(f"{tmp_path}/records.py:f"))(**SAMPLE) == 1


def test_built_in_names() -> None:
    assert resolve(FunctionSpec("auto")).func is auto  # pyright: ignore[reportFunctionMemberAccess]
    for name in BUILT_IN:
        if name != "reasoning_gym":
            assert resolve(FunctionSpec(name)).func is BUILT_IN[name]  # pyright: ignore[reportFunctionMemberAccess]
    assert resolve(FunctionSpec("gsm8k", {"strict": True}))("d", "it is 4", "4") == 0.0


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("gsm9k", r"no built-in reward function; those are auto, exact_match, .*file\.py:name"),
        ("", "no built-in"),
        ("reward.py", r"add the function: reward\.py:compute_score"),
        (":f", "write file.py:name"),
        ("reward.py:", "write file.py:name"),
        ("/nowhere/reward.py:f", r"there is no file /nowhere/reward\.py"),
        ("no_such_package.scores:f", "there is no module 'no_such_package'.*name the file"),
        ("json.no_such_part:f", r"there is no module 'json\.no_such_part'"),
        ("{file}:score", r"has no 'score'; its functions are compute_score, weighted"),
        ("{file}:number", "is int 3, not a function"),
        ("{file}:later", "async"),
        ("{file}:too_few", r"unexpected keyword argument 'data_source'.*define it as compute_score\(data_source, "),
        ("{file}:too_many", "missing a required argument: 'judge'"),
    ],
)
def test_what_cannot_be_used(file: str, path: str, said: str) -> None:
    with pytest.raises(ValueError, match=f"(?s){said}"):
        resolve(FunctionSpec(path.replace("{file}", file)))


def test_kwargs_that_the_function_does_not_take(file: str) -> None:
    with pytest.raises(ValueError, match=r"unexpected keyword argument 'weigth'.*extra_info, weigth=\.\.\.\)"):
        resolve(FunctionSpec(f"{file}:weighted", {"weigth": 2.0}))
    with pytest.raises(ValueError, match=r"kwargs holds ground_truth, which each sample brings itself"):
        resolve(FunctionSpec(f"{file}:weighted", {"ground_truth": 2.0}))


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("1 / 0", r"line 1, in <module>.*ZeroDivisionError"),
        ("def f(:", "SyntaxError"),
        ("import no_such_module_here", "No module named 'no_such_module_here'"),
        ("raise SystemExit(3)", "SystemExit: 3"),
    ],
)
def test_a_file_that_cannot_be_imported(tmp_path: Path, code: str, said: str) -> None:
    (tmp_path / "broken.py").write_text(code)
    with pytest.raises(ValueError, match=rf"(?s)broken\.py raised while it was imported:.*{said}"):
        resolve(FunctionSpec(f"{tmp_path}/broken.py:f"))


def test_a_file_that_is_not_python(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(ValueError, match=r"its name must end in \.py"):
        resolve(FunctionSpec(f"{tmp_path}/notes.txt:f"))
