"""AdamW over this rank's shards, its schedule, and clipping by the global norm."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from verl.config import OptimConfig, Schedule
from verl.model.heads import HeadedModel
from verl.model.load import hf_parameters


def learning_rate(config: OptimConfig, step: int, total_steps: int) -> float:
    """The rate of optimizer step `step` (0-based): a linear warm-up, then the schedule down to 0 at `total_steps`.

    Step s of W warm-up steps has (s + 1) / W of the peak, so that no step is taken with rate 0.
    """
    if step < config.lr_warmup_steps:
        return config.lr * (step + 1) / config.lr_warmup_steps
    if config.lr_scheduler is Schedule.constant:
        return config.lr
    span = max(1, total_steps - config.lr_warmup_steps)
    left = max(0.0, 1.0 - (step - config.lr_warmup_steps) / span)
    return config.lr * (left if config.lr_scheduler is Schedule.linear else 0.5 * (1 - math.cos(math.pi * left)))


class Optimizer:
    """`step()` clips, updates and clears the gradients of a sharded model."""

    def __init__(self, model: HeadedModel, config: OptimConfig, total_steps: int) -> None:
        self.config, self.total_steps = config, total_steps
        self.steps_done = 0
        self.parameters = [p for _, p in hf_parameters(model) if p.requires_grad]
        # fused: one pass over memory instead of one for each operation
        self.adamw = torch.optim.AdamW(
            _decay_groups(self.parameters, config), lr=config.lr, betas=_betas(config), eps=config.eps, fused=True
        )

    def step(self) -> tuple[float, float]:
        """(global gradient norm before clipping, learning rate). A norm that is not finite skips the update."""
        rate = learning_rate(self.config, self.steps_done, self.total_steps)
        norm = self._clip()
        if math.isfinite(norm):
            for group in self.adamw.param_groups:
                group["lr"] = rate
            self.adamw.step()
        self.steps_done += 1
        self.adamw.zero_grad(set_to_none=True)
        return norm, rate

    def _clip(self) -> float:
        grads = [p.grad for p in self.parameters if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(grads, foreach=True)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        if self.config.clip_grad > 0:
            torch.nn.utils.clip_grads_with_norm_(
                self.parameters, self.config.clip_grad, _like_grads(norm, grads), foreach=True
            )
        return norm.item()


def _like_grads(norm: Tensor, grads: list[Tensor]) -> Tensor:
    return norm.to(grads[0].device) if grads else norm


def _betas(config: OptimConfig) -> tuple[float, float]:
    first, second = config.betas
    return first, second


def _decay_groups(parameters: list[nn.Parameter], config: OptimConfig) -> list[dict[str, object]]:
    """Biases and norm weights are vectors; they are not decayed."""
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]
