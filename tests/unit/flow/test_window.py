"""Tensors that other processes of the node write into."""

from __future__ import annotations

import os

import pytest
import torch

from verl.flow.window import Address, Window

SHAPES: dict[str, tuple[int, ...]] = {"matrix": (3, 5), "scalar": (), "vector": (7,), "empty": (0, 4)}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_what_is_written_at_an_address_is_in_the_tensors(dtype: torch.dtype) -> None:
    window = Window(SHAPES, dtype)
    assert {name: tuple(tensor.shape) for name, tensor in window.tensors.items()} == SHAPES
    views = {"corner": window.tensors["matrix"][1:, 2:4], "vector": window.tensors["vector"]}
    opened = window.address(views).open()
    assert opened.keys() == views.keys()
    assert all(opened[name].data_ptr() != view.data_ptr() for name, view in views.items()), "another mapping"
    opened["corner"].copy_(torch.tensor([[1, 2], [3, 4]]))
    opened["vector"].fill_(9)
    assert window.tensors["matrix"].tolist() == [[0, 0, 0, 0, 0], [0, 0, 1, 2, 0], [0, 0, 3, 4, 0]]
    assert window.tensors["vector"].tolist() == [9] * 7
    assert window.tensors["scalar"].item() == 0


def test_tensors_begin_at_cache_lines() -> None:
    window = Window({name: (size,) for name, size in zip("abcd", (1, 31, 33, 2), strict=True)}, torch.bfloat16)
    assert all(tensor.data_ptr() % 64 == 0 for tensor in window.tensors.values())


def write(address: Address) -> None:
    address.open()["vector"].fill_(3)
    os._exit(0)


def test_another_process_writes_and_the_memory_outlives_its_address() -> None:
    window = Window(SHAPES, torch.float32)
    address = window.address({"vector": window.tensors["vector"]})
    if (pid := os.fork()) == 0:
        write(address)
    assert os.waitpid(pid, 0)[1] == 0
    opened = address.open()
    window.close()
    with pytest.raises(FileNotFoundError):
        address.open()
    assert opened["vector"].tolist() == window.tensors["vector"].tolist() == [3] * 7
