"""What a training step's tensors take of memory, counted storage by storage as they come and go."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed._tools.common_utils import get_untyped_storages
from torch.distributed.fsdp import FSDPModule
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from verl.model.load import local_tensor


class Kind(StrEnum):
    parameters = "parameters"
    optimizer = "optimizer"
    gathered = "gathered"
    """Whole parameters that FSDP has made of the ranks' shards."""
    activations = "activations"
    """Kept by autograd for the backward pass, or made again in it (activation checkpointing)."""
    forward = "forward"
    """Else made in a forward pass, or around one."""
    backward = "backward"
    """Else made in a backward pass: gradients, and what they are made of. By itself it counts while none runs, and what
    there is of it then are gradients."""


@dataclass
class _Storage:
    kind: Kind
    known: bool
    """What it is for was said before."""


class Storages(TorchDispatchMode):
    """While it is entered: all that torch's operators make, and what was there before and is `known`.

    It counts after each operator that made something. What one makes and frees again by itself is not seen.
    """

    def __init__(self, known: Mapping[Kind, Iterable[Tensor]]) -> None:
        super().__init__()
        self._storages = WeakIdKeyDictionary()
        for kind, tensors in known.items():
            for tensor in tensors:
                self._storages[tensor.untyped_storage()] = _Storage(kind, known=True)
        self.peak = self.now()
        """By kind, when all of it together was most."""
        self.most = self.now()
        """By kind, when each of them was most by itself."""
        self._hooks = ExitStack()

    def now(self) -> dict[Kind, int]:
        """Bytes by kind."""
        sums = dict.fromkeys(Kind, 0)
        for storage, entry in self._storages.items():
            sums[entry.kind] += storage.nbytes()
        return sums

    def __enter__(self) -> Storages:
        self._hooks.enter_context(torch.autograd.graph.saved_tensors_hooks(self._saved, lambda tensor: tensor))
        return cast(Storages, super().__enter__())

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._hooks.close()

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(is_traceable_wrapper_subclass_type(kind) for kind in types):
            return NotImplemented  # it comes again as an operator on the tensors within
        made = func(*args, **(kwargs or {}))
        new = [self._see(tensor) for tensor in tree_leaves(made) if isinstance(tensor, Tensor)]
        if any(new):
            self._count()
        return made

    def _see(self, tensor: Tensor) -> bool:
        """Whether it is new."""
        seen = len(self._storages)
        for storage in get_untyped_storages(tensor):
            if storage.device.type != "meta" and storage not in self._storages:  # meta: DTensor tries out shapes
                self._storages[storage] = _Storage(_born(), known=False)
        return len(self._storages) > seen

    def _saved(self, tensor: Tensor) -> Tensor:
        for storage in get_untyped_storages(tensor):
            entry = self._storages.get(storage)
            if entry is not None and not entry.known:
                entry.kind = Kind.activations
        return tensor

    def _count(self) -> None:
        sums = self.now()
        if sum(sums.values()) > sum(self.peak.values()):
            self.peak = sums
        for kind, size in sums.items():
            if kind is not Kind.backward or not _in_backward():
                self.most[kind] = max(size, self.most[kind])


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _born() -> Kind:
    """By where the program is: the backward pass computes without gradients, but for what it does again."""
    if not _in_backward():
        return Kind.forward
    return Kind.activations if torch.is_grad_enabled() else Kind.backward


def known_of(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[Kind, list[Tensor]]:
    """A model's shards, what FSDP gathers them into, and the optimizer's state, of a model that has run once.

    Collective over its ranks. Of a storage that is in several lists the last one counts.
    """
    state = [] if optimizer is None else [part for each in optimizer.state.values() for part in each.values()]
    return {
        Kind.gathered: list(_gathered(model)),
        Kind.parameters: [local_tensor(parameter).detach() for parameter in model.parameters()],
        Kind.optimizer: [local_tensor(tensor) for tensor in state if isinstance(tensor, Tensor)],
    }


def _gathered(model: nn.Module) -> Iterator[Tensor]:
    """FSDP fills and empties the same storages each time. Among them are shards of the modules within."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.unshard()
            whole = [local_tensor(parameter).detach() for parameter in module.parameters()]
            module.reshard()
            yield from whole
