"""Memory for messages that cannot be sent from, or received, where their tensors lie."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

Parts = Sequence[Tensor]
"""What one message carries: views of tensors, of any dtype and device."""


class Staging:
    """One piece of host memory, used again and again by two steps of a load at a time: one takes its part from the low
    end, the next one from the high end.
    """

    def __init__(self, dtype: torch.dtype, numel: int) -> None:
        """`dtype`: of what is sent. `numel`: what two steps need together."""
        self._memory = torch.empty(numel, dtype=dtype)
        self._most = {False: 0, True: 0}

    @property
    def num_bytes(self) -> int:
        """That have been used. The others have no pages yet."""
        return sum(self._most.values()) * self._memory.itemsize

    def region(self, number: int) -> Region:
        """For step `number`; that of step `number` - 2 is free again."""
        return Region(self, high=number % 2 == 1)

    def take(self, used: int, numel: int, high: bool) -> Tensor:
        """`numel` elements behind the first `used` ones of an end."""
        assert used + numel <= len(self._memory), "the schedule says how much is needed"
        self._most[high] = max(self._most[high], used + numel)
        start = len(self._memory) - used - numel if high else used
        return self._memory[start : start + numel]

    def lies_ready(self, parts: Parts) -> bool:
        """A message of these parts can be sent and received where it lies."""
        (part, *others) = parts
        as_sent = part.dtype == self._memory.dtype and part.device == self._memory.device and part.is_contiguous()
        return as_sent and not others


class Region:
    """The memory of one step's messages."""

    def __init__(self, staging: Staging, high: bool) -> None:
        self._staging, self._high, self._used = staging, high, 0

    def place(self, parts: Parts) -> Tensor:
        """Memory of the message: the part itself where there is one and it can be sent as it lies."""
        if self._staging.lies_ready(parts):
            return parts[0]
        numel = sum(part.numel() for part in parts)
        memory = self._staging.take(self._used, numel, self._high)
        self._used += numel
        return memory

    def pack(self, parts: Parts) -> Tensor:
        """The message, cast to the dtype of all messages in the copy that packs it."""
        message = self.place(parts)
        if message is not parts[0]:
            for part, there in zip(parts, _split(message, parts), strict=True):
                there.copy_(part)
        return message


def unpack(message: Tensor, parts: Parts) -> None:
    """Puts a message where it belongs, if it has not been received there."""
    if message is not parts[0]:
        for part, here in zip(parts, _split(message, parts), strict=True):
            part.copy_(here)


def _split(message: Tensor, parts: Parts) -> list[Tensor]:
    """The message as tensors of the parts' shapes."""
    pieces = message.split([part.numel() for part in parts])
    return [piece.view(part.shape) for piece, part in zip(pieces, parts, strict=True)]
