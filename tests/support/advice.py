"""Meshes held against small models, for the tests of `verl.advise`."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from transformers import AutoConfig

from verl.advise.job import Job, imagine, nodes_of, read_nodes
from verl.advise.model import ModelShape, shape_of
from verl.config import PPOConfig
from verl.mesh.parse import parse
from verl.model.heads import Head


@cache
def shape(kind: str = "llama", head: Head = Head.lm, **sizes: int | bool) -> ModelShape:
    """A small model's. Its sizes are all different, so that none is taken for another."""
    small: dict[str, int | bool] = {
        "num_hidden_layers": 3,
        "hidden_size": 48,
        "intermediate_size": 112,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": 320,
        "tie_word_embeddings": False,
    }
    return shape_of(AutoConfig.for_model(kind, **small | sizes), "the model", head)


def models(**sizes: int | bool) -> Mapping[str, ModelShape]:
    """Of every role that has a model of its own in a plain PPO run."""
    actor = shape(**sizes)
    return {"actor": actor, "reference": actor, "rollout": actor, "critic": shape(head=Head.token_value, **sizes)}


def job_of(text: str, nodes: str | None = None, config: PPOConfig | None = None) -> Job:
    """A mesh in the job that it names, or in one of these nodes."""
    mesh = parse(text, "mesh.yaml")
    return imagine(mesh, nodes_of(mesh) if nodes is None else read_nodes(nodes), config or PPOConfig())
