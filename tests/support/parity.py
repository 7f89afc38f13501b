"""A model on a layout of ranks against plain Hugging Face in one process: outputs, loss and gradients of a mini-batch.

The reference knows nothing of the engine: one sequence at a time, eager attention, whole logits, autograd.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from scripts.make_tiny_model import make_tiny_model
from tests.support.plain_loop import Batch, make_batch, policy, value
from tests.support.ranks import run_ranks
from verl.config import OptimConfig
from verl.engine.train_engine import EngineSpec, TrainEngine
from verl.flow.job import Job, start_job
from verl.flow.placement import Groups, Placement, make_groups
from verl.model.heads import Head, TokenOutputs
from verl.model.load import hf_parameters
from verl.model.packing import Sequences

Layout = tuple[int, ...]
"""(pipeline stages, data-parallel ranks, tensor-parallel ranks, context-parallel ranks); the last may be left out."""

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama, with biases": {"architecture": "llama", "attention_bias": True, "mlp_bias": True},
    "llama, one KV head": {"architecture": "llama", "num_kv_heads": 1},
    "llama, tied (SmolLM2)": {"architecture": "llama", "num_kv_heads": 2, "tied": True},
    "qwen2": {"tied": True},
    "qwen2, one KV head": {"architecture": "qwen2", "num_kv_heads": 1},
    "qwen3": {},
    "qwen3, one KV head": {"architecture": "qwen3", "num_kv_heads": 1},
    "gemma2": {"tied": True},
    "gemma3": {"tied": True},
    "mistral": {},
    "smollm3": {"tied": True},
    "phi3": {},
    "qwen3_moe": {},
}
"""Arguments of `make_tiny_model`; the architecture is the name where none is said."""

SHAPES = [(3, 9), (1, 20), (7, 0), (5, 5), (2, 1), (12, 3), (4, 4), (1, 1), (9, 14), (3, 3), (6, 2), (2, 8)]
"""(prompt, response) tokens. Some are longer than the tiny models' sliding window of 16."""
SEED, TEMPERATURE, MAX_TOKENS = 11, 0.8, 40


@dataclass(frozen=True)
class Case:
    family: str
    head: Head
    frugal: bool = False
    """Activations are recomputed, and parameters gathered again, in the backward pass: as on a GPU."""

    @property
    def temperature(self) -> float:
        return TEMPERATURE if self.head is Head.lm else 1.0


@dataclass
class Measured:
    """By the reference, or by one rank of a layout: then its share of the loss, and outputs of its own tokens."""

    outputs: Tensor
    """Log-probs or values of all response tokens."""
    entropy: Tensor
    loss: float = 0.0
    gradients: dict[str, Tensor] = field(default_factory=dict)
    norm: float = 0.0


@dataclass(frozen=True)
class Errors:
    loss: float
    """Relative to the loss, or absolute where that is below 1."""
    gradient: float
    """The largest difference in any parameter, relative to that parameter's largest entry."""
    worst: str
    """That parameter."""
    norm: float
    """Relative."""
    outputs: float
    """Absolute, of log-probs, entropies or values."""
    disagreement: float
    """Between the outputs of tensor- and context-parallel ranks, which hold the same rows."""


def make_family(folder: Path, name: str, num_layers: int = 2) -> Path:
    arguments = {"architecture": name} | FAMILIES[name]
    return make_tiny_model(folder / name.replace(", ", "_").replace(" ", "_"), num_layers=num_layers, **arguments)


def batch_of(case: Case) -> Batch:
    return make_batch(SHAPES)


def token_loss(case: Case, batch: Batch) -> Any:
    return (policy if case.head is Head.lm else value)(batch)


def reference(case: Case, folder: Path) -> Measured:
    batch = batch_of(case)
    hf = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    named = dict(hf.named_parameters())
    score: nn.Parameter | None = None
    if case.head is not Head.lm:
        draws = torch.Generator().manual_seed(SEED)
        hidden = hf.config.hidden_size
        score = nn.Parameter(torch.randn(1, hidden, generator=draws) / (hidden + 1))
        named = {f"model.{name}": p for name, p in hf.base_model.named_parameters()} | {"score.weight": score}
    rows = [_row(hf, score, case.temperature, *pair) for pair in zip(batch.prompts, batch.responses, strict=True)]
    outputs, entropy = (torch.cat(column) for column in zip(*rows, strict=True))
    loss = token_loss(case, batch)(outputs, entropy, torch.arange(len(outputs))).sum() / len(outputs)
    loss.backward()
    gradients = {name: p.grad for name, p in named.items() if p.grad is not None}
    norm = torch.cat([g.flatten() for g in gradients.values()]).double().norm().item()
    return Measured(outputs.detach(), entropy.detach(), loss.item(), gradients, norm)


def _row(
    hf: Any, score: nn.Parameter | None, temperature: float, prompt: Tensor, response: Tensor
) -> tuple[Tensor, Tensor]:
    """(log-probs or values of the response's tokens, entropies)"""
    ids, at = torch.cat([prompt, response]), slice(len(prompt) - 1, len(prompt) + len(response) - 1)
    if score is not None:
        values = hf.base_model(ids[None], use_cache=False).last_hidden_state[0, at] @ score[0]
        return values, torch.zeros_like(values)
    logprobs = (hf(ids[None], use_cache=False).logits[0, at] / temperature).log_softmax(-1)
    return logprobs.gather(-1, response[:, None]).squeeze(-1), -(logprobs.exp() * logprobs).sum(-1)


def measure(job: Job, place: Placement, groups: Groups, case: Case, folder: Path) -> Measured:
    """On one rank of the layout; the outputs are empty where the head is not."""
    batch = batch_of(case)
    spec = EngineSpec(
        folder,
        case.head,
        trained=True,
        dtype=torch.float32,
        seed=SEED,
        max_tokens_per_micro_batch=MAX_TOKENS,
        logprob_chunk_tokens=7,
        reshard_after_forward=case.frugal,
        activation_checkpointing=case.frugal,
    )
    engine = TrainEngine(spec, groups, job.device, job.board)
    engine.add_optimizer(OptimConfig(clip_grad=0.0), total_steps=10)
    assert engine.optimizer is not None
    rows = place.inputs.rows(job.rank, len(SHAPES))
    part = slice(rows.start, rows.stop)
    sequences = Sequences.responses(batch.prompts[part], batch.responses[part])
    tokens = torch.cat([batch.tokens(row) for row in rows])
    outputs = engine.forward(sequences, case.temperature)
    if outputs is None:
        measured = Measured(torch.empty(0), torch.empty(0))
    else:
        entropy = torch.zeros_like(outputs.values) if outputs.entropy is None else outputs.entropy
        measured = Measured(outputs.values, entropy)
    losses, total = token_loss(case, batch), sum(len(response) for response in batch.responses)

    def loss(outputs: TokenOutputs, at: Tensor) -> Tensor:
        share = losses(outputs.values, outputs.entropy, tokens[at]).sum() / total
        measured.loss += share.item()
        return share

    def keep(*_: object) -> None:
        measured.gradients = {n: whole(p.grad) for n, p in hf_parameters(engine.model) if p.grad is not None}

    engine.optimizer.adamw.register_step_pre_hook(keep)
    measured.norm, _ = engine.train_step(sequences, range(len(rows)), loss, case.temperature)
    return measured


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def placed(layout: Layout, ranks: Sequence[int]) -> Placement:
    pp, _, tp, cp = (*layout, 1)[:4]
    return Placement("actor", tuple(ranks), tp, pp, cp=cp)


def measure_on_ranks(
    ranks: Sequence[int], layout: Layout, cases: Sequence[Case], folders: Mapping[str, Path]
) -> dict[Case, Measured]:
    """All cases in one job."""
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)  # a hint at speed
    job = start_job(stage_timeout=300, check_program=False)  # many ranks may share few cores
    place = placed(layout, ranks)
    groups = make_groups([place], job.rank, "cpu", job.timeout).get("actor")
    results = {}
    if groups is not None:
        results = {case: measure(job, place, groups, case, folders[case.family]) for case in cases}
    job.close()
    return results


def compare(
    layout: Layout,
    cases: Sequence[Case],
    folders: Mapping[str, Path],
    references: Mapping[Case, Measured],
    ranks: Sequence[int] | None = None,
    timeout: float = 600.0,
) -> dict[Case, Errors]:
    """`ranks`: of the layout, in its order; the first ones where none are given."""
    listed = tuple(range(math.prod(layout)) if ranks is None else ranks)
    results = run_ranks(max(listed) + 1, measure_on_ranks, listed, layout, cases, folders, timeout=timeout)
    place = placed(layout, listed)
    return {case: _errors(place, {rank: results[rank][case] for rank in listed}, references[case]) for case in cases}


def _errors(place: Placement, measured: Mapping[int, Measured], wanted: Measured) -> Errors:
    leaders = [measured[rank] for rank in place.leaders]
    outputs = torch.cat([m.outputs for m in leaders]) - wanted.outputs
    entropy = torch.cat([m.entropy for m in leaders]) - wanted.entropy
    apart = [
        (measured[rank].outputs - measured[group[0]].outputs).abs().max().item()
        for group in place.outputs.groups
        for rank in group
    ]
    gradients = {name: g for m in measured.values() for name, g in m.gradients.items()}
    assert gradients.keys() == wanted.gradients.keys()
    off = {
        name: float((gradients[name] - g).abs().max() / g.abs().max().clamp(min=1e-12))
        for name, g in wanted.gradients.items()
    }
    worst = max(off, key=lambda name: off[name])
    norm = max(abs(m.norm - wanted.norm) / wanted.norm for m in measured.values())
    loss = abs(sum(m.loss for m in leaders) - wanted.loss) / max(1.0, abs(wanted.loss))
    largest = max(outputs.abs().max().item(), entropy.abs().max().item())
    return Errors(loss, off[worst], worst, norm, largest, max(apart))
