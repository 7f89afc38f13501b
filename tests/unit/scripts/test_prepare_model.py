"""A GGUF file becomes a Hugging Face folder with the weights, tokenizer and config that it holds."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from scripts.make_tiny_model import END, SPECIAL_TOKENS, make_tiny_model, make_tokenizer
from scripts.prepare_model import convert, is_made, main, packaged_gguf

gguf = pytest.importorskip("gguf")

NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
"""A Llama layer's modules in Hugging Face's words and in GGUF's."""


def interleaved(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """GGUF holds a query or key projection with the two halves of each rotary pair next to each other."""
    rows, columns = weight.shape
    halves = weight.reshape(num_heads, 2, rows // num_heads // 2, columns)
    return halves.swapaxes(1, 2).reshape(rows, columns)


def write_gguf(model: LlamaForCausalLM, path: Path) -> None:
    """As llama.cpp's converter does for a Llama with a GPT-2 style tokenizer; tied, in float32."""
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_vocab_size(config.vocab_size)
    vocab = make_tokenizer().get_vocab()
    tokens = sorted(vocab, key=lambda token: vocab[token])
    tokens += [f"<unused{number}>" for number in range(len(tokens), config.vocab_size)]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types(
        [gguf.TokenType.CONTROL if token in SPECIAL_TOKENS else gguf.TokenType.NORMAL for token in tokens]
    )
    writer.add_token_merges(["h e"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template("{{ messages[0]['content'] }}")
    weights = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    writer.add_tensor("token_embd.weight", weights["model.embed_tokens.weight"])
    writer.add_tensor("output_norm.weight", weights["model.norm.weight"])
    for layer in range(config.num_hidden_layers):
        for theirs, ours in NAMES.items():
            weight = weights[f"model.layers.{layer}.{theirs}.weight"]
            if ours == "attn_q":
                weight = interleaved(weight, config.num_attention_heads)
            if ours == "attn_k":
                weight = interleaved(weight, config.num_key_value_heads)
            writer.add_tensor(f"blk.{layer}.{ours}.weight", np.ascontiguousarray(weight))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(make_tiny_model(tmp_path_factory.mktemp("model"), num_layers=2, tied=True))


@pytest.fixture(scope="module")
def source(original: LlamaForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "tiny-F32.gguf"
    write_gguf(original, path)
    return path


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the command sets for itself is taken back."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("TQDM_DISABLE", "1")


def test_the_folder_is_the_model_that_was_packed(original: LlamaForCausalLM, source: Path, tmp_path: Path) -> None:
    out = tmp_path / "deep" / "model"
    convert(source, out)
    assert is_made(out, source)
    model, loading = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not any(loading[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert "quantization_config" not in model.config.to_dict()
    assert model.config.architectures == ["LlamaForCausalLM"]
    for name, tensor in original.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), name
    ids = torch.arange(3, 30)[None]
    assert torch.allclose(model(ids).logits, original(ids).logits, atol=1e-5)
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert tokenizer.eos_token == END
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hello"}], tokenize=False) == "hello"
    model.save_pretrained(tmp_path / "again")  # refused for a model that still counts as quantised
    assert [path.name for path in out.parent.iterdir()] == ["model"]


def test_a_folder_is_made_once_and_a_strangers_is_left_alone(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "model"
    main(["--gguf", str(source), "--out", str(out)])
    before = (out / "model.safetensors").stat().st_mtime_ns
    main(["--gguf", str(source), "--out", str(out)])
    assert [line.split(": ")[-1] for line in capsys.readouterr().out.splitlines()] == [
        "made from tiny-F32.gguf",
        f"{out} is there already",
    ]
    assert (out / "model.safetensors").stat().st_mtime_ns == before
    (tmp_path / "mine.txt").write_text("precious")
    with pytest.raises(ValueError, match="holds something that this command did not write"):
        main(["--gguf", str(source), "--out", str(tmp_path)])
    assert (tmp_path / "mine.txt").exists()


def test_a_file_of_another_size_is_another_source(source: Path, tmp_path: Path) -> None:
    convert(source, tmp_path / "model")
    longer = tmp_path / source.name
    longer.write_bytes(source.read_bytes() + b"\0")
    assert not is_made(tmp_path / "model", longer)


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no_such_package is not installed"):
        packaged_gguf("no_such_package")
    with pytest.raises(ValueError, match="gguf holds 0 GGUF files"):
        packaged_gguf("gguf")
    with pytest.raises(ValueError, match="there is no such file"):
        main(["--gguf", str(tmp_path / "none.gguf"), "--out", str(tmp_path / "out")])
