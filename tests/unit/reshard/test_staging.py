"""Messages packed from tensors and unpacked into them."""

from __future__ import annotations

import torch

from verl.reshard.staging import Staging, unpack


def test_parts_are_cast_and_packed_and_come_back() -> None:
    region = Staging(torch.bfloat16, 9).region(0)
    matrix, vector = torch.randn(6, 4), torch.randn(3)
    message = region.pack([matrix[1:4, 1:3], vector])
    assert (message.dtype, message.numel()) == (torch.bfloat16, 9)
    there = [torch.zeros(3, 2, dtype=torch.bfloat16), torch.zeros(3, dtype=torch.bfloat16)]
    unpack(message, there)
    assert torch.equal(there[0], matrix[1:4, 1:3].to(torch.bfloat16))
    assert torch.equal(there[1], vector.to(torch.bfloat16))


def test_a_part_that_lies_as_it_is_sent_needs_no_memory() -> None:
    staging = Staging(torch.float32, 0)
    region, tensor = staging.region(0), torch.randn(6, 4)
    assert region.pack([tensor[2:4]]).data_ptr() == tensor[2:4].data_ptr()
    assert region.place([tensor[2:4]]).data_ptr() == tensor[2:4].data_ptr()
    assert staging.num_bytes == 0
    part = tensor[2:4]
    before = part._version
    unpack(part, [part])
    assert part._version == before, "it has been received where it belongs"


def test_two_steps_messages_lie_apart_and_those_of_the_third_take_the_place_of_the_first() -> None:
    staging = Staging(torch.float32, 7)
    strided = [torch.full((2, 2), 3.0)[:, :1]]
    first = staging.region(0).pack([torch.ones(2), torch.ones(1)])
    region = staging.region(1)
    second, more = region.pack(strided), region.pack(strided)
    assert (first.tolist(), second.tolist(), more.tolist()) == ([1.0] * 3, [3.0] * 2, [3.0] * 2)
    assert staging.num_bytes == 7 * 4
    assert staging.region(2).pack([torch.zeros(1), torch.zeros(2)]).data_ptr() == first.data_ptr()
    assert more.tolist() == [3.0] * 2, "the step in between is not overwritten"
