"""Weights on their way in the memory of one GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from verl.generation.vllm.buffer import Layout, num_bytes


class DeviceSlots:
    """Slots for buckets of weights on a device, each a piece of memory of its own.

    Bucket b lies in slot b % slots: its tensors whole, one right behind the other, as vLLM's weight transfer has them.
    """

    def __init__(self, buckets: Sequence[Layout], slots: int, allocate: Callable[[int], Tensor]) -> None:
        """`buckets`: name, shape and dtype of every tensor, in the order of the memory. `allocate`: so many bytes."""
        assert len({dtype for bucket in buckets for _, _, dtype in bucket}) == 1, "so that all of them are aligned"
        self._lengths = [sum(num_bytes(shape, dtype) for _, shape, dtype in bucket) for bucket in buckets]
        self.memory = [allocate(max(self._lengths)) for _ in range(slots)]
        """Of each slot: [bytes of the largest bucket], uint8."""
        self._tensors = [self._lay_out(number, bucket) for number, bucket in enumerate(buckets)]

    @property
    def num_bytes(self) -> int:
        return sum(memory.nbytes for memory in self.memory)

    def tensors(self, bucket: int) -> dict[str, Tensor]:
        """Views of a bucket's tensors by name; others take their place with bucket + slots."""
        return self._tensors[bucket]

    def packed(self, bucket: int) -> Tensor:
        """All of a bucket: [bytes], uint8."""
        return self.memory[bucket % len(self.memory)][: self._lengths[bucket]]

    def _lay_out(self, number: int, bucket: Layout) -> dict[str, Tensor]:
        lengths = [num_bytes(shape, dtype) for _, shape, dtype in bucket]
        parts = self.packed(number).split(lengths)
        return {name: part.view(dtype).view(shape) for (name, shape, dtype), part in zip(bucket, parts, strict=True)}
