"""Memory for messages that cannot be sent from, or received, where their tensors lie."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

Parts = Sequence[Tensor]
"""What one message carries: views of tensors, of any dtype and device."""


class Staging:
    """One piece of host memory that is used again in every step, and grows to what a step needs."""

    def __init__(self, dtype: torch.dtype) -> None:
        """`dtype`: of what is sent."""
        self._memory = torch.empty(0, dtype=dtype)
        self._used = 0

    @property
    def num_bytes(self) -> int:
        return self._memory.nbytes

    def begin(self, messages: Iterable[Parts]) -> None:
        """A step with these messages; those of the last one are done."""
        needed = sum(_numel(parts) for parts in messages if not self._in_place(parts))
        if needed > self._memory.numel():
            self._memory = self._memory.new_empty(needed)
        self._used = 0

    def place(self, parts: Parts) -> Tensor:
        """Memory of the message: the part itself where there is one and it can be sent as it lies."""
        if self._in_place(parts):
            return parts[0]
        start, self._used = self._used, self._used + _numel(parts)
        return self._memory[start : self._used]

    def pack(self, parts: Parts) -> Tensor:
        """The message, cast to the dtype of all messages in the copy that packs it."""
        message = self.place(parts)
        if not self._in_place(parts):
            for part, there in zip(parts, _split(message, parts), strict=True):
                there.copy_(part)
        return message

    def unpack(self, message: Tensor, parts: Parts) -> None:
        """Puts the message, received in what `place` gave for these parts, where it belongs."""
        if not self._in_place(parts):
            for part, here in zip(parts, _split(message, parts), strict=True):
                part.copy_(here)

    def _in_place(self, parts: Parts) -> bool:
        (part, *others) = parts
        as_sent = part.dtype == self._memory.dtype and part.device == self._memory.device and part.is_contiguous()
        return as_sent and not others


def _numel(parts: Parts) -> int:
    return sum(part.numel() for part in parts)


def _split(message: Tensor, parts: Parts) -> list[Tensor]:
    """The message as tensors of the parts' shapes."""
    pieces = message.split([part.numel() for part in parts])
    return [piece.view(part.shape) for piece, part in zip(pieces, parts, strict=True)]
