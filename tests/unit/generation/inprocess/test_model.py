"""A model built without its checkpoint has everything that a checkpoint does not hold, or is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    Gemma2Config,
    GptOssConfig,
    Llama4TextConfig,
    LlamaConfig,
    MambaConfig,
    Phi3Config,
    PreTrainedConfig,
)

from tests.unit.generation.inprocess.conftest import Tiny
from verl.errors import UserError
from verl.generation.inprocess.model import build_model, longest_sequence

CPU = torch.device("cpu")
SMALL = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "gemma3"])
def test_buffers_are_those_of_a_loaded_model(
    tiny: Callable[[str], Tiny], architecture: str, dtype: torch.dtype
) -> None:
    folder = tiny(architecture).folder
    loaded = dict(AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).named_buffers())
    built = dict(build_model(str(folder), dtype, CPU, trust_remote_code=False).named_buffers())
    assert loaded
    assert built.keys() == loaded.keys()
    for name, buffer in built.items():
        assert buffer.dtype == loaded[name].dtype, name
        assert torch.equal(buffer, loaded[name]), name


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_parameters_are_those_of_a_loaded_model_and_undefined(tiny: Callable[[str], Tiny], architecture: str) -> None:
    model = build_model(str(tiny(architecture).folder), torch.bfloat16, CPU, trust_remote_code=False)
    loaded = dict(tiny(architecture).hf.named_parameters())
    built = dict(model.named_parameters())
    assert {name: tensor.shape for name, tensor in built.items()} == {
        name: tensor.shape for name, tensor in loaded.items()
    }
    assert not model.training
    for tensor in built.values():
        assert tensor.isnan().all()
        assert tensor.dtype == torch.bfloat16
        assert not tensor.requires_grad
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert tied is (architecture == "gemma3")


def test_scaled_rotary_frequencies_are_computed(tmp_path: Path) -> None:
    """Llama 3's: not the default formula."""
    rope = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    config = LlamaConfig(**SMALL, max_position_embeddings=512, rope_parameters=rope)
    config.save_pretrained(tmp_path)
    built = dict(build_model(str(tmp_path), torch.float32, CPU, trust_remote_code=False).named_buffers())
    expected = dict(AutoModelForCausalLM.from_config(config).named_buffers())
    assert torch.equal(built["model.rotary_emb.inv_freq"], expected["model.rotary_emb.inv_freq"])
    default = 500000.0 ** -(torch.arange(0, 16, 2) / 16)
    assert not torch.allclose(built["model.rotary_emb.inv_freq"], default)


@pytest.mark.parametrize(
    ("config", "names"),
    [
        (Gemma2Config(**SMALL, head_dim=16), "softcap"),
        (GptOssConfig(**SMALL, head_dim=16, num_local_experts=4), "sinks"),
        (Llama4TextConfig(**SMALL, head_dim=16, intermediate_size_mlp=128, num_local_experts=2), "chunked_attention"),
        (MambaConfig(vocab_size=320, hidden_size=64, num_hidden_layers=2, pad_token_id=0), "0 of 2 layers"),
        (BloomConfig(vocab_size=320, hidden_size=64, n_layer=2, n_head=4), "0 of 2 layers"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, PreTrainedConfig) else "",
)
def test_what_would_be_computed_wrongly_is_refused(tmp_path: Path, config: PreTrainedConfig, names: str) -> None:
    config.save_pretrained(tmp_path)
    with pytest.raises(UserError, match=f"{names}.*use backend vllm"):
        build_model(str(tmp_path), torch.float32, CPU, trust_remote_code=False)


def test_longest_sequence() -> None:
    assert longest_sequence(LlamaConfig(max_position_embeddings=4096)) == 4096
    # Phi 3's 128k: beyond 4096 its frequencies depend on the longest sequence of the batch.
    factors = [1.0] * 8
    long_rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": factors, "long_factor": factors}
    config = Phi3Config(
        **SMALL, max_position_embeddings=131072, original_max_position_embeddings=4096, rope_parameters=long_rope
    )
    assert longest_sequence(config) == 4096
    dynamic = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    assert longest_sequence(LlamaConfig(max_position_embeddings=2048, rope_parameters=dynamic)) == 2048
