"""Writes tiny random models as Hugging Face folders, for tests and for trying the program out.

    python scripts/make_tiny_model.py DIR [--architecture qwen3] [--tied] [--seed N]
    python scripts/make_tiny_model.py DIR --reward

A folder is whole: config, safetensors weights, and a byte-level tokenizer with a ChatML template. The same arguments
give the same bytes. Every parameter is drawn, norms and biases too, so that code that forgets one is found out.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    Gemma2Config,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    SmolLM3Config,
)

CONFIGS: dict[str, Callable[..., PreTrainedConfig]] = {
    "llama": LlamaConfig,
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
    "gemma2": Gemma2Config,
    "gemma3": Gemma3TextConfig,
    "mistral": MistralConfig,
    "phi3": Phi3Config,
    "qwen3_moe": Qwen3MoeConfig,
    "smollm3": SmolLM3Config,
}
SPECIAL: dict[str, dict[str, Any]] = {
    "gemma2": {"sliding_window": 16, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 10.0},
    "gemma3": {"sliding_window": 16},
    "mistral": {"sliding_window": 16},
    "phi3": {"sliding_window": 16},
    "qwen3_moe": {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "norm_topk_prob": True},
    "smollm3": {"no_rope_layer_interval": 2},
}
"""What an architecture does of its own, at a size that a short sequence meets."""
END_OF_TEXT, START, END = SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MERGED = ("he", "in", "an", "er", "the", "user", "ing")
"""Strings of several bytes that are tokens of their own, so that text and tokens differ in length. No digits:
AutoTokenizer gives a Qwen folder Qwen's rule for them, whatever the folder says."""
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
VOCAB_SIZE = 320
"""Rows of the embedding: more than the tokenizer has tokens, as in many real models."""
HEAD_DIM = 32
"""The least that vLLM's attention takes on a CPU."""
SCALE = 0.1
"""Standard deviation of the parameters; norms vary so about 1. Large enough that greedy choices are no near-ties."""


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE with the 256 bytes, a few merges, and ChatML's special tokens (pad, start, end: ids 0, 1, 2)."""
    vocab = {token: number for number, token in enumerate(SPECIAL_TOKENS)}
    for byte in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocab[byte] = len(vocab)
    merges = []
    for word in MERGED:
        for end in range(2, len(word) + 1):
            if word[:end] not in vocab:
                vocab[word[:end]] = len(vocab)
                merges.append((word[: end - 1], word[end - 1]))
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=END_OF_TEXT,
        eos_token=END,
        additional_special_tokens=[START],
        chat_template=CHAT_TEMPLATE,
        model_max_length=512,
        clean_up_tokenization_spaces=False,
    )


def tiny_config(
    architecture: str,
    *,
    num_layers: int,
    hidden_size: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    vocab_size: int,
    tied: bool,
    **settings: Any,
) -> PreTrainedConfig:
    """The architecture's config at a small size; `settings`: further ones of its config class."""
    if architecture not in CONFIGS:
        raise ValueError(f"architecture {architecture!r} is not one of {', '.join(CONFIGS)}")
    if head_dim % 2 or num_heads % num_kv_heads:
        raise ValueError(
            f"head_dim {head_dim} must be even, and num_heads {num_heads} a multiple of num_kv_heads {num_kv_heads}"
        )
    special = SPECIAL.get(architecture, {})
    if architecture.startswith("gemma"):
        special = special | {"query_pre_attn_scalar": head_dim}
    return CONFIGS[architecture](
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=head_dim,
        max_position_embeddings=512,
        tie_word_embeddings=tied,
        bos_token_id=None,
        pad_token_id=SPECIAL_TOKENS.index(END_OF_TEXT),
        eos_token_id=SPECIAL_TOKENS.index(END),
        **(special | settings),
    )


@torch.no_grad()
def draw_parameters(model: nn.Module, seed: int) -> None:
    """Draw all parameters, in the order of their names: no initialiser of a library has a say in it."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in sorted(model.named_parameters()):
        draw = torch.randn(parameter.shape, generator=generator) * SCALE
        # Llama's and Qwen's norms multiply by their weight, Gemma's by 1 + weight: both come out near 1.
        norm_around_one = name.endswith("norm.weight") and "Gemma" not in type(model).__name__
        parameter.copy_(draw + 1 if norm_around_one else draw)


def make_tiny_model(
    path: Path | str,
    architecture: str = "llama",
    *,
    seed: int = 0,
    num_layers: int = 4,
    hidden_size: int = 64,
    num_heads: int = 8,
    num_kv_heads: int = 4,
    head_dim: int = HEAD_DIM,
    vocab_size: int = VOCAB_SIZE,
    tied: bool = False,
    **settings: Any,
) -> Path:
    """Write a causal language model, float32; `tied`: the output head is the embedding. Returns the folder.

    `settings`: further ones of the architecture's config, such as `attention_bias=True`.
    """
    config = tiny_config(
        architecture,
        num_layers=num_layers,
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=vocab_size,
        tied=tied,
        **settings,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return _write(model, Path(path), seed, vocab_size)


def make_tiny_reward_model(
    path: Path | str, architecture: str = "llama", *, seed: int = 0, num_layers: int = 2, vocab_size: int = VOCAB_SIZE
) -> Path:
    """Write a sequence classifier with one label, as a reward model is. Returns the folder."""
    config = tiny_config(
        architecture,
        num_layers=num_layers,
        hidden_size=64,
        num_heads=8,
        num_kv_heads=4,
        head_dim=HEAD_DIM,
        vocab_size=vocab_size,
        tied=False,
    )
    config.num_labels = 1
    model = AutoModelForSequenceClassification.from_config(config, dtype=torch.float32)
    return _write(model, Path(path), seed, vocab_size)


def _write(model: nn.Module, path: Path, seed: int, vocab_size: int) -> Path:
    tokenizer = make_tokenizer()
    if vocab_size < len(tokenizer):
        raise ValueError(f"vocab_size {vocab_size} is below the tokenizer's {len(tokenizer)} tokens")
    draw_parameters(model, seed)
    model.save_pretrained(path)  # type: ignore[operator]
    tokenizer.save_pretrained(path)
    return path


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path, metavar="DIR", help="folder to write")
    parser.add_argument("--architecture", choices=sorted(CONFIGS), default="llama")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--tied", action="store_true", help="the output head is the embedding")
    parser.add_argument("--reward", action="store_true", help="a reward model instead of a language model")
    arguments = parser.parse_args(argv)
    shape = {"architecture": arguments.architecture, "seed": arguments.seed, "num_layers": arguments.layers}
    if arguments.reward:
        print(make_tiny_reward_model(arguments.path, **shape))
    else:
        print(make_tiny_model(arguments.path, **shape, tied=arguments.tied))
    return 0


if __name__ == "__main__":
    sys.exit(main())
