"""Host memory for what a device has no room for: activations between two passes, AdamW's moments between two steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from verl.model.load import local_tensor

MOMENTS = ("exp_avg", "exp_avg_sq")
"""AdamW's names."""
MOMENT_BYTES_AT_ONCE = 256 << 20
"""On a device while it makes a step, unless one parameter has more."""
_REMEMBERED = 8
"""Tensors that were saved last and may be saved again: all projections of a layer save the same input."""


class HostActivations:
    """What autograd saves in a forward pass goes to host memory, and comes back when the backward pass asks for it.

    Weights stay where they are: FSDP itself frees them and gathers them again. On a CPU the copies are made, too, and
    serve no purpose.
    """

    def __init__(self, model: nn.Module) -> None:
        """`model`: sharded already, so that FSDP's hooks have gathered a module's weights when the ones here run."""
        self._weights: dict[nn.Module, set[int]] = {}  # storages of the modules that are running
        self._recent: deque[tuple[Tensor, int, Tensor]] = deque(maxlen=_REMEMBERED)  # (source, its version, copy)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.register_forward_pre_hook(self._begin)
                module.register_forward_hook(self._end)

    @contextmanager
    def kept(self) -> Iterator[None]:
        """To be entered for a forward pass."""
        self._weights.clear()  # a recomputation in a backward pass stops in the midst of a layer
        with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
            yield
        self._recent.clear()

    def _begin(self, module: nn.Module, _: Any) -> None:
        self._weights[module] = {_storage(local_tensor(parameter)) for parameter in module.parameters()}

    def _end(self, module: nn.Module, *_: Any) -> None:
        # what FSDP frees now may be an activation's memory next
        self._weights.pop(module, None)

    def _pack(self, saved: Tensor) -> tuple[Tensor, torch.device]:
        saved = saved.detach()
        if any(_storage(saved) in storages for storages in self._weights.values()):
            return saved, saved.device
        for source, version, host in self._recent:
            if saved.dtype == source.dtype and saved.is_set_to(source) and saved._version == version:
                return host, saved.device
        # copies are in the order of the stream that computes, so that nothing has to be waited for
        host = torch.empty_like(saved, device="cpu", pin_memory=saved.device.type == "cuda")
        self._recent.append((saved, saved._version, host.copy_(saved, non_blocking=True)))
        return host, saved.device

    def _unpack(self, packed: tuple[Tensor, torch.device]) -> Tensor:
        kept, device = packed
        return kept.to(device, non_blocking=True)


def host_like(parameter: Tensor) -> Tensor:
    """Zeros of a parameter's shape, and of its sharding, in host memory."""
    return torch.zeros_like(parameter, device="cpu", pin_memory=parameter.device.type == "cuda")


def in_parts(groups: Sequence[dict[str, Any]], most_bytes: int) -> list[dict[str, Any]]:
    """An optimizer's parameter groups cut so that the moments of each part have at most so many bytes, or belong to one
    parameter.
    """
    parts: list[dict[str, Any]] = []
    for group in groups:
        room = 0
        for parameter in group["params"]:
            size = len(MOMENTS) * local_tensor(parameter).nbytes
            if size > room:
                parts.append(group | {"params": []})
                room = most_bytes
            parts[-1]["params"].append(parameter)
            room -= size
    return parts


def step_in_parts(adamw: torch.optim.AdamW) -> None:
    """A step, with one parameter group after the other: the moments of one are on the device at a time."""
    groups = adamw.param_groups
    try:
        for group in groups:
            adamw.param_groups = [group]
            with _moments_on_device(adamw, group["params"]):
                adamw.step()
    finally:
        adamw.param_groups = groups


@contextmanager
def _moments_on_device(adamw: torch.optim.AdamW, parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    kept = [(adamw.state[p], name, adamw.state[p][name], p.device) for p in parameters for name in MOMENTS]
    for state, name, host, device in kept:
        state[name] = torch.empty_like(host, device=device).copy_(host, non_blocking=True)
    yield
    for state, name, host, _ in kept:
        host.copy_(state[name])
        state[name] = host


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
