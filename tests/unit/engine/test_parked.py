"""Memory that leaves, and whoever has a view of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from verl.engine import parked
from verl.engine.parked import Lasting, Parked
from verl.errors import UserError

CPU = torch.device("cpu")


def park(*tensors: Tensor, frozen: Tensor | None = None) -> Parked:
    lasting = [Lasting(tensor, changes=True) for tensor in tensors]
    lasting += [] if frozen is None else [Lasting(frozen, changes=False)]
    return Parked(lambda: lasting, CPU, lambda: None)


@contextmanager
def absence(away: Parked) -> Iterator[None]:
    """They come back in any case: pytest shows the tensors of a test that fails, which cannot be read meanwhile."""
    away.leave()
    try:
        yield
    finally:
        away.come_back()


def size(tensor: Tensor) -> int:
    return tensor.untyped_storage().nbytes()


def test_every_view_of_a_memory_sees_it_again():
    base = torch.arange(12.0)
    views = [base.view(3, 4).t(), base[5:], base.view(torch.int32)]
    expected = [view.clone() for view in views]
    away = park(views[0], views[1])
    with absence(away):
        assert size(base) == 0 and away.away
    assert size(base) == 48 and not away.away
    assert all(torch.equal(view, known) for view, known in zip(views, expected, strict=True))


dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool])


@given(st.lists(st.tuples(st.integers(0, 700), dtypes), min_size=1, max_size=6), st.data())
def test_what_is_away_is_read_as_it_was(memories: list[tuple[int, torch.dtype]], data: st.DataObject):
    whole = [torch.arange(count).to(dtype) for count, dtype in memories]
    views = []
    for memory in whole:
        start, step = data.draw(st.integers(0, len(memory))), data.draw(st.integers(1, 3))
        views.append(memory[start::step])
    expected = [view.clone() for view in views]
    away = park(*whole)
    for _ in range(2):
        strides = [view.stride() for view in views]
        with absence(away):
            for view, known in zip(views, expected, strict=True):
                now = away.now(view)
                addresses = {now.data_ptr(), view.data_ptr()}
                assert torch.equal(now, known) and now.stride() == strides.pop(0)
                assert len(addresses) == 2 or not known.numel()
        for view, known in zip(views, expected, strict=True):
            assert away.now(view) is view and torch.equal(view, known)
            if view.dtype is torch.float32:
                view += 1
                known += 1


def test_what_is_frozen_is_copied_once():
    trained, frozen = torch.zeros(3), torch.ones(3)
    away = park(trained, frozen=frozen)
    for number in range(3):
        with absence(away):
            assert (away.now(trained).tolist(), away.now(frozen).tolist()) == ([number] * 3, [1] * 3)
        trained += 1
        frozen += 1  # nobody may: it shows that the host's copy is the first one


def test_what_somebody_else_computes_with_stays():
    used, other = torch.ones(4), torch.ones(4)
    away = park(used, other)
    away.stay([used[:2]])
    with absence(away):
        sizes, read = [size(used), size(other)], away.now(used)
    assert sizes == [16, 0] and read is used


def test_memory_that_cannot_be_resized_stays(tmp_path: Path):
    (tmp_path / "file").write_bytes(bytes(16))
    mapped = torch.from_file(str(tmp_path / "file"), shared=True, size=4, dtype=torch.float32)
    away = park(mapped, torch.frombuffer(bytearray(16), dtype=torch.float32), torch.empty(0))
    with absence(away):
        assert size(mapped) == 16 and away.host_bytes == 0


def test_host_memory_is_taken_once_and_again_for_new_tensors(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(parked, "ROOM_BYTES", 2048)
    lasting = [Lasting(torch.full((200,), 1.0), True), Lasting(torch.full((300,), 2.0), True)]
    away = Parked(lambda: lasting, CPU, lambda: None)
    for _ in range(3):
        with absence(away):
            assert away.host_bytes == 4096, "1024 and 1536 do not fit into 2048"
    lasting[1] = Lasting(torch.full((1000,), 3.0), True)
    with absence(away):
        assert away.host_bytes == 2048 + 4096
        assert size(lasting[1].tensor) == 0 and away.now(lasting[1].tensor).unique().tolist() == [3.0]
    assert lasting[0].tensor.unique().tolist() == [1.0] and lasting[1].tensor.unique().tolist() == [3.0]


def test_a_host_without_room_says_which_setting_takes_it():
    huge = torch.empty(0)
    huge.untyped_storage().resize_(8)
    away = park(huge)
    away._room.take(8)
    with pytest.raises(UserError, match=r"rollout.offload_trainers=true: the host has no \d+ MiB more .*=false"):
        away._room.take(1 << 50)
