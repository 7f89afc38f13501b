"""The terms of a role's memory: counted by hand, and held against what torch really keeps."""

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import Any

import peft
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from tests.support.advice import shape
from verl.advise import memory
from verl.advise.activations import Activations, layer_bytes, parts_under_way
from verl.advise.adapters import with_adapters
from verl.advise.memory import PROCESS_BYTES, Tokens
from verl.advise.model import ModelShape, shape_of
from verl.config import LoraConfig
from verl.mesh.spec import Device, HybridEngine, Parallelism, RoleSpec, RolloutSpec
from verl.model.heads import Head

TOKENS = Tokens(micro_batch=64, longest=32, chunk=16, accumulates=False)


def role(num_devices: int = 1, tp: int = 1, pp: int = 1) -> RoleSpec:
    return RoleSpec(tuple(Device(None, i) for i in range(num_devices)), Parallelism(True, tp, pp))


def rollout(tp: int = 1, **engine_kwargs: object) -> RolloutSpec:
    devices = tuple(Device(None, i) for i in range(tp))
    return RolloutSpec(devices, Parallelism(False, tp), max_num_seqs=4, engine_kwargs=engine_kwargs)


def trained(model: ModelShape, spec: RoleSpec, tokens: Tokens = TOKENS, stage: int = 0) -> memory.Need:
    return memory.trained(model, model.split(spec, spec.data_parallel_size), stage, 2, tokens, spec, reshards=True)


# -- parameters, gradients, optimizer --------------------------------------------------------------------------------


def test_one_device_holds_twelve_bytes_a_parameter_and_four_of_gradient():
    model = shape()
    need = trained(model, role())
    assert need.stays == {"parameters": 4 * model.num_elements, "optimizer": 8 * model.num_elements}
    ends = trained(model, role(), replace(TOKENS, micro_batch=1, accumulates=True))
    assert ends.at_work["gradients"] == 4 * model.num_elements


def test_fsdp_shards_rows_in_ceil_chunks():
    """Of 3 ranks the first one holds the most: a third of each first dimension, rounded up."""
    model = shape()
    by_hand = sum(-(-size[0] // 3) * prod(size[1:]) for size in model.shapes.values())
    assert trained(model, role(3)).stays["parameters"] == 4 * by_hand > 4 * model.num_elements // 3


def test_each_copy_is_sharded_by_itself():
    model, spec = shape(), role(4)
    spec = replace(spec, parallelism=replace(spec.parallelism, fsdp_size=2))
    assert trained(model, spec).stays == trained(model, role(2)).stays


def test_what_is_offloaded_does_not_stay():
    model, many = shape(), replace(TOKENS, accumulates=True)
    plain = trained(model, role(2)).stays
    assert trained(model, replace(role(2), hybrid_engine=HybridEngine(offload_optimizer=True))).stays == {
        "parameters": plain["parameters"]
    }
    away = replace(role(2), hybrid_engine=HybridEngine(offload_parameters=True, offload_optimizer=True))
    assert trained(model, away).stays == {}
    assert trained(model, away, many).at_work["gradients"] == 4 * model.num_elements  # until the last micro-batch
    assert "parameters" not in memory.frozen(model, model.split(away, 2), 0, 2, TOKENS, away, reshards=True).stays


def test_what_is_offloaded_is_in_the_nodes_memory_and_so_is_a_copy_for_checkpoints():
    model = shape()
    split = model.split(role(2), 2)
    shard = memory.held(model, split, 0).sharded

    def on_host(copied: bool = False, **hybrid: bool) -> dict[str, int]:
        spec = replace(role(2), hybrid_engine=HybridEngine(**hybrid))
        return dict(memory.trained(model, split, 0, 2, TOKENS, spec, reshards=True, copied=copied).on_host)

    assert on_host() == {}
    assert on_host(copied=True) == {"checkpoint copy": 12 * shard}  # float32 weights and AdamW's two moments
    assert on_host(offload_optimizer=True) == {"optimizer": 8 * shard}
    both = on_host(copied=True, offload_parameters=True)
    assert both == {
        "checkpoint copy": 12 * shard, "parameters": 4 * shard, "optimizer": 8 * shard, "gradients": 4 * shard
    }  # fmt: skip
    away = replace(role(2), hybrid_engine=HybridEngine(offload_parameters=True))
    assert memory.frozen(model, split, 0, 2, TOKENS, away, reshards=True).on_host == {"parameters": 2 * shard}


def test_gradients_that_wait_for_their_micro_batches_are_whole():
    model, many = shape(), replace(TOKENS, accumulates=True)
    assert trained(model, role(4), many).at_work["gradients"] == 4 * model.num_elements
    halves = memory.held(model, model.split(role(4, tp=2), 2), 0)
    assert trained(model, role(4, tp=2), many).at_work["gradients"] == 4 * halves.whole < 4 * model.num_elements


def test_tensor_parallelism_halves_matrices_and_not_norms():
    model = shape()
    norms = sum(prod(size) for name, size in model.shapes.items() if "norm" in name)
    half = memory.held(model, model.split(role(2, tp=2), 1), 0)
    assert half.whole == (model.num_elements - norms) // 2 + norms


def test_stages_hold_the_model_once_and_a_tied_embedding_twice():
    for tied in (False, True):
        model = shape(tie_word_embeddings=tied)
        split = model.split(role(2, pp=2), 1)
        first, last = (memory.held(model, split, stage) for stage in range(2))
        assert first.whole + last.whole == model.num_elements + (320 * 48 if tied else 0)
        assert first.layers + last.layers == 3 and (first.ends, last.ends) == (False, True)


@given(st.sampled_from([1, 2, 3, 5, 8]), st.sampled_from([1, 2]), st.sampled_from([1, 2, 3]))
def test_the_shards_of_all_devices_are_the_model_at_least(dp: int, tp: int, pp: int):
    model = shape()
    split = model.split(role(dp * tp * pp, tp=tp, pp=pp), dp)
    total = sum(memory.held(model, split, stage).sharded * dp * tp for stage in range(pp))
    assert total >= model.num_elements
    rows = sum(dp * prod(size[1:]) for size in model.shapes.values())
    assert total <= tp * (model.num_elements + rows)  # padding, and norms on each tensor-parallel rank


# -- activations -----------------------------------------------------------------------------------------------------


EXPERTS = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 40, "norm_topk_prob": True}


def config_of(kind: str, num_layers: int) -> PretrainedConfig:
    return AutoConfig.for_model(
        kind, hidden_size=64, intermediate_size=176, num_attention_heads=8, num_key_value_heads=2, head_dim=8,
        num_hidden_layers=num_layers, vocab_size=100, **(EXPERTS if kind == "qwen3_moe" else {}),
    )  # fmt: skip


def kept_by_autograd(
    config: PretrainedConfig, attention: str, dtype: torch.dtype, packed: bool, adapted: Sequence[str] = ()
) -> int:
    """Bytes of all storages that autograd saves in the forward pass of a decoder, without its parameters.

    `packed`: the row has two sequences, so that there is a mask. `adapted`: modules with peft's adapters of rank 4, and
    then these alone are trained.
    """
    model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
    if adapted:
        lora = peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=list(adapted))
        model = peft.get_peft_model(model, lora, autocast_adapter_dtype=False).base_model.model
    own = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    saved: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        ids = torch.zeros(1, 128, dtype=torch.int64)
        positions = torch.arange(128)[None] % (64 if packed else 128)
        model.base_model(input_ids=ids, position_ids=positions, use_cache=False)
    return sum(storage.nbytes() for key, storage in saved.items() if key not in own)


@pytest.mark.parametrize(
    ("kind", "attention", "packed", "dtype"),
    [
        ("llama", "flash_attention_2", False, torch.bfloat16),
        ("llama", "flash_attention_2", False, torch.float32),
        ("llama", "sdpa", True, torch.bfloat16),
        ("llama", "eager", True, torch.bfloat16),
        ("llama", "eager", True, torch.float32),
        ("qwen2", "flash_attention_2", False, torch.bfloat16),
        ("qwen3", "flash_attention_2", False, torch.bfloat16),
        ("mistral", "flash_attention_2", False, torch.bfloat16),
        ("gemma2", "eager", True, torch.bfloat16),
        ("gemma2", "eager", True, torch.float32),
        ("gemma3_text", "flash_attention_2", False, torch.bfloat16),
        ("gemma3_text", "sdpa", True, torch.bfloat16),
        ("qwen3_moe", "flash_attention_2", False, torch.bfloat16),
        ("qwen3_moe", "flash_attention_2", False, torch.float32),
        ("qwen3_moe", "eager", True, torch.bfloat16),
    ],
)
def test_a_layer_keeps_what_autograd_keeps(kind: str, attention: str, packed: bool, dtype: torch.dtype):
    """Without a mask, SDPA keeps what flash attention does."""
    kernel = "eager" if attention == "eager" else "sdpa"
    three, one = (kept_by_autograd(config_of(kind, number), kernel, dtype, packed) for number in (3, 1))
    tokens = replace(TOKENS, longest=128, attention=attention)
    reckoned = layer_bytes(shape_of(config_of(kind, 1), kind), dtype.itemsize, tokens)
    assert reckoned == pytest.approx((three - one) / 2 / 128, rel=0.02)


ATTENTION, MLP = ["q_proj", "k_proj", "v_proj", "o_proj"], ["gate_proj", "up_proj", "down_proj"]


@pytest.mark.parametrize(
    ("kind", "targets", "linear"),
    [
        ("llama", ["all-linear"], ATTENTION + MLP),
        ("llama", ["q_proj", "v_proj"], ["q_proj", "v_proj"]),
        ("llama", ["down_proj"], ["down_proj"]),
        ("qwen3_moe", ["all-linear"], ATTENTION),
        ("qwen3_moe", ["o_proj"], ["o_proj"]),
    ],
)
def test_a_layer_with_adapters_keeps_what_autograd_keeps(kind: str, targets: list[str], linear: list[str]):
    """Not what other weights' gradients would be made of."""
    three, one = (kept_by_autograd(config_of(kind, n), "sdpa", torch.bfloat16, False, linear) for n in (3, 1))
    model = with_adapters(shape_of(config_of(kind, 1), kind), LoraConfig(rank=4, target_modules=targets))
    assert layer_bytes(model, 2, replace(TOKENS, longest=128)) == pytest.approx((three - one) / 2 / 128, rel=0.03)


@pytest.mark.parametrize(("kv_heads", "each"), [(4, 4), (2, 4), (1, 4)])
def test_context_parallel_ranks_keep_attentions_output_twice_and_no_head_less_than_one(kv_heads: int, each: int):
    """Of 4 ranks with 8 query heads each has 2, and at least one key head, of all of the time."""
    model = shape(num_attention_heads=8, num_key_value_heads=kv_heads)
    alone, four = (layer_bytes(model, 2, replace(TOKENS, cp=cp)) for cp in (1, 4))
    assert four - alone == 2 * (8 * 8) + 2 * 2 * 8 * (each - kv_heads)
    masked, shared = (layer_bytes(model, 2, replace(TOKENS, cp=cp, attention="sdpa")) for cp in (1, 4))
    assert shared - masked == 2 * (8 * 8) + 3 * 2 * TOKENS.longest  # the mask is of all time on each


def test_llama_7b_by_the_published_shape_of_a_layer():
    """20 h + 4 kv + 8 i bytes a token in bfloat16, and the row sums of the attention: counted by hand."""
    model = replace(
        shape(), hidden_size=4096, intermediate_size=11008, num_heads=32, num_kv_heads=32, head_dim=128, normed=2 * 4096
    )
    assert layer_bytes(model, 2, TOKENS) == 20 * 4096 + 4 * 4096 + 8 * 11008 + 4 * 32


def test_checkpointing_keeps_a_layers_input_alone():
    model = shape()
    split = model.split(role(), 1)
    everything, checkpointed, in_head = (
        Activations(model, 3, split, 0, 2, TOKENS, HybridEngine(activation_checkpointing=on), 1).on_device(in_head)
        for on, in_head in ((False, False), (True, False), (True, True))
    )
    layer, inputs = 64 * layer_bytes(model, 2, TOKENS), 64 * 48 * 2
    last = 64 * 48 * (4 + 2 + 2)  # the last norm and the head's input
    assert everything == 3 * layer + last
    assert checkpointed == 3 * inputs + layer  # what the head keeps has gone by then
    assert in_head == 3 * inputs + last


def test_activations_on_the_host_leave_two_layers():
    model = shape()
    kept = Activations(model, 3, model.split(role(), 1), 0, 2, TOKENS, HybridEngine(offload_activations=True), 1)
    assert kept.on_device(in_head=True) == 3 * 64 * layer_bytes(model, 2, TOKENS) == kept.on_host()


@pytest.mark.parametrize(("stage", "under_way"), [(0, 4), (1, 3), (2, 2), (3, 1)])
def test_an_early_stage_has_more_micro_batches_under_way(stage: int, under_way: int):
    """1F1B: stage s of p holds p - s (Narayanan et al. 2021)."""
    assert parts_under_way(stage, 4, 1) == under_way


def test_attention_without_flash_keeps_more():
    model = shape()
    flash, sdpa, eager = (
        layer_bytes(model, 2, replace(TOKENS, attention=kind)) for kind in ("flash_attention_2", "sdpa", "eager")
    )
    repeated = 2 * (6 - 2) * 8 * 2  # keys and values, which two heads have for six
    assert sdpa - flash == repeated + 2 * 32 and eager - flash == repeated + 6 * 6 * 32


def test_tensor_parallel_ranks_have_the_inputs_of_attention_and_mlp_whole():
    model = shape()
    alone, half = (layer_bytes(model, 2, TOKENS, tp) for tp in (1, 2))
    inputs = 2 * 48 * 2
    assert half - inputs == (alone - inputs) // 2


def test_a_stage_keeps_what_it_received_and_sent():
    model, many = shape(), replace(TOKENS, accumulates=True)
    split = model.split(role(3, pp=3), 1)
    first, middle, last = (
        Activations(model, 1, split, stage, 2, many, HybridEngine(), 1).on_device(in_head=True) for stage in range(3)
    )
    layer, states, head = 64 * layer_bytes(model, 2, TOKENS), 64 * 48 * 2, 64 * 48 * (4 + 2 + 2)
    assert (first, middle, last) == (3 * (layer + states), 2 * (layer + 2 * states), layer + states + head)


# -- the rest --------------------------------------------------------------------------------------------------------


def test_the_value_head_has_no_logits():
    need = trained(shape(head=Head.token_value), role())
    assert "logits" not in need.at_work


def test_a_frozen_role_holds_its_parameters_in_its_dtype():
    model = shape()
    need = memory.frozen(model, model.split(role(2), 2), 0, 2, TOKENS, role(2), reshards=True)
    assert need.stays == {"parameters": 2 * memory.held(model, model.split(role(2), 2), 0).sharded}
    assert "gradients" not in need.at_work


def test_a_model_that_stays_gathered():
    """Beside it is the message that the last layer came in, unless there is nobody to send one."""
    model = shape()
    layer = sum(prod(size) for name, size in model.shapes.items() if ".layers.0." in name)
    for ranks, message in ((1, 0), (2, layer)):
        split = model.split(role(ranks), ranks)
        need = memory.frozen(model, split, 0, 2, TOKENS, role(ranks), reshards=False)
        assert need.at_work["gathered layers"] == 2 * (model.num_elements + message)


def test_the_cache_of_a_token():
    """Keys and values in bfloat16: of Llama-3-70B 320 KiB, as 2 x 80 layers x 8 heads x 128 x 2 bytes are."""
    large = replace(shape(), num_layers=80, num_kv_heads=8, head_dim=128)
    assert memory.cache_bytes(large, 1, 2) == 320 * 1024
    assert memory.cache_bytes(large, 8, 2) == 40 * 1024
    assert memory.cache_bytes(large, 16, 2) == 40 * 1024  # a head is on two devices then


def test_vllm_alone_fills_its_share_of_the_device():
    need = memory.vllm(shape(), rollout(), 2, 32, device_memory=80 << 30, shares=False)
    assert need.total + PROCESS_BYTES == int(0.92 * (80 << 30)) and not need.at_work
    less = memory.vllm(shape(), rollout(gpu_memory_utilization=0.5), 2, 32, device_memory=80 << 30, shares=False)
    assert less.total + PROCESS_BYTES == 40 << 30


def test_vllm_that_shares_its_devices_sleeps_and_has_the_cache_that_it_is_given():
    need = memory.vllm(shape(), rollout(kv_cache_memory_bytes=1 << 30), 2, 32, device_memory=80 << 30, shares=True)
    assert not need.stays and need.term("KV cache") == 1 << 30


def test_without_a_size_the_cache_is_what_all_sequences_may_need():
    need = memory.vllm(shape(), rollout(), 2, 32, device_memory=None, shares=True)
    assert need.term("KV cache") == 4 * 32 * memory.cache_bytes(shape(), 1, 2)


def test_an_engine_splits_its_weights():
    model = shape()
    assert memory.engine_weights(model, 1, 2) == 2 * model.num_elements
    assert model.num_elements < memory.engine_weights(model, 2, 2) < 2 * model.num_elements


def test_an_engine_in_the_process_has_a_cache_while_it_generates():
    need = memory.in_process(shape(), rollout(), 2, 32)
    assert set(need.stays) == {"weights"} and need.at_work["KV cache"] == 4 * 32 * memory.cache_bytes(shape(), 1, 2)
