"""Parts of tensors in safetensors files, against the same parts of what the safetensors library reads whole."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from tests.unit.model.test_load import Folder, rewritten
from verl.errors import UserError
from verl.model import weight_files
from verl.model.heads import Head
from verl.model.load import check_folder
from verl.model.weight_files import DTYPES, Safetensors

SHAPES = {"matrix": (37, 11), "vector": (9,), "tall": (64, 1), "empty": (0, 4)}


@pytest.fixture(scope="module")
def tensors() -> dict[str, torch.Tensor]:
    """Of every dtype; odd sizes, so that some begin at odd places."""
    draws = torch.Generator().manual_seed(0)
    return {
        f"{name} {spelt}": torch.randn(shape, generator=draws).to(dtype)
        for name, shape in SHAPES.items()
        for spelt, dtype in DTYPES.items()
    }


@pytest.fixture(scope="module")
def files(tensors: dict[str, torch.Tensor], tmp_path_factory: pytest.TempPathFactory) -> Safetensors:
    """In two files."""
    folder = tmp_path_factory.mktemp("files")
    names = sorted(tensors)
    for number, part in enumerate((names[::2], names[1::2])):
        save_file({name: tensors[name] for name in part}, folder / f"{number}.safetensors", {"format": "pt"})
    return Safetensors(folder)


def test_names_shapes_and_dtypes(files: Safetensors, tensors: dict[str, torch.Tensor]) -> None:
    assert set(files.names()) == set(tensors)
    for name, tensor in tensors.items():
        assert name in files
        assert (files.shape(name), DTYPES[files.dtype(name)]) == (tuple(tensor.shape), tensor.dtype)
    assert "another" not in files


@given(st.data())
def test_a_part_is_that_part(files: Safetensors, tensors: dict[str, torch.Tensor], data: st.DataObject) -> None:
    """Whatever the steps are in which it is read, and into which dtype."""
    name = data.draw(st.sampled_from(sorted(tensors)))
    box = []
    for size in tensors[name].shape:
        low = data.draw(st.integers(0, size))
        box.append(slice(low, data.draw(st.integers(low, size))))
    wanted = tensors[name][tuple(box)].float()
    target = torch.full_like(wanted, torch.nan)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weight_files, "STEP_BYTES", data.draw(st.integers(1, 2000)))
        files.read_into(target, name, tuple(box))
    assert torch.equal(target, wanted)


def test_quantized_weights_are_refused(folder: Folder, tmp_path: Path) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    path = rewritten(folder("llama"), tmp_path / "model", lambda t: t.update({name: t[name].to(torch.int8)}))
    with pytest.raises(
        UserError, match=r"up_proj\.weight' is stored as I8, where one of F64, F32, F16, BF16 is needed"
    ):
        check_folder(path, Head.lm, torch.device("cpu"), "auto", trust_remote_code=False)
