"""Tiny models, made once, and the way from a folder to a model without ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from scripts.make_tiny_model import make_tiny_model, make_tiny_reward_model
from verl.model.heads import Head, HeadedModel
from verl.model.load import attention, load_shards, materialise, meta_model, read_config


def load(folder: Path, head: Head = Head.lm, kernel: str = "auto", seed: int = 0) -> HeadedModel:
    config = read_config(folder, False)
    kernel = attention(kernel, torch.device("cpu"), config)
    model = meta_model(config, head, torch.float32, kernel, chunk_tokens=8, trust_remote_code=False)
    materialise(model, torch.device("cpu"))
    load_shards(model, folder, seed, lambda: None)
    return model.eval()


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`folder(architecture, tied)`: a language model of two layers."""
    made: dict[tuple[str, bool], Path] = {}

    def make(architecture: str, tied: bool = False) -> Path:
        key = architecture, tied
        if key not in made:
            path = tmp_path_factory.mktemp(architecture)
            made[key] = make_tiny_model(path, architecture, num_layers=2, tied=tied)
        return made[key]

    return make


@pytest.fixture(scope="session")
def reward_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_reward_model(tmp_path_factory.mktemp("reward"), "qwen2")
