"""What cannot be split is said by name, with a remedy; what the tests hold against one process is not refused."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import (
    CohereConfig,
    Gemma3Config,
    GPT2Config,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3MoeConfig,
)

from scripts.make_tiny_model import CONFIGS
from verl.parallel.support import CONTEXT_PARALLEL, TENSOR_PARALLEL, unsupported


def tiny(architecture: str, **settings: Any) -> PreTrainedConfig:
    sizes = {"num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 96, "vocab_size": 320}
    return CONFIGS[architecture](**(sizes | {"num_hidden_layers": 4, "hidden_size": 64, "pad_token_id": 0} | settings))


@pytest.mark.parametrize("architecture", sorted(set(CONFIGS) - {"phi3", "qwen3_moe"}))
def test_the_tested_families_are_split(architecture: str) -> None:
    config = tiny(architecture)
    assert config.model_type in TENSOR_PARALLEL
    assert [unsupported(config, tp, pp) for tp, pp in ((1, 1), (2, 1), (4, 1), (8, 4))] == [[]] * 4


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (tiny("phi3"), "layers of a phi3 are cut in ways that are not done here (colwise_gather_output, rowwise_split"),
        (Qwen3MoeConfig(), "layers of a qwen3_moe are cut in ways that are not done here (moe_tp_experts, packed_"),
        (GPT2Config(), "transformers has no tensor-parallel plan for model_type gpt2"),
        (CohereConfig(), "not tested with model_type cohere, but with llama, qwen2, qwen3"),
        (Gemma3Config(), "not tested with model_type gemma3, but with"),  # with images; gemma3_text is another
    ],
)
def test_a_model_that_is_not_cut_is_named_with_its_reason(config: PreTrainedConfig, said: str) -> None:
    (message,) = unsupported(config, 2, 1)
    assert message.startswith("parallelism.tensor_parallel_size: 2: ") and said in message
    assert message.endswith("set it to 1 and let fsdp: true or pipeline_parallel_size spread the model")
    assert unsupported(config, 1, 1) == []


@pytest.mark.parametrize(
    ("settings", "tp", "said", "remedy"),
    [
        # SmolLM2-135M
        (
            {
                "hidden_size": 576,
                "num_attention_heads": 9,
                "num_key_value_heads": 3,
                "intermediate_size": 1536,
                "vocab_size": 49152,
            },
            2,
            "num_attention_heads 9 and num_key_value_heads 3, nor is it a multiple of them",
            "1 or 3",
        ),
        (
            {"hidden_size": 48, "num_key_value_heads": 3, "num_attention_heads": 12, "vocab_size": 384},
            4,
            "num_key_value_heads 3, nor is it",
            "1 or 3 or 6 or 12",
        ),
        ({"vocab_size": 321}, 2, "vocab_size 321", "1"),
        ({"intermediate_size": 100}, 8, "intermediate_size 100", "1 or 2 or 4"),
    ],
)
def test_a_size_that_does_not_go_into_the_model(settings: dict[str, Any], tp: int, said: str, remedy: str) -> None:
    (message,) = unsupported(tiny("llama", **settings), tp, 1)
    assert (
        message.startswith(f"parallelism.tensor_parallel_size: {tp}: does not go into the model's ") and said in message
    )
    assert message.endswith(f"; set it to {remedy}")


def test_fewer_key_heads_than_ranks_are_shared() -> None:
    assert unsupported(Qwen2Config(num_attention_heads=28, num_key_value_heads=4), 4, 1) == []
    assert unsupported(tiny("qwen3", num_key_value_heads=1), 8, 1) == []


def test_more_stages_than_layers() -> None:
    (message,) = unsupported(tiny("llama"), 1, 5)
    assert message == "parallelism.pipeline_parallel_size: 5: the model has 4 layers; set it to 4 or less"


def test_everything_is_said_at_once() -> None:
    assert [message.split(":")[0] for message in unsupported(tiny("llama"), 3, 9)] == [
        "parallelism.tensor_parallel_size",
        "parallelism.pipeline_parallel_size",
    ]


@pytest.mark.parametrize("architecture", sorted(CONFIGS))
def test_the_tested_families_share_rows_out(architecture: str) -> None:
    config = tiny(architecture)
    assert config.model_type in CONTEXT_PARALLEL
    assert [unsupported(config, 1, pp, cp) for pp, cp in ((1, 1), (1, 2), (2, 4), (4, 8))] == [[]] * 4


@pytest.mark.parametrize(
    ("heads", "key_heads", "tp", "cp", "remedy"),
    [
        (9, 3, 1, 2, "1 or 3 or 9"),  # SmolLM2-135M
        (8, 4, 1, 16, "1 or 2 or 4 or 8"),
        (8, 4, 2, 8, "1 or 2 or 4"),  # four heads on each tensor-parallel rank
        (12, 6, 1, 4, "1 or 2 or 3 or 6 or 12"),  # four ranks have neither whole key heads nor parts of one
        (8, 1, 4, 4, "1 or 2"),
    ],
)
def test_ranks_that_the_heads_do_not_go_round(heads: int, key_heads: int, tp: int, cp: int, remedy: str) -> None:
    config = tiny("llama", num_attention_heads=heads, num_key_value_heads=key_heads, hidden_size=8 * heads)
    (message,) = unsupported(config, tp, 1, cp)
    of_rank = f" of a tensor-parallel rank (1/{tp})" if tp > 1 else ""
    assert message == (
        f"parallelism.context_parallel_size: {cp}: does not go into the model's num_attention_heads {heads} and "
        f"num_key_value_heads {key_heads}{of_rank}; set it to {remedy}"
    )
    for size in map(int, remedy.split(" or ")):
        assert unsupported(config, tp, 1, size) == []


def test_rows_are_shared_out_of_tested_models_only() -> None:
    (message,) = unsupported(CohereConfig(), 1, 1, 2)
    assert message.startswith("parallelism.context_parallel_size: 2: not tested with model_type cohere, but with llama")
    assert message.endswith("; set it to 1")


def test_embeddings_that_look_at_all_positions_see_a_part_of_them() -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0}
    (message,) = unsupported(tiny("llama", rope_parameters=rope), 1, 1, 2)
    assert message == (
        "parallelism.context_parallel_size: 2: rotary embeddings of rope_type dynamic change with the longest sequence "
        "of a batch, of which a rank sees a part; set it to 1"
    )
    linear = tiny("llama", rope_parameters=rope | {"rope_type": "linear"})
    assert unsupported(linear, 1, 1, 2) == []
