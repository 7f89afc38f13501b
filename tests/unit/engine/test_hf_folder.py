from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from verl.engine.hf_folder import check_free, copy_companions, plan_files, written_config
from verl.errors import UserError

sizes = st.dictionaries(st.text(min_size=1, max_size=3), st.integers(1, 50), min_size=1, max_size=12)


@given(sizes, st.integers(1, 60))
def test_every_tensor_is_in_one_file_and_no_file_is_too_large(sizes: dict[str, int], limit: int) -> None:
    files = plan_files(sizes, limit)
    assert [name for names in files.values() for name in names] == list(sizes)
    for names in files.values():
        assert len(names) == 1 or sum(sizes[name] for name in names) <= limit
    for one, next_one in zip(list(files.values()), list(files.values())[1:], strict=False):
        assert sum(sizes[name] for name in one) + sizes[next_one[0]] > limit, "the next would have fitted"


def test_files_are_named_as_transformers_names_them() -> None:
    assert list(plan_files({"a": 2, "b": 2}, 4)) == ["model.safetensors"]
    assert plan_files({"a": 2, "b": 2, "c": 3}, 4) == {
        "model-00001-of-00002.safetensors": ["a", "b"],
        "model-00002-of-00002.safetensors": ["c"],
    }


def test_only_a_models_folder_is_replaced(tmp_path: Path) -> None:
    out = tmp_path / "out"
    check_free(out, replace=False)
    out.mkdir()
    check_free(out, replace=True)  # empty
    (out / "thesis.tex").write_text("precious")
    file = tmp_path / "file"
    file.write_text("precious")
    for other in (out, file):
        with pytest.raises(UserError, match=rf"{other} exists already"):
            check_free(other, replace=False)
        with pytest.raises(UserError, match=rf"{other} is to be replaced and is no model's folder \(config\.json or"):
            check_free(other, replace=True)
    (out / "adapter_config.json").write_text("{}")
    check_free(out, replace=True)


CONFIG = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "torch_dtype": "float32", "rope_theta": 1e4}


def test_a_language_models_config() -> None:
    assert written_config(CONFIG, False, torch.bfloat16) == {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "rope_theta": 1e4,
        "dtype": "bfloat16",
    }


def test_a_classifiers_config_has_one_label_whatever_it_had_before() -> None:
    many = CONFIG | {"num_labels": 5, "id2label": {"0": "bad", "1": "good"}, "label2id": {"bad": 0, "good": 1}}
    written = written_config(many, True, torch.float32)
    assert written["architectures"] == ["LlamaForSequenceClassification"]
    assert written["id2label"] == {"0": "LABEL_0"} and written["label2id"] == {"LABEL_0": 0}
    assert "num_labels" not in written


def test_a_model_with_code_of_its_own_keeps_its_class() -> None:
    config = {"model_type": "my_own", "architectures": ["MyOwnLM"]}
    assert written_config(config, False, torch.float32)["architectures"] == ["MyOwnLM"]
    with pytest.raises(UserError, match="'my_own'"):
        written_config(config, True, torch.float32)


def test_the_tokenizer_of_another_folder_comes_with_the_models_configs(tmp_path: Path) -> None:
    model, tokenizer = tmp_path / "model", tmp_path / "tokenizer"
    for folder, files in (
        (model, ["config.json", "tokenizer.json", "model.safetensors", "model.safetensors.index.json", "modeling.py"]),
        (tokenizer, ["config.json", "generation_config.json", "tokenizer.json", "chat_template.jinja", "merges.txt"]),
    ):
        folder.mkdir()
        for name in files:
            (folder / name).write_text(json.dumps(folder.name))
    copy_companions(model, tmp_path / "plain")
    assert {path.name for path in (tmp_path / "plain").iterdir()} == {"config.json", "tokenizer.json", "modeling.py"}
    copy_companions(model, tmp_path / "both", tokenizer)
    origins = {path.name: json.loads(path.read_text()) for path in (tmp_path / "both").iterdir()}
    assert origins == {
        "config.json": "model",
        "modeling.py": "model",
        "tokenizer.json": "tokenizer",
        "chat_template.jinja": "tokenizer",
        "merges.txt": "tokenizer",
    }
