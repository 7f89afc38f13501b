"""Messages packed from tensors and unpacked into them."""

from __future__ import annotations

import torch

from verl.reshard.staging import Staging


def test_parts_are_cast_and_packed_and_come_back() -> None:
    staging = Staging(torch.bfloat16)
    matrix, vector = torch.randn(6, 4), torch.randn(3)
    parts = [matrix[1:4, 1:3], vector]
    staging.begin([parts])
    message = staging.pack(parts)
    assert (message.dtype, message.numel()) == (torch.bfloat16, 9)
    there = [torch.zeros(3, 2, dtype=torch.bfloat16), torch.zeros(3, dtype=torch.bfloat16)]
    Staging(torch.bfloat16).unpack(message, there)
    assert torch.equal(there[0], matrix[1:4, 1:3].to(torch.bfloat16))
    assert torch.equal(there[1], vector.to(torch.bfloat16))


def test_a_part_that_lies_as_it_is_sent_needs_no_memory() -> None:
    staging = Staging(torch.float32)
    tensor = torch.randn(6, 4)
    staging.begin([[tensor[2:4]]])
    assert staging.pack([tensor[2:4]]).data_ptr() == tensor[2:4].data_ptr()
    assert staging.place([tensor[2:4]]).data_ptr() == tensor[2:4].data_ptr()
    assert staging.num_bytes == 0


def test_messages_of_a_step_lie_apart_and_those_of_the_next_take_their_place() -> None:
    staging = Staging(torch.float32)
    first, second = [torch.ones(2), torch.ones(3)], [torch.full((2, 2), 2.0)[:, :1]]
    staging.begin([first, second])
    a, b = staging.pack(first), staging.pack(second)
    assert a.tolist() == [1.0] * 5 and b.tolist() == [2.0] * 2
    assert staging.num_bytes == 7 * 4
    staging.begin([second])
    assert staging.pack(second).data_ptr() == a.data_ptr()
    assert staging.num_bytes == 7 * 4
