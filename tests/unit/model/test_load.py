"""What is wrong with a model's folder is said in the user's words; what is right is loaded as Hugging Face does."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Gemma2Config,
    GPT2Config,
    GraniteConfig,
    LlamaConfig,
    MambaConfig,
    MixtralConfig,
    PhiConfig,
    PretrainedConfig,
    Qwen2Config,
    T5Config,
)

from scripts.make_tiny_model import CONFIGS
from tests.unit.model.conftest import load
from tests.unit.model.test_heads import changed
from verl.errors import UserError
from verl.model.attention import CPU_ATTENTION
from verl.model.heads import Head
from verl.model.load import (
    attention,
    hf_parameters,
    load_shards,
    materialise,
    meta_model,
    parameter_shapes,
    positions,
    read_config,
)
from verl.model.pieces import pieces, size_of

Folder = Callable[..., Path]


def rewritten(folder: Path, to: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> Path:
    """A copy of a model's folder with other tensors."""
    shutil.copytree(folder, to)
    file = to / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, {"format": "pt"})
    return to


def test_parameters_in_host_memory_leave_the_buffers_on_the_device(folder: Folder) -> None:
    """The meta device stands for a GPU."""
    model = meta_model(read_config(folder("llama"), False), Head.lm, torch.float32, "sdpa", 8, False)
    materialise(model, torch.device("meta"), host_parameters=True)
    assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}
    assert {buffer.device.type for buffer in model.buffers()} == {"meta"}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("architecture", CONFIGS)
def test_parameters_have_hugging_faces_names_and_values(architecture: str, tied: bool, folder: Folder) -> None:
    path = folder(architecture, tied)
    wanted = dict(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).named_parameters())
    model = load(path)
    got = dict(hf_parameters(model))
    assert got.keys() == wanted.keys()
    assert all(torch.equal(got[name], wanted[name]) for name in wanted)
    assert (model.output_embeddings.weight is model.hf.get_input_embeddings().weight) == tied
    assert parameter_shapes(path, read_config(path, False)) == {
        piece.name: size_of(piece.box) for name, parameter in wanted.items() for piece in pieces(name, parameter.shape)
    }


def test_buffers_that_no_file_holds_are_computed(folder: Folder) -> None:
    wanted = dict(AutoModelForCausalLM.from_pretrained(folder("gemma3"), dtype=torch.float32).named_buffers())
    got = {name.removeprefix("hf."): buffer for name, buffer in load(folder("gemma3")).named_buffers()}
    assert wanted and got.keys() == wanted.keys()
    assert all(torch.equal(got[name], wanted[name]) for name in wanted)


def test_a_sharded_folder_is_read_whole(folder: Folder, tmp_path: Path) -> None:
    AutoModelForCausalLM.from_pretrained(folder("llama")).save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    one, other = dict(hf_parameters(load(tmp_path))), dict(hf_parameters(load(folder("llama"))))
    assert all(torch.equal(one[name], other[name]) for name in other)


def test_every_parameter_is_a_sign_of_life(folder: Folder) -> None:
    model, beats = load(folder("llama")), []
    load_shards(model, folder("llama"), 0, lambda: beats.append(1))
    assert len(beats) == len(list(hf_parameters(model)))


def test_dropout_is_off(folder: Folder, tmp_path: Path) -> None:
    config = read_config(changed(folder("llama"), tmp_path / "model", attention_dropout=0.1), False)
    assert config.attention_dropout == 0.0


def test_flash_attention_is_for_gpus_that_have_it() -> None:
    assert attention("auto", torch.device("cpu"), LlamaConfig()) == CPU_ATTENTION
    assert attention("eager", torch.device("cpu"), LlamaConfig()) == "eager"


@pytest.mark.parametrize("kernel", ["sdpa", CPU_ATTENTION])
def test_a_kernel_that_leaves_a_cap_on_scores_out_is_refused(kernel: str) -> None:
    """transformers' SDPA does, without a word."""
    assert attention("auto", torch.device("cpu"), Gemma2Config()) == "eager"
    with pytest.raises(UserError, match=f"{kernel} does not compute attn_logit_softcapping.*set it to auto, eager or"):
        meta_model(Gemma2Config(), Head.lm, torch.float32, kernel, 8, False)


# -- the value head -------------------------------------------------------------------------------------------------


def test_a_new_value_head_is_drawn_from_the_seed_alone(folder: Folder) -> None:
    torch.manual_seed(1)
    one = load(folder("llama"), Head.token_value, seed=7).score.weight
    torch.manual_seed(2)
    again = load(folder("qwen3"), Head.token_value, seed=7).score.weight
    other = load(folder("llama"), Head.token_value, seed=8).score.weight
    assert torch.equal(one, again) and not torch.equal(one, other)
    assert one.dtype == torch.float32
    # N(0, 1 / (h + 1)^2): of 64 draws the standard deviation is within four of its standard errors
    assert abs(one.std().item() * 65 - 1) < 4 / math.sqrt(2 * 64)


def test_a_critic_may_start_from_a_reward_model(reward_folder: Path) -> None:
    weight = load(reward_folder, Head.token_value).score.weight
    assert torch.equal(weight, load_file(reward_folder / "model.safetensors")["score.weight"])


# -- folders that are not right -------------------------------------------------------------------------------------


def test_a_missing_tensor_is_named(folder: Folder, tmp_path: Path) -> None:
    path = rewritten(folder("llama"), tmp_path / "model", lambda t: t.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(
        UserError, match=r"'model\.layers\.1\.mlp\.up_proj\.weight' is in none of the safetensors files"
    ) as e:
        load(path)
    assert str(path) in str(e.value) and "do not belong to its config.json" in str(e.value)


def test_a_tensor_of_another_shape_is_named_with_both(folder: Folder, tmp_path: Path) -> None:
    path = changed(folder("llama"), tmp_path / "model", vocab_size=400)
    with pytest.raises(
        UserError, match=r"'model\.embed_tokens\.weight' has shape \(320, 64\) where \(400, 64\) is needed"
    ):
        load(path)


def test_a_folder_without_safetensors(folder: Folder, tmp_path: Path) -> None:
    shutil.copy(folder("llama") / "config.json", tmp_path)
    with pytest.raises(UserError, match=r"holds no \*\.safetensors file. Save the model with save_pretrained"):
        load(tmp_path)


def test_a_file_that_was_cut_off(folder: Folder, tmp_path: Path) -> None:
    path = changed(folder("llama"), tmp_path / "model")
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:5000])
    with pytest.raises(UserError, match=r"model\.safetensors cannot be read: .*\. Copy or fetch it again"):
        load(path)


def test_a_language_model_given_as_reward_model(folder: Folder) -> None:
    with pytest.raises(
        UserError, match=r"'score\.weight' is in none .* AutoModelForSequenceClassification with one label"
    ):
        load(folder("llama"), Head.score)


def test_a_classifier_of_several_labels(reward_folder: Path, tmp_path: Path) -> None:
    path = rewritten(reward_folder, tmp_path / "model", lambda t: t.update({"score.weight": torch.zeros(3, 64)}))
    with pytest.raises(UserError, match=r"has shape \(3, 64\) where \(1, 64\) is needed\. A reward model .* one label"):
        load(path, Head.score)
    with pytest.raises(UserError, match=r"has shape \(3, 64\) where \(1, 64\) is needed\. A critic starts from"):
        load(path, Head.token_value)


def test_a_config_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match=f"the model config in {tmp_path} cannot be read"):
        read_config(tmp_path, False)


SMALL = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "vocab_size": 50}


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (T5Config(), "no decoder can be made of a config with model_type t5: Unrecognized configuration class"),
        (
            GraniteConfig(**SMALL, logits_scaling=8.0),
            "GraniteForCausalLM has logits_scaling = 8.0, which the log-probs",
        ),
        (CohereConfig(**SMALL), "CohereForCausalLM has logit_scale = 0.0625"),
        (PhiConfig(**SMALL), "PhiForCausalLM has a bias in the language-model head"),
        (
            MixtralConfig(**SMALL),
            "a mixtral has experts, and how its files hold them is not known here; .* qwen3_moe is",
        ),
    ],
)
def test_an_architecture_that_would_be_computed_or_written_wrongly_is_refused(
    config: PretrainedConfig, said: str
) -> None:
    with pytest.raises(UserError, match=said):
        meta_model(config, Head.lm, torch.float32, "sdpa", 8, False)


def test_a_value_head_takes_those_architectures() -> None:
    assert meta_model(PhiConfig(**SMALL), Head.token_value, torch.float32, "sdpa", 8, False).score.out_features == 1


def rope(kind: str, factor: float, original: int) -> dict[str, Any]:
    further = {"low_freq_factor": 1.0, "high_freq_factor": 4.0} if kind == "llama3" else {}
    return {
        "rope_type": kind,
        "rope_theta": 1e6,
        "factor": factor,
        "original_max_position_embeddings": original,
        **further,
    }


@pytest.mark.parametrize(
    ("config", "tokens"),
    [
        (LlamaConfig(max_position_embeddings=2048), 2048),
        (GPT2Config(n_positions=1024), 1024),
        (MambaConfig(), None),
        # Qwen2.5's model card: 32768 tokens, with YaRN 131072
        (Qwen2Config(max_position_embeddings=32768, rope_parameters=rope("yarn", 4.0, 32768)), 131072),
        # Llama 3.1: the config says the whole length, and the factor is that of its lowest frequencies
        (LlamaConfig(max_position_embeddings=131072, rope_parameters=rope("llama3", 8.0, 8192)), 131072),
    ],
    ids=["plain", "learnt", "recurrent", "yarn", "llama3"],
)
def test_how_long_a_sequence_may_be(config: PretrainedConfig, tokens: int | None) -> None:
    assert positions(config) == tokens
