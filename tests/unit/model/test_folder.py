from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from verl.errors import UserError
from verl.model.folder import architecture, local_folder


def test_a_folder_is_itself(folder: Callable[..., Path]) -> None:
    path = folder("qwen3")
    assert local_folder(str(path), "model.path", fetch=False) == path
    assert architecture(path) == "Qwen3ForCausalLM"


def test_a_home_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    assert local_folder("~", "model.path", fetch=False) == tmp_path
    assert architecture(tmp_path) == ""


def test_a_folder_without_a_config(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"critic\.path: the folder '.*' holds no config\.json"):
        local_folder(str(tmp_path), "critic.path", fetch=False)


@pytest.mark.parametrize("path", ["models/deep/er", "./nothing", "/nothing/at/all", "nothing"])
def test_a_path_that_is_no_hub_id_is_not_asked_for(path: str) -> None:
    with pytest.raises(UserError, match=r"model\.path: no model folder at '.*' \(looked in /.*Set the path to"):
        local_folder(path, "model.path", fetch=True)


@pytest.mark.parametrize("path", ["nobody/nothing", "no body/nothing?"])
def test_a_hub_id_that_is_not_to_be_had(path: str) -> None:
    with pytest.raises(UserError, match=r"model\.path: '.*' is neither a folder here .* nor to be had from the hub"):
        local_folder(path, "model.path", fetch=False)
