"""Tiny models are whole Hugging Face folders, the same for the same arguments."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from scripts.make_tiny_model import CONFIGS, make_tiny_model, make_tiny_reward_model, make_tokenizer

CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 12 * 11?"}]
TEXT_OF_CHAT = (
    "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWhat is 12 * 11?<|im_end|>\n<|im_start|>assistant\n"
)


def weight_names(folder: Path) -> set[str]:
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        return set(file.keys())


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("architecture", sorted(CONFIGS))
def test_a_folder_loads_without_a_gap(tmp_path: Path, architecture: str, tied: bool) -> None:
    folder = make_tiny_model(tmp_path / "model", architecture, tied=tied)
    model, loading = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(loading[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert model.config.num_attention_heads == 8
    assert model.config.num_hidden_layers == 4
    assert model.generation_config.eos_token_id == 2
    assert ("lm_head.weight" in weight_names(folder)) is not tied
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=False)
    assert tokenizer.decode(ids) == TEXT_OF_CHAT
    assert ids == make_tokenizer().apply_chat_template(CHAT, add_generation_prompt=True, return_dict=False)
    logits = model(torch.tensor([ids])).logits
    assert torch.isfinite(logits).all()
    assert 0.3 < logits.std() < 3  # neither flat nor one-hot


@pytest.mark.parametrize("architecture", sorted(CONFIGS))
def test_no_parameter_is_a_constant(tmp_path: Path, architecture: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(make_tiny_model(tmp_path, architecture))
    assert [name for name, parameter in model.named_parameters() if parameter.std() < 0.02] == []


def test_the_seed_decides_every_byte(tmp_path: Path) -> None:
    folders = {name: make_tiny_model(tmp_path / name, seed=seed) for name, seed in (("a", 3), ("b", 3), ("c", 4))}
    contents = {
        name: {file.name: file.read_bytes() for file in sorted(folder.iterdir())} for name, folder in folders.items()
    }
    assert contents["a"] == contents["b"]
    assert contents["a"]["model.safetensors"] != contents["c"]["model.safetensors"]


def test_the_shape_is_free(tmp_path: Path) -> None:
    make_tiny_model(
        tmp_path, "qwen3", num_layers=2, hidden_size=48, num_heads=4, num_kv_heads=1, head_dim=12, vocab_size=400
    )
    config = AutoConfig.from_pretrained(tmp_path)
    shape = (config.num_hidden_layers, config.hidden_size, config.num_attention_heads, config.head_dim)
    assert (*shape, config.num_key_value_heads, config.vocab_size) == (2, 48, 4, 12, 1, 400)


def test_a_reward_model_gives_one_score_a_sequence(tmp_path: Path) -> None:
    model = AutoModelForSequenceClassification.from_pretrained(make_tiny_reward_model(tmp_path))
    logits = model(torch.tensor([[5, 6, 7], [7, 6, 5]])).logits
    assert logits.shape == (2, 1)
    assert logits[0] != logits[1]


@given(st.text())
def test_text_survives_the_tokenizer(text: str) -> None:
    text = text.encode("utf-8", "ignore").decode()
    tokenizer = make_tokenizer()
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"architecture": "gpt5"}, "architecture 'gpt5' is not one of"),
        ({"head_dim": 7}, "head_dim 7 must be even"),
        ({"num_kv_heads": 3}, "num_heads 8 a multiple of num_kv_heads 3"),
        ({"vocab_size": 100}, "vocab_size 100 is below the tokenizer's"),
    ],
)
def test_impossible_shapes_are_refused(tmp_path: Path, arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_tiny_model(tmp_path, **arguments)
