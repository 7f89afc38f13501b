"""What an engine has learnt, copied aside: it may learn on while the copy is written."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from verl.model.load import local_tensor


class Copies:
    """Room on the CPU for one copy of a rank's shards. It is kept, since new memory costs as much time as the copy."""

    def __init__(self) -> None:
        self._kept: dict[str, Tensor] = {}

    @torch.no_grad()
    def take(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """This rank's part of each tensor as it is now. What was taken before is overwritten."""
        on_gpu = False
        for name, tensor in tensors.items():
            here = local_tensor(tensor)
            on_gpu |= here.is_cuda
            if name not in self._kept:
                self._kept[name] = torch.empty(here.shape, dtype=here.dtype, pin_memory=here.is_cuda)
            self._kept[name].copy_(here, non_blocking=True)
        if on_gpu:
            torch.cuda.current_stream().synchronize()
        return self._kept
