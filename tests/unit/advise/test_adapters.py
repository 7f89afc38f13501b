"""Adapters in an estimate of memory: counted by hand."""

from __future__ import annotations

import pytest
from transformers import LlamaConfig

from tests.support.advice import job_of, models, shape
from verl.advise import memory
from verl.advise.adapters import held_adapters
from verl.advise.budget import budgets
from verl.advise.memory import Tokens
from verl.advise.model import ModelShape, shape_of
from verl.config import LoraConfig, PPOConfig
from verl.mesh.spec import Device, Parallelism, RoleSpec

HIDDEN, MLP, LAYERS = 4096, 11008, 32
LORA = LoraConfig(rank=8)


@pytest.fixture(scope="module")
def llama_7b() -> ModelShape:
    return shape_of(LlamaConfig(), "Llama 7B")


def role(num_devices: int = 1, tp: int = 1, pp: int = 1) -> RoleSpec:
    return RoleSpec(tuple(Device(None, i) for i in range(num_devices)), Parallelism(True, tp, pp))


def test_llama_7b_has_as_many_as_peft_counts(llama_7b: ModelShape) -> None:
    """What print_trainable_parameters says with rank 8 at all linear layers, and at queries and values alone."""
    split = llama_7b.split(role(), 1)
    every = held_adapters(llama_7b, split, 0, LORA)
    assert every is not None and (every.whole, every.sharded, every.root) == (19_988_480, 19_988_480, 0)
    some = held_adapters(llama_7b, split, 0, LoraConfig(rank=8, target_modules=["q_proj", "v_proj"]))
    assert some is not None and some.whole == 4_194_304
    assert held_adapters(llama_7b, split, 0, LoraConfig()) is None


def test_experts_and_their_router_have_none() -> None:
    """They are no linear layers of torch's, to which all-linear gives adapters."""
    model = shape("qwen3_moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24)
    held = held_adapters(model, model.split(role(), 1), 0, LORA)
    queries, keys = 6 * 8, 2 * 8
    assert held is not None and held.whole == 3 * 8 * (2 * (48 + queries) + 2 * (48 + keys))


def test_tensor_parallelism_cuts_one_of_the_two(llama_7b: ModelShape) -> None:
    held = held_adapters(llama_7b, llama_7b.split(role(2, tp=2), 1), 0, LORA)
    by_outputs = 3 * (HIDDEN + HIDDEN // 2) + 2 * (HIDDEN + MLP // 2)  # A whole, B cut
    by_inputs = (HIDDEN // 2 + HIDDEN) + (MLP // 2 + HIDDEN)
    assert held is not None and held.whole == LAYERS * 8 * (by_outputs + by_inputs)


def test_a_stage_has_those_of_its_layers(llama_7b: ModelShape) -> None:
    split = llama_7b.split(role(2, pp=2), 1)
    halves = [held_adapters(llama_7b, split, stage, LORA) for stage in (0, 1)]
    assert [half.layers for half in halves if half is not None] == [16, 16]
    assert sum(half.whole for half in halves if half is not None) == 19_988_480


def test_all_that_learns_is_in_them(llama_7b: ModelShape) -> None:
    spec, tokens = role(), Tokens(micro_batch=1, longest=1, chunk=1, accumulates=True)
    split = llama_7b.split(spec, 1)
    held = held_adapters(llama_7b, split, 0, LORA)
    need = memory.trained(llama_7b, split, 0, 2, tokens, spec, True, held)
    weights, learnt = llama_7b.num_elements, 19_988_480
    assert need.stays == {"parameters": 2 * weights + 4 * learnt, "optimizer": 8 * learnt}
    assert need.at_work["gradients"] == 4 * learnt


MESH = "actor: {devices: [0, 1]}\ncritic: {devices: [0, 1]}\nrollout: {devices: [2]}\n"


@pytest.mark.parametrize(
    ("reference", "changes", "needed"),
    [
        ("", {}, True),
        ("", {"rank": 8}, False),
        ("", {"rank": 8, "path": "another"}, True),
        ("reference: {devices: [0, 1]}", {"rank": 8}, False),
        ("reference: {devices: [1, 0]}", {"rank": 8}, True),
        ("reference: {devices: [0, 1], dtype: float32}", {"rank": 8}, True),
        ("reference: {devices: [0, 1], parallelism: {tensor_parallel_size: 2}}", {"rank": 8}, True),
    ],
)
def test_a_reference_that_is_the_actor_needs_nothing(reference: str, changes: dict[str, object], needed: bool) -> None:
    config = PPOConfig()
    config.actor.lora.rank = int(str(changes.get("rank", 0)))
    config.reference.path = str(changes["path"]) if "path" in changes else None
    found = budgets(job_of(MESH + reference, config=config), models(), config, None)
    assert [("reference" in budget.needs) for budget in found if 0 in budget.ranks] == [needed]
