"""Fingerprints of what a run reads, on real files."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from scripts.make_tiny_model import make_tiny_model
from verl.config import PPOConfig
from verl.preflight.files import fingerprints, model_sizes


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    make_tiny_model(folder / "model", num_layers=2)
    return folder


@pytest.fixture
def config(models: Path, tmp_path: Path) -> PPOConfig:
    shutil.copytree(models / "model", tmp_path / "model")
    (tmp_path / "reward.py").write_text("def compute_score(**_): return 1.0\n")
    (tmp_path / "train.jsonl").write_text("{}\n" * 1000)
    config = PPOConfig()
    config.model.path = str(tmp_path / "model")
    config.data.train_files = [str(tmp_path / "train.jsonl")]
    config.reward.function.path = f"{tmp_path}/reward.py:compute_score"
    return config


def edit(file: Path, old: str, new: str) -> None:
    assert old in file.read_text()
    file.write_text(file.read_text().replace(old, new, 1))


CHANGES: dict[str, tuple[Callable[[Path], object], set[str]]] = {
    "nothing": (lambda at: None, set()),
    "a date": (lambda at: (at / "reward.py").touch(), set()),
    "config": (lambda at: edit(at / "model/config.json", "llama", "lxama"), {"model.path (config)"}),
    "tokenizer": (lambda at: edit(at / "model/tokenizer.json", '"he"', '"hx"'), {"model.path (tokenizer)"}),
    "template": (lambda at: (at / "model/chat_template.jinja").write_text("x"), {"model.path (tokenizer)"}),
    "a part of the weights": (lambda at: (at / "model/model-2.safetensors").touch(), {"model.path (weights)"}),
    "reward": (lambda at: edit(at / "reward.py", "1.0", "2.0"), {"reward.function.path"}),
    "no reward": (lambda at: (at / "reward.py").unlink(), {"reward.function.path"}),
    "prompts": (lambda at: edit(at / "train.jsonl", "{}", "[]"), {"data.train_files"}),
    "no prompts": (lambda at: (at / "train.jsonl").unlink(), {"data.train_files"}),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_seen_where_it_is(change: str, config: PPOConfig, tmp_path: Path) -> None:
    before = fingerprints(config)
    do, names = CHANGES[change]
    do(tmp_path)
    after = fingerprints(config)
    assert {what.partition(":")[0] for what in before | after if before.get(what) != after.get(what)} == names


def test_a_folder_that_is_not_there_is_one_thing(config: PPOConfig) -> None:
    config.model.path = "/nowhere/model"
    found = fingerprints(config)
    assert {what: text for what, text in found.items() if what.startswith("model")} == {"model.path": None}
    assert model_sizes(config) == {}


def test_an_id_of_the_hub_that_is_not_in_the_cache_is_nobodys_fault(config: PPOConfig) -> None:
    config.model.path = "some-org/some-model-that-is-not-here"
    found = {what: text for what, text in fingerprints(config).items() if what.startswith("model")}
    assert found == {"model.path": "an id of the hub"}


def test_the_middle_of_a_large_file_is_not_read(config: PPOConfig, tmp_path: Path) -> None:
    file = tmp_path / "train.jsonl"
    with file.open("wb") as stream:
        stream.truncate(1 << 33)
    before = fingerprints(config)
    with file.open("r+b") as stream:
        stream.seek(-1, 2)
        stream.write(b"x")
    changed = {what for what, text in fingerprints(config).items() if before[what] != text}
    assert changed == {f"data.train_files: {file}"}


@pytest.mark.parametrize(
    ("path", "there"), [("verl.rewards.functions:gsm8k", True), ("json:loads", True), ("no.such:f", False)]
)
def test_a_module_is_found_without_running_it(path: str, there: bool, config: PPOConfig) -> None:
    config.reward.function.path = path
    assert (fingerprints(config)["reward.function.path"] is not None) == there


def test_a_module_that_raises_is_not_run(config: PPOConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "package_of_the_user").mkdir()
    for name in ("__init__", "scores"):
        (tmp_path / "package_of_the_user" / f"{name}.py").write_text("raise SystemExit(3)\n")
    monkeypatch.syspath_prepend(tmp_path)
    config.reward.function.path = "package_of_the_user.scores:f"
    assert fingerprints(config)["reward.function.path"] is not None


def test_parameters_are_counted_as_the_files_tell_it(config: PPOConfig) -> None:
    """Two layers, 64 wide, 8 heads and 4 key-value heads of 32, 320 words, nothing tied."""
    attention = 64 * 8 * 32 * 2 + 64 * 4 * 32 * 2
    layer = attention + 3 * 64 * 128 + 2 * 64
    sizes = model_sizes(config)
    assert sizes["actor"].parameters == 2 * layer + 2 * 320 * 64 + 64
    assert sizes["actor"].largest == 320 * 64
    assert set(sizes) == {"actor", "critic", "reference"}


def test_a_broken_file_has_no_size(config: PPOConfig, tmp_path: Path) -> None:
    (tmp_path / "model" / "model.safetensors").write_bytes(b"not at all")
    assert model_sizes(config) == {}
