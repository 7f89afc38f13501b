"""Packed micro-batches against Hugging Face's own models, one sequence at a time."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from scripts.make_tiny_model import CONFIGS
from tests.unit.model.conftest import load
from verl.model.heads import Head, HeadedModel
from verl.model.packing import Sequences, pack, plan_micro_batches

SHAPES = [(3, 4), (1, 30), (20, 25), (7, 0), (2, 2), (5, 17), (30, 1)]
"""(prompt, response) lengths; the longest sequences are longer than Gemma's sliding window of 16."""
Folder = Callable[..., Path]


def drawn() -> tuple[list[Tensor], list[Tensor]]:
    draws = torch.Generator().manual_seed(1)
    parts = [[torch.randint(3, 300, (n,), generator=draws) for n in shape] for shape in SHAPES]
    return [p for p, _ in parts], [r for _, r in parts]


@torch.no_grad()
def packed(model: HeadedModel, rows: Sequences, temperature: float, capacity: int | None) -> tuple[Tensor, Tensor]:
    """(values, entropies) of all outputs, in the sequences' order."""
    values, entropy = torch.full((rows.num_outputs,), torch.nan), torch.full((rows.num_outputs,), torch.nan)
    wanted = [i for i, count in enumerate(rows.count) if count]
    for planned in plan_micro_batches(rows.lengths, wanted, 64, capacity):
        batch = pack(rows, planned)
        outputs = model(batch, temperature)
        values[batch.tokens] = outputs.values
        if outputs.entropy is not None:
            entropy[batch.tokens] = outputs.entropy
    return values, entropy


@torch.no_grad()
def one_by_one(folder: Path, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies of all response tokens by the whole logits of each sequence alone."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    values, entropy = [], []
    for prompt, response in zip(*drawn(), strict=True):
        ids = torch.cat([prompt, response])
        logits = model(ids[None], use_cache=False).logits[0].double() / temperature
        at = logits.log_softmax(-1)[len(prompt) - 1 : len(ids) - 1]
        values.append(at.gather(-1, response[:, None]).squeeze(-1))
        entropy.append(-(at.exp() * at).sum(-1))
    return torch.cat(values).float(), torch.cat(entropy).float()


@pytest.mark.parametrize("capacity", [None, 64], ids=["rows of the longest", "rows of the budget"])
@pytest.mark.parametrize(
    ("architecture", "kernel"),
    [(name, kernel) for name in CONFIGS for kernel in ("sdpa", "eager") if (name, kernel) != ("gemma2", "sdpa")],
)
def test_logprobs_of_packed_sequences(architecture: str, kernel: str, capacity: int | None, folder: Folder) -> None:
    model = load(folder(architecture), kernel=kernel)
    values, entropy = packed(model, Sequences.responses(*drawn()), 1.0, capacity)
    wanted, wanted_entropy = one_by_one(folder(architecture), 1.0)
    torch.testing.assert_close(values, wanted, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropy, wanted_entropy, rtol=1e-5, atol=1e-5)


def test_at_a_temperature_and_with_a_tied_head(folder: Folder) -> None:
    values, entropy = packed(load(folder("qwen2", tied=True)), Sequences.responses(*drawn()), 0.6, None)
    wanted, wanted_entropy = one_by_one(folder("qwen2", tied=True), 0.6)
    torch.testing.assert_close(values, wanted, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropy, wanted_entropy, rtol=1e-5, atol=1e-5)


def test_a_final_softcap_is_applied(folder: Folder, tmp_path: Path) -> None:
    capped = changed(folder("gemma3"), tmp_path / "model", final_logit_softcapping=2.0)
    values, _ = packed(load(capped), Sequences.responses(*drawn()), 1.0, None)
    wanted, _ = one_by_one(capped, 1.0)
    assert (wanted - one_by_one(folder("gemma3"), 1.0)[0]).abs().max() > 0.1  # the cap makes a difference
    torch.testing.assert_close(values, wanted, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_scores_are_those_of_the_sequence_classifier(reward_folder: Path) -> None:
    rows = Sequences.last_tokens(*drawn())
    scores, _ = packed(load(reward_folder, Head.score), rows, 1.0, None)
    model = AutoModelForSequenceClassification.from_pretrained(reward_folder, dtype=torch.float32).eval()
    wanted = torch.cat([model(ids[None], use_cache=False).logits[0] for ids in rows.ids])
    torch.testing.assert_close(scores, wanted, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_values_are_read_before_each_response_token(folder: Folder) -> None:
    model = load(folder("llama"), Head.token_value, seed=4)
    rows = Sequences.responses(*drawn())
    values, _ = packed(model, rows, 1.0, None)
    decoder = AutoModelForCausalLM.from_pretrained(folder("llama"), dtype=torch.float32).eval().base_model
    wanted = []
    for ids, first, count in zip(rows.ids, rows.first, rows.count, strict=True):
        states = decoder(ids[None], use_cache=False).last_hidden_state[0]
        wanted.append((states @ model.score.weight[0])[first - 1 : first - 1 + count])
    torch.testing.assert_close(values, torch.cat(wanted), rtol=1e-5, atol=1e-5)


def changed(folder: Path, to: Path, **settings: object) -> Path:
    """A copy of a model's folder with other settings in its config.json."""
    shutil.copytree(folder, to)
    file = to / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))
    return to
