"""AdamW over this rank's shards, its schedule, and clipping by the global norm."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from verl.config import OptimConfig, Schedule
from verl.engine.offload import MOMENT_BYTES_AT_ONCE, MOMENTS, host_like, in_parts, step_in_parts
from verl.model.load import hf_parameters, local_tensor


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


@dataclass(frozen=True)
class Copied:
    """A weight that several ranks hold alike, though they are not on one mesh: each of them has a part of its gradient,
    and makes the same steps with their sum.
    """

    parameter: nn.Parameter
    group: dist.ProcessGroup
    """Those ranks."""

    def add_up(self) -> None:
        assert self.parameter.grad is not None
        dist.all_reduce(local_tensor(self.parameter.grad), group=self.group)


class Optimizer:
    """`step()` clips, updates and clears the gradients of a model that the ranks of `everyone` share."""

    def __init__(
        self,
        model: nn.Module,
        config: OptimConfig,
        total_steps: int,
        everyone: dist.ProcessGroup,
        copied: Copied | None = None,
        offload: bool = False,
        moment_bytes_at_once: int = MOMENT_BYTES_AT_ONCE,
    ) -> None:
        """`everyone`: a gloo group. `offload`: AdamW's moments are in host memory but for the step, when so many bytes
        of them are on the device at a time.
        """
        self.config, self.total_steps, self._everyone, self._copied = config, total_steps, everyone, copied
        self.steps_done, self._offload = 0, offload
        self.parameters = [p for _, p in hf_parameters(model) if p.requires_grad]
        groups = _decay_groups(self.parameters, config)
        if offload:
            groups = in_parts(groups, moment_bytes_at_once)
        # fused: one pass over memory instead of one for each operation
        groups = groups or [{"params": []}]  # a pipeline stage may have no adapter
        self.adamw = torch.optim.AdamW(groups, lr=config.lr, betas=_betas(config), eps=config.eps, fused=True)
        if offload:  # there from the start, so that a run that has too little host memory ends here
            for parameter in self.parameters:
                self.state_of(parameter)

    def step(self) -> tuple[float, float]:
        """(global gradient norm before clipping, learning rate). A norm that is not finite skips the update."""
        rate = learning_rate(self.config, self.steps_done, self.total_steps)
        if self._copied is not None:
            self._copied.add_up()
        norm = self._clip()
        if math.isfinite(norm):
            for group in self.adamw.param_groups:
                group["lr"] = rate
            if self._offload:
                step_in_parts(self.adamw)
            else:
                self.adamw.step()
        self.steps_done += 1
        self.adamw.zero_grad(set_to_none=True)
        return norm, rate

    @torch.no_grad()
    def state_of(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """AdamW's state of a parameter: before the first step what AdamW itself begins with."""
        state = self.adamw.state[parameter]
        if not state:
            make = host_like if self._offload else torch.zeros_like
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            state |= {name: make(parameter) for name in MOMENTS}
        return state

    def states(self) -> Iterator[Tensor]:
        """AdamW's of all parameters. Gradients are not there between steps."""
        for parameter in self.parameters:
            assert parameter.grad is None
            yield from self.state_of(parameter).values()

    def _clip(self) -> float:
        trained = [p for p in self.parameters if p.grad is not None]
        total = torch.tensor(self._square_here(trained), dtype=torch.float64)
        dist.all_reduce(total, group=self._everyone)
        norm = math.sqrt(total)
        if trained and 0 < self.config.clip_grad < norm:
            torch._foreach_mul_(_local_gradients(trained), self.config.clip_grad / norm)
        return norm

    def _square_here(self, trained: list[nn.Parameter]) -> float:
        """This rank's share of the squared norm: what several ranks hold alike, each of them counts in part."""
        if not trained:
            return 0.0
        norms = torch.stack(torch._foreach_norm(_local_gradients(trained))).double().cpu()
        holders = torch.tensor([self._holders(p) for p in trained], dtype=torch.float64)
        return float((norms.square() / holders).sum())

    def _holders(self, parameter: nn.Parameter) -> int:
        """Ranks with the same part of it."""
        copies = 1
        if self._copied is not None and parameter is self._copied.parameter:
            copies = self._copied.group.size()
        if not isinstance(parameter, DTensor):
            return copies
        return copies * math.prod(
            parameter.device_mesh.size(axis)
            for axis, placement in enumerate(parameter.placements)
            if isinstance(placement, Replicate)
        )


def _local_gradients(parameters: list[nn.Parameter]) -> list[Tensor]:
    return [local_tensor(p.grad) for p in parameters if p.grad is not None]


def _betas(config: OptimConfig) -> tuple[float, float]:
    first, second = config.betas
    return first, second


def _decay_groups(parameters: list[nn.Parameter], config: OptimConfig) -> list[dict[str, Any]]:
    """Biases and norm weights are vectors; they are not decayed."""
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]
