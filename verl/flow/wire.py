"""Rows as bytes: a fixed head, then for every column its dtype, its row lengths and its values. No pickle."""

from __future__ import annotations

import struct

import torch
from torch import Tensor

from verl.flow.batch import Rows

HEAD = struct.Struct("<4sHHIQ")
"""Magic, version, number of columns, hand-over number, bytes of the body."""
MAGIC, VERSION = b"verl", 1
COLUMN = struct.Struct("<IIQ")
"""Dtype, number of rows, number of values."""
DTYPES = (torch.int64, torch.float32, torch.bool, torch.uint8, torch.int32, torch.float64, torch.bfloat16)


class ProtocolError(RuntimeError):
    """A message that this program did not expect: two ranks run different programs, or different versions of verl."""


def pack(number: int, columns: list[Rows]) -> tuple[Tensor, Tensor]:
    """(head [20], body [bytes]), both uint8."""
    parts: list[Tensor] = []
    for rows in columns:
        values = rows.values.contiguous()
        parts.append(_bytes(COLUMN.pack(DTYPES.index(values.dtype), len(rows), len(values))))
        parts.append(rows.lengths.contiguous().view(torch.uint8))
        parts.append(values.view(torch.uint8))
    body = torch.cat(parts)
    return _bytes(HEAD.pack(MAGIC, VERSION, len(columns), number, len(body))), body


def body_size(head: Tensor, number: int, num_columns: int, place: str) -> int:
    """Bytes that follow `head`; checks that it is the message that is waited for."""
    magic, version, columns, their_number, size = HEAD.unpack(bytes(head.numpy()))
    if (magic, version) != (MAGIC, VERSION):
        raise ProtocolError(
            f"{place}: not a verl message of version {VERSION}: {bytes(head.numpy())!r}. Run one verl on all nodes."
        )
    if (their_number, columns) != (number, num_columns):
        raise ProtocolError(
            f"{place}: hand-over {number} with {num_columns} columns was awaited, but {their_number} with {columns} "
            f"came. The ranks run different programs: set debug.check_program=true to see where they part."
        )
    return size


def unpack(body: Tensor, num_columns: int, place: str) -> list[Rows]:
    """The columns of a body. Raises ProtocolError where its parts do not add up."""
    columns, at = [], 0
    for number in range(num_columns):
        if at + COLUMN.size > len(body):
            raise ProtocolError(f"{place}: the message ends in column {number} of {num_columns}")
        kind, rows, total = COLUMN.unpack(bytes(body[at : at + COLUMN.size].numpy()))
        at += COLUMN.size
        if kind >= len(DTYPES):
            raise ProtocolError(f"{place}: column {number} has the unknown dtype {kind}. Run one verl on all nodes.")
        if at + rows * torch.int64.itemsize + total * DTYPES[kind].itemsize > len(body):
            raise ProtocolError(f"{place}: the message ends in column {number} of {num_columns}")
        lengths, at = _typed(body, at, rows, torch.int64)
        if (lengths < 0).any() or (lengths > total).any() or int(lengths.sum()) != total:
            raise ProtocolError(f"{place}: column {number} has {total} values, its rows have other lengths")
        values, at = _typed(body, at, total, DTYPES[kind])
        columns.append(Rows(values, lengths))
    if at != len(body):
        raise ProtocolError(f"{place}: {len(body) - at} bytes are left over behind {num_columns} columns")
    return columns


def _typed(body: Tensor, at: int, count: int, dtype: torch.dtype) -> tuple[Tensor, int]:
    end = at + count * dtype.itemsize
    # a clone, since a view of another dtype needs an aligned start
    return body[at:end].clone().view(dtype), end


def _bytes(raw: bytes) -> Tensor:
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8)
