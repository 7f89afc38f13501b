from __future__ import annotations

import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from verl.flow import wire
from verl.flow.batch import Rows
from verl.flow.wire import ProtocolError

INTEGERS = (torch.int64, torch.int32, torch.uint8, torch.bool)
HERE = "rank 1 receiving scores from rank 0"


@st.composite
def rows(draw: st.DrawFn) -> Rows:
    """Any dtype that goes over the wire and any lengths, none at all among them. Floats have any bits, NaN's too."""
    dtype = draw(st.sampled_from(wire.DTYPES))
    lengths = draw(st.lists(st.integers(0, 5), max_size=6))
    raw = draw(st.binary(min_size=sum(lengths) * dtype.itemsize, max_size=sum(lengths) * dtype.itemsize))
    if dtype is torch.bool:
        raw = bytes(byte & 1 for byte in raw)
    values = torch.frombuffer(bytearray(raw), dtype=dtype) if raw else torch.empty(0, dtype=dtype)
    return Rows(values, torch.tensor(lengths, dtype=torch.int64))


def bits(tensor: Tensor) -> list[int]:
    return tensor.contiguous().view(torch.uint8).tolist()


@given(st.lists(rows(), min_size=1, max_size=4), st.integers(0, 2**32 - 1))
def test_columns_come_out_as_they_went_in(columns: list[Rows], number: int) -> None:
    head, body = wire.pack(number, columns)
    assert wire.body_size(head, number, len(columns), HERE) == len(body)
    for before, after in zip(columns, wire.unpack(body, len(columns), HERE), strict=True):
        assert after.values.dtype == before.values.dtype
        assert bits(after.values) == bits(before.values)
        assert after.lengths.tolist() == before.lengths.tolist()


def test_the_layout_is_what_it_says() -> None:
    """Written out by hand, so that two versions of this program can only meet if they agree."""
    head, body = wire.pack(7, [Rows(torch.tensor([1, -1]), torch.tensor([0, 2]))])
    lengths, values = struct.pack("<qq", 0, 2), struct.pack("<qq", 1, -1)
    assert bytes(body.numpy()) == struct.pack("<IIQ", 0, 2, 2) + lengths + values
    assert bytes(head.numpy()) == b"verl" + struct.pack("<HHIQ", 1, 1, 7, 48)


def test_a_view_that_is_not_contiguous_is_packed_by_its_values() -> None:
    column = Rows(torch.arange(6)[::2], torch.tensor([1, 2]))
    (out,) = wire.unpack(wire.pack(0, [column])[1], 1, HERE)
    assert out.values.tolist() == [0, 2, 4]


@given(st.binary(min_size=20, max_size=20))
def test_foreign_bytes_are_no_head(raw: bytes) -> None:
    head = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
    with pytest.raises(ProtocolError, match="rank 1 receiving scores from rank 0"):
        wire.body_size(head, 3, 1, HERE)


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (struct.pack("<4sHHIQ", b"verl", 0, 1, 3, 8), "not a verl message of version 1"),
        (struct.pack("<4sHHIQ", b"verl", 1, 1, 4, 8), "hand-over 3 with 1 columns was awaited, but 4 with 1 came"),
        (struct.pack("<4sHHIQ", b"verl", 1, 2, 3, 8), "hand-over 3 with 1 columns was awaited, but 3 with 2 came"),
    ],
)
def test_another_version_number_or_width_is_named(raw: bytes, said: str) -> None:
    with pytest.raises(ProtocolError, match=said):
        wire.body_size(torch.frombuffer(bytearray(raw), dtype=torch.uint8), 3, 1, HERE)


@given(st.lists(rows(), min_size=1, max_size=3), st.data())
def test_a_truncated_body_is_refused(columns: list[Rows], data: st.DataObject) -> None:
    _, body = wire.pack(0, columns)
    kept = data.draw(st.integers(0, len(body) - 1))
    with pytest.raises(ProtocolError, match=HERE):
        wire.unpack(body[:kept], len(columns), HERE)


@given(st.binary(max_size=200), st.integers(1, 3))
def test_foreign_bytes_never_crash_it(raw: bytes, num_columns: int) -> None:
    body = torch.frombuffer(bytearray(raw), dtype=torch.uint8) if raw else torch.empty(0, dtype=torch.uint8)
    try:
        columns = wire.unpack(body, num_columns, HERE)
    except ProtocolError:
        return
    for column in columns:
        assert len(column.split()) == len(column)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (struct.pack("<IIQ", 99, 0, 0), "column 0 has the unknown dtype 99"),
        (struct.pack("<IIQqq", 0, 1, 1, -1, 5), "column 0 has 1 values, its rows have other lengths"),
        (struct.pack("<IIQqqq", 0, 2, 1, 2**63 - 1, 2, 5), "column 0 has 1 values, its rows have other lengths"),
        (struct.pack("<IIQ", 0, 2**31, 2**61), "the message ends in column 0 of 1"),
        (struct.pack("<IIQqqB", 0, 1, 1, 1, 5, 0), "1 bytes are left over behind 1 columns"),
    ],
)
def test_a_body_that_does_not_add_up_is_named(body: bytes, said: str) -> None:
    with pytest.raises(ProtocolError, match=said):
        wire.unpack(torch.frombuffer(bytearray(body), dtype=torch.uint8), 1, HERE)
