"""Adapters: where they are, what they begin with, how they count, and what is refused."""

from __future__ import annotations

import importlib.util
import json
import math
from collections.abc import Sequence
from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from scripts.make_tiny_model import make_tiny_model
from verl.config import LoraConfig
from verl.errors import UserError
from verl.model.heads import Head, HeadedModel
from verl.model.load import (
    base_parameters,
    check_adapters,
    hf_parameters,
    load_shards,
    materialise,
    meta_model,
    read_config,
)
from verl.model.lora import (
    Adapter,
    adapted_weight,
    adapter_config,
    adapter_names,
    adapters,
    adapters_off,
    add_adapters,
    draw,
    is_adapter,
    saved_name,
    scale_of,
)

SEED = 3
LAYER = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "llama", "llama", num_layers=2)


def make(folder: Path, lora: LoraConfig, head: Head = Head.lm, dtype: torch.dtype = torch.float32) -> HeadedModel:
    model = meta_model(read_config(folder, False), head, dtype, "sdpa", 7, False)
    add_adapters(model, lora)
    materialise(model, torch.device("cpu"))
    load_shards(model, folder, SEED, lambda: None)
    return model


@pytest.mark.parametrize("head", [Head.lm, Head.token_value])
def test_they_are_at_every_linear_layer_and_alone_are_trained(folder: Path, head: Head) -> None:
    model = make(folder, LoraConfig(rank=4), head, torch.bfloat16)
    named = dict(hf_parameters(model))
    wanted = {f"{name}.weight" for layer in range(2) for name in _modules(layer)}
    assert set(adapters(model)) == wanted
    trained = {name for name, parameter in named.items() if parameter.requires_grad}
    assert trained == {part for name in wanted for part in adapter_names(name)} | (
        set() if head is Head.lm else {"score.weight"}
    )
    assert {named[name].dtype for name in trained} == {torch.float32}
    assert {p.dtype for name, p in named.items() if name not in trained} == {torch.bfloat16}
    plain = meta_model(read_config(folder, False), head, torch.bfloat16, "sdpa", 7, False)
    assert [name for name, _ in base_parameters(model)] == [name for name, _ in hf_parameters(plain)]


def _modules(layer: int) -> list[str]:
    return [f"model.layers.{layer}.{'self_attn' if len(n) == 6 else 'mlp'}.{n}" for n in LAYER]


def test_names_of_one_weights_adapter_belong_together() -> None:
    down, up = adapter_names("model.layers.1.mlp.up_proj.weight")
    assert (down, up) == ("model.layers.1.mlp.up_proj.lora_A.weight", "model.layers.1.mlp.up_proj.lora_B.weight")
    for name in (down, up):
        assert is_adapter(name) and adapted_weight(name) == "model.layers.1.mlp.up_proj.weight"
    assert not is_adapter("model.layers.1.mlp.up_proj.weight")


def test_they_begin_as_pefts_do(folder: Path) -> None:
    """B is zero; A is uniform within the bound by which torch draws a linear layer's weight, sqrt(1 / in)."""
    model = make(folder, LoraConfig(rank=64, target_modules=["down_proj"]))
    inputs = 128
    for name, adapter in adapters(model).items():
        assert adapter.down.shape == (64, inputs) and not adapter.up.any()
        assert 0.98 / math.sqrt(inputs) < adapter.down.abs().max() <= 1 / math.sqrt(inputs)
        # the variance of a uniform draw from [-b, b] is b^2 / 3
        assert adapter.down.var().item() == pytest.approx(1 / (3 * inputs), rel=0.05)
        assert torch.equal(adapter.down, draw(adapter_names(name)[0], adapter.down.shape, SEED))
    first, second = (adapter.down for adapter in adapters(model).values())
    assert not torch.equal(first, second)
    assert not torch.equal(first, draw(adapter_names(next(iter(adapters(model))))[0], first.shape, SEED + 1))


@pytest.mark.parametrize("rslora", [False, True])
def test_they_count_as_pefts_do(folder: Path, rslora: bool, tmp_path: Path) -> None:
    """peft reads our files, and merges what we merge."""
    from transformers import AutoModelForCausalLM

    model = make(folder, LoraConfig(rank=4, alpha=6, rslora=rslora, target_modules=["q_proj", "up_proj"]))
    files = {}
    with torch.no_grad():
        for name, parameter in hf_parameters(model):
            if is_adapter(name):
                files[saved_name(name)] = parameter.normal_().clone()
    save_file(files, tmp_path / "adapter_model.safetensors")
    config = adapter_config(model, folder)
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    assert scale_of(config) == pytest.approx(6 / 2 if rslora else 6 / 4)
    theirs = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder), str(tmp_path))
    merged = theirs.merge_and_unload().state_dict()
    weights = dict(base_parameters(model))
    for name, adapter in adapters(model).items():
        assert torch.equal(adapter.merged(weights[name].detach()), merged[name])
        assert not torch.equal(weights[name], merged[name])


def test_a_merge_is_rounded_once() -> None:
    draws = torch.Generator().manual_seed(0)
    weight, down, up = (torch.randn(shape, generator=draws) for shape in ((8, 6), (2, 6), (8, 2)))
    merged = Adapter(down.bfloat16(), up.bfloat16(), 0.5).merged(weight.bfloat16())
    exact = weight.bfloat16().double() + 0.5 * (up.bfloat16().double() @ down.bfloat16().double())
    torch.testing.assert_close(merged, exact.float(), rtol=1e-6, atol=1e-6)


def test_turned_off_they_change_nothing_and_then_they_do_again(folder: Path) -> None:
    model = make(folder, LoraConfig(rank=4))
    plain = meta_model(read_config(folder, False), Head.lm, torch.float32, "sdpa", 7, False)
    materialise(plain, torch.device("cpu"))
    load_shards(plain, folder, SEED, lambda: None)
    ids = torch.arange(5, 25)[None]
    with torch.no_grad():
        for adapter in adapters(model).values():
            adapter.up.normal_()
        trained = model.hf(ids).logits
        with adapters_off(model):
            assert torch.equal(model.hf(ids).logits, plain.hf(ids).logits)
        assert torch.equal(model.hf(ids).logits, trained)
        assert not torch.equal(trained, plain.hf(ids).logits)
        with adapters_off(plain):
            pass
    assert all(
        isinstance(p, nn.Parameter) and p.requires_grad for a in adapters(model).values() for p in (a.down, a.up)
    )


ALL = "take [all-linear], or some of [down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj]"


@pytest.mark.parametrize(
    ("targets", "said"),
    [
        (["qproj"], f"lora.target_modules=['qproj']: qproj: the model has no such module; {ALL}"),
        (
            ["q_proj", "lm_head"],
            "lora.target_modules=['q_proj', 'lm_head']: lm_head: lm_head is no linear layer of the ",
        ),
        (["embed_tokens"], "embed_tokens: model.embed_tokens is no linear layer of the decoder; "),
        (["mlp"], "mlp: model.layers.0.mlp is no linear layer of the decoder; "),
    ],
)
def test_what_is_no_linear_layer_of_the_decoder_is_refused(folder: Path, targets: Sequence[str], said: str) -> None:
    with pytest.raises(UserError) as caught:
        check_adapters(folder, Head.lm, LoraConfig(rank=4, target_modules=list(targets)), False)
    assert said in str(caught.value)
    check_adapters(folder, Head.lm, LoraConfig(rank=4, target_modules=["layers.1.mlp.up_proj"]), False)


def test_peft_is_asked_for_by_name(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"^lora.rank=4: adapters need peft, which is not installed; pip install peft"):
        check_adapters(folder, Head.lm, LoraConfig(rank=4), False)
