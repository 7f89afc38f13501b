"""Tiny models in two forms: as Hugging Face runs them, and in the engine under test."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from scripts.make_tiny_model import make_tiny_model
from verl.generation.inprocess import TorchEngine
from verl.model.pieces import pieces

GEMMA3_LAYERS = ["sliding_attention", "sliding_attention", "full_attention"]
"""Both kinds; the tiny model's window is 16."""


@dataclass(frozen=True)
class Tiny:
    folder: Path
    hf: PreTrainedModel
    """The oracle: Hugging Face's own attention and cache."""

    def engine(
        self,
        max_num_seqs: int = 64,
        dtype: torch.dtype = torch.float32,
        on_progress: Callable[[], None] = lambda: None,
    ) -> TorchEngine:
        """With the model's weights loaded."""
        engine = TorchEngine(str(self.folder), dtype, torch.device("cpu"), max_num_seqs, False, on_progress)
        self.copy_weights(engine)
        engine.commit(version=0)
        return engine

    def copy_weights(self, engine: TorchEngine) -> None:
        with torch.no_grad():
            named = self.hf.named_parameters()
            source = {piece.name: p[piece.index] for name, p in named for piece in pieces(name, p.shape)}
            for name, target in engine.weights().items():
                target.copy_(source[name])


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Tiny]]:
    """A tiny random model by architecture, float32. Gemma's head is tied, as it is in every released one."""
    made: dict[str, Tiny] = {}

    def make(architecture: str) -> Tiny:
        if architecture not in made:
            folder = tmp_path_factory.mktemp(architecture)
            num_layers = len(GEMMA3_LAYERS) if architecture == "gemma3" else 2
            make_tiny_model(folder, architecture, num_layers=num_layers, tied=architecture == "gemma3")
            if architecture == "gemma3":
                config = json.loads((folder / "config.json").read_text())
                (folder / "config.json").write_text(json.dumps(config | {"layer_types": GEMMA3_LAYERS}))
            hf = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
            made[architecture] = Tiny(folder, hf)
        return made[architecture]

    yield make
