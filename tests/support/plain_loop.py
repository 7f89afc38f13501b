"""The reference for the training engine: one process, Hugging Face's model, one sequence at a time, torch's AdamW."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from verl.config import OptimConfig

TokenLoss = Callable[[Tensor, Tensor | None, Tensor], Tensor]
"""(log-probs or values [k], entropies [k], which of all response tokens they are [k]) -> losses [k]"""


@dataclass(frozen=True)
class Batch:
    """Rows of a batch with random tokens, and what the losses need of each response token."""

    prompts: list[Tensor]
    responses: list[Tensor]
    row_weights: list[float]
    old: Tensor
    advantages: Tensor

    def tokens(self, row: int) -> Tensor:
        """Where the row's tokens stand among all."""
        start = sum(len(r) for r in self.responses[:row])
        return torch.arange(start, start + len(self.responses[row]))


def make_batch(shapes: list[tuple[int, int]], row_weights: list[float] | None = None) -> Batch:
    """`shapes`: (prompt, response) lengths."""
    draws = torch.Generator().manual_seed(len(shapes))
    prompts = [torch.randint(3, 300, (p,), generator=draws) for p, _ in shapes]
    responses = [torch.randint(3, 300, (r,), generator=draws) for _, r in shapes]
    total = sum(r for _, r in shapes)
    # tiny random models give each token about 1 / vocabulary, so that ratios to these are near 1 and some are clipped
    old = -5.8 + 0.3 * torch.randn(total, generator=draws)
    return Batch(prompts, responses, row_weights or [1.0] * len(shapes), old, torch.randn(total, generator=draws))


def policy(batch: Batch) -> TokenLoss:
    """PPO's clipped objective with an entropy bonus."""

    def loss(logprobs: Tensor, entropy: Tensor | None, at: Tensor) -> Tensor:
        assert entropy is not None
        ratio = (logprobs - batch.old[at]).exp()
        gain = torch.minimum(ratio * batch.advantages[at], ratio.clamp(0.8, 1.2) * batch.advantages[at])
        return -gain - 0.01 * entropy

    return loss


def value(batch: Batch) -> TokenLoss:
    """Half the squared distance to a target."""

    def loss(values: Tensor, entropy: Tensor | None, at: Tensor) -> Tensor:
        return 0.5 * (values - batch.advantages[at]).square()

    return loss


@dataclass
class Steps:
    """What two optimizer steps saw and left."""

    before: Tensor
    """Log-probs or values of all response tokens before the first step."""
    after: Tensor = field(default_factory=lambda: torch.empty(0))
    """And after the last."""
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    """Clipped, by parameter, of each step."""
    parameters: dict[str, Tensor] = field(default_factory=dict)


class Plain(nn.Module):
    """Named as in the folder: the decoder's parameters, and `lm_head.weight` or `score.weight`."""

    hf: Any

    def __init__(self, folder: Path, head_seed: int | None) -> None:
        """`head_seed`: of a new value head; None: the language-model head."""
        super().__init__()
        self.hf = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.score: nn.Parameter | None = None
        if head_seed is not None:
            hidden = self.hf.config.hidden_size
            draws = torch.Generator().manual_seed(head_seed)
            self.score = nn.Parameter(torch.randn(1, hidden, generator=draws) / (hidden + 1))

    def named(self) -> dict[str, nn.Parameter]:
        if self.score is None:
            return dict(self.hf.named_parameters())
        base = {f"model.{name}": parameter for name, parameter in self.hf.base_model.named_parameters()}
        return {**base, "score.weight": self.score}

    def outputs(self, prompt: Tensor, response: Tensor) -> tuple[Tensor, Tensor | None]:
        ids = torch.cat([prompt, response])
        at = slice(len(prompt) - 1, len(ids) - 1)
        if self.score is not None:
            states = self.hf.base_model(ids[None], use_cache=False).last_hidden_state[0]
            return states[at] @ self.score[0], None
        logprobs = self.hf(ids[None], use_cache=False).logits[0, at].log_softmax(-1)
        return logprobs.gather(-1, response[:, None]).squeeze(-1), -(logprobs.exp() * logprobs).sum(-1)


def train(
    folder: Path,
    head_seed: int | None,
    batch: Batch,
    mini_batches: list[list[int]],
    token_loss: TokenLoss,
    config: OptimConfig,
    total_steps: int,
) -> Steps:
    """One step a mini-batch, its loss the mean over the tokens of its rows of weight 1; linear schedule to 0."""
    return train_model(Plain(folder, head_seed), batch, mini_batches, token_loss, config, total_steps)


def train_model(
    model: Plain,
    batch: Batch,
    mini_batches: list[list[int]],
    token_loss: TokenLoss,
    config: OptimConfig,
    total_steps: int,
) -> Steps:
    """The same of a model that is there."""
    named = model.named()
    decayed = [p for p in named.values() if p.ndim == 2]
    other = [p for p in named.values() if p.ndim < 2]
    groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": other, "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, lr=config.lr, betas=(config.betas[0], config.betas[1]), eps=config.eps)
    schedule = torch.optim.lr_scheduler.LinearLR(adamw, 1.0, 0.0, total_iters=total_steps)
    steps = Steps(before=_all_values(model, batch))
    for rows in mini_batches:
        live = [row for row in rows if batch.row_weights[row]]
        count = sum(len(batch.responses[row]) for row in live)
        loss = torch.zeros(())
        for row in live:
            outputs = model.outputs(batch.prompts[row], batch.responses[row])
            loss = loss + token_loss(*outputs, batch.tokens(row)).sum() / count
        loss.backward()
        steps.losses.append(loss.item())
        steps.norms.append(nn.utils.clip_grad_norm_(named.values(), config.clip_grad).item())
        steps.rates.append(float(schedule.get_last_lr()[0]))
        steps.gradients.append({name: p.grad.clone() for name, p in named.items() if p.grad is not None})
        adamw.step()
        adamw.zero_grad()
        schedule.step()
    steps.after = _all_values(model, batch)
    steps.parameters = {name: p.detach().clone() for name, p in named.items()}
    return steps


@torch.no_grad()
def _all_values(model: Plain, batch: Batch) -> Tensor:
    return torch.cat([model.outputs(p, r)[0] for p, r in zip(batch.prompts, batch.responses, strict=True)])
