"""Degrees that do not suit the model or the nodes, with the exact message."""

import pytest

from tests.support.advice import job_of, models, shape
from verl.advise.degrees import spanning, torn_copies, unsuitable
from verl.advise.model import ModelShape
from verl.model.heads import Head

WIDE = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 6, "intermediate_size": 96, "vocab_size": 320}


def told(text: str, nodes: str | None = None, **sizes: int | bool) -> list[str]:
    job = job_of(text, nodes)
    return [*spanning(job), *unsuitable(job, models(**sizes))]


def test_what_suits_is_not_spoken_of():
    text = """
    actor: {devices: [0-7], parallelism: {tensor_parallel_size: 4, pipeline_parallel_size: 2}}
    critic: {devices: [0-3], parallelism: {pipeline_parallel_size: 2}}
    rollout: {devices: [0-7], tensor_parallel_size: 8}
    """
    assert told(text, **WIDE) == []


def test_heads_that_do_not_split():
    (message,) = told("actor:\n  devices: [0-3]\n  parallelism:\n    tensor_parallel_size: 4\nrollout: {devices: [0]}")
    assert message == (
        "mesh.yaml:4: actor.parallelism.tensor_parallel_size: 4: does not go into the model's num_attention_heads 6; "
        "set it to 1 or 2 (the model)"
    )


def test_a_vocabulary_that_does_not_split():
    (message,) = told(
        "actor: {devices: [0-3], parallelism: {tensor_parallel_size: 2}}\nrollout: {devices: [0]}", vocab_size=321
    )
    assert (
        message
        == (
            "mesh.yaml:1: actor.parallelism.tensor_parallel_size: 2: does not go into the model's vocab_size 321; "
            "set it to 1 or 3 (the model)"
        )
        or "vocab_size 321" in message
    )


@pytest.mark.parametrize(("heads", "tp", "fits"), [(2, 8, True), (4, 2, True), (8, 8, True), (3, 2, False)])
def test_key_heads_divide_or_are_shared(heads: int, tp: int, fits: bool):
    text = f"actor: {{devices: [0-7], parallelism: {{tensor_parallel_size: {tp}}}}}\nrollout: {{devices: [0]}}"
    sizes = {"num_attention_heads": 24, "num_key_value_heads": heads, "head_dim": 2, "intermediate_size": 96}
    assert (told(text, **sizes, vocab_size=320) == []) == fits


def test_more_stages_than_layers():
    text = "actor: {devices: [0-3], parallelism: {pipeline_parallel_size: 4}}\nrollout: {devices: [0]}"
    (message,) = told(text)
    assert message == (
        "mesh.yaml:1: actor.parallelism.pipeline_parallel_size: 4: the model has 3 layers; set it to 3 or less "
        "(the model)"
    )


def test_more_parts_of_stages_than_layers():
    text = "actor: {devices: [0-1], parallelism: {pipeline_parallel_size: 2, virtual_stages: 2}}\n"
    (message,) = told(text + "rollout: {devices: [0]}")
    assert message == (
        "mesh.yaml:1: actor.parallelism.virtual_stages: 2 stages of 2 parts for the 3 layers of the model; set it to 1 "
        "or less"
    )


def test_a_copy_on_two_nodes_where_one_would_do():
    text = """
    actor:
      devices: ["a:0-3", "b:0-3"]
      parallelism:
        fsdp_size: %s
    critic: {devices: ["a:0", "b:0-2"], parallelism: {fsdp_size: 2}}
    rollout: {devices: ["a:0"]}
    """
    assert list(torn_copies(job_of(text % 8))) == [
        "mesh.yaml:6: critic.parallelism.fsdp_size: 2: a copy of the model lies on several nodes (a:0, b:0), between "
        "which every layer is then gathered; list the 2 devices of each copy one after the other from one node, or set "
        "fsdp_size to what a node has room for"
    ]
    for size in (1, 2, 4):
        assert len(list(torn_copies(job_of(text.replace('"a:0", "b:0-2"', '"a:0-1", "b:0-1"') % size)))) == 0
    crossed = text.replace('"a:0-3", "b:0-3"', '"a:0-1", "b:0-1", "a:2-3", "b:2-3"')
    assert "mesh.yaml:5: actor.parallelism.fsdp_size: 4: " in next(torn_copies(job_of(crossed % 4)))


def test_a_rollout_that_does_not_split():
    (message,) = told("actor: {devices: [0]}\nrollout:\n  devices: [0-3]\n  tensor_parallel_size: 4")
    assert message == (
        "mesh.yaml:4: rollout.tensor_parallel_size: 4 does not suit the model: it does not divide 6 attention heads; "
        "with 4 devices it may be 1, 2"
    )


def test_an_engine_fills_an_uneven_vocabulary_up_by_itself():
    assert told("actor: {devices: [0]}\nrollout: {devices: [0-1], tensor_parallel_size: 2}", vocab_size=321) == []


def test_a_replica_on_two_nodes():
    text = """actor: {devices: ["a:0"]}
rollout:
  devices: ["a:0", "b:0", "b:1", "b:2"]
  tensor_parallel_size: 2
"""
    (message,) = told(text)
    assert message == (
        "mesh.yaml:3: rollout.devices: replica 0 (a:0, b:0) lies on 2 nodes, and an engine runs on one; list the 2 "
        "devices of each replica (tensor_parallel_size) one after the other from one node, or lower "
        "tensor_parallel_size"
    )


def test_a_model_without_a_plan():
    (message,) = unsuitable(
        job_of("actor: {devices: [0-1], parallelism: {tensor_parallel_size: 2}}\nrollout: {devices: [0]}"),
        {"actor": plain_gpt()},
    )
    assert message.startswith(
        "mesh.yaml:1: actor.parallelism.tensor_parallel_size: 2: transformers has no tensor-parallel plan"
    )


def plain_gpt() -> ModelShape:
    return shape("stablelm", num_key_value_heads=6)


def test_every_role_is_looked_at_and_one_that_follows_the_actor_is_not_told_twice():
    text = """
    actor: {devices: [0-3], parallelism: {tensor_parallel_size: 4}}
    critic: {devices: [0-3], parallelism: {tensor_parallel_size: 4}}
    rollout: {devices: [0-3], tensor_parallel_size: 4}
    """
    assert [message.split(": ")[1] for message in told(text)] == [
        "actor.parallelism.tensor_parallel_size",
        "critic.parallelism.tensor_parallel_size",
        "rollout.tensor_parallel_size",
    ]


def test_a_role_whose_model_is_not_known_is_left_alone():
    job = job_of("actor: {devices: [0-3], parallelism: {tensor_parallel_size: 4}}\nrollout: {devices: [0]}")
    assert list(unsuitable(job, {"critic": shape(head=Head.token_value)})) == []


def test_rows_that_the_heads_cannot_be_shared_out_for():
    (message,) = told("actor:\n  devices: [0-3]\n  parallelism:\n    context_parallel_size: 4\nrollout: {devices: [0]}")
    assert message == (
        "mesh.yaml:4: actor.parallelism.context_parallel_size: 4: does not go into the model's num_attention_heads 6 "
        "and num_key_value_heads 2; set it to 1 or 2 or 6 (the model)"
    )


def test_an_engine_in_the_ranks_is_cut_as_training_cuts_and_may_lie_on_several_nodes():
    """vLLM fills an uneven vocabulary up by itself; its replicas lie on one node each."""
    text = """
    actor: {{devices: ["node0:0"]}}
    rollout: {{devices: ["node0:1", "node1:1"], tensor_parallel_size: 2, backend: {backend}}}
    """
    (vllm,) = told(text.format(backend="vllm"), "node0:2, node1:2", **(WIDE | {"vocab_size": 321}))
    assert "replica 0 (node0:1, node1:1) lies on 2 nodes" in vllm
    (torch,) = told(text.format(backend="torch"), "node0:2, node1:2", **(WIDE | {"vocab_size": 321}))
    assert torch == (
        "mesh.yaml:3: rollout.tensor_parallel_size: 2: does not go into the model's vocab_size 321 (the model); set it "
        "to 1, or use backend vllm"
    )
