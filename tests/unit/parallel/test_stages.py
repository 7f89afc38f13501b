"""How a decoder is cut into pipeline stages: even parts, Hugging Face's names, and the same function put together."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import GraniteConfig, GraniteForCausalLM

from scripts.make_tiny_model import make_tiny_model
from verl.errors import UserError
from verl.model.heads import Head, HeadedModel, TokenOutputs
from verl.model.load import hf_parameters, load_shards, materialise, meta_model, read_config
from verl.model.packing import Sequences, pack
from verl.parallel.stages import cut, split_layers, stage_units, unit_costs

CASES = {
    "llama": ("llama", False, Head.lm),
    "llama critic": ("llama", False, Head.token_value),
    "tied qwen2": ("qwen2", True, Head.lm),
    "qwen3": ("qwen3", False, Head.lm),
    "gemma3": ("gemma3", True, Head.lm),
}
"""Name -> (architecture, tied, head)."""
NUM_LAYERS = 5


# -- the split -------------------------------------------------------------------------------------------------------


def splits(num_units: int, num_stages: int) -> list[list[range]]:
    """All of them."""
    return [
        [range(a, b) for a, b in zip((0, *at), (*at, num_units), strict=True)]
        for at in combinations(range(1, num_units), num_stages - 1)
    ]


@given(st.lists(st.integers(0, 20), min_size=1, max_size=9), st.data())
def test_no_other_split_has_a_cheaper_largest_stage(costs: list[int], data: st.DataObject) -> None:
    num_stages = data.draw(st.integers(1, len(costs)))
    ranges = split_layers(costs, num_stages)
    assert ranges in splits(len(costs), num_stages)
    assert largest(costs, ranges) == min(largest(costs, other) for other in splits(len(costs), num_stages))


def largest(costs: list[int], ranges: list[range]) -> int:
    return max(sum(costs[unit] for unit in units) for units in ranges)


def test_layers_that_do_not_divide_are_spread_out() -> None:
    assert sorted(len(units) for units in split_layers([1.0] * 10, 4)) == [2, 2, 3, 3]


def test_a_heavy_head_has_few_layers_beside_it() -> None:
    assert split_layers([0, 1, 1, 1, 1, 1, 1, 3], 3) == [range(0, 4), range(4, 7), range(7, 8)]


def test_more_stages_than_units() -> None:
    with pytest.raises(ValueError, match="2 units do not make 3 stages"):
        split_layers([1.0, 1.0], 3)


# -- the model -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Head]:
    architecture, tied, head = CASES[request.param]
    folder = tmp_path_factory.mktemp("models") / "model"
    return make_tiny_model(folder, architecture, num_layers=NUM_LAYERS, tied=tied), head


def on_meta(folder: Path, head: Head) -> HeadedModel:
    return meta_model(read_config(folder, False), head, torch.float32, "sdpa", 64, False)


def filled(folder: Path, head: Head, units: range | None) -> HeadedModel:
    """The whole model, or these units of it."""
    model = on_meta(folder, head)
    if units is not None:
        cut(model, units)
    materialise(model, torch.device("cpu"))
    load_shards(model, folder, 5, lambda: None)
    return model.eval()


def stages(folder: Path, head: Head, num_stages: int, virtual: int = 1) -> list[range]:
    """All parts, in the model's order."""
    by_stage = stage_units(on_meta(folder, head), num_stages, virtual)
    return [by_stage[part % num_stages][part // num_stages] for part in range(num_stages * virtual)]


@pytest.mark.parametrize(("num_stages", "virtual"), [(2, 1), (5, 1), (2, 2)])
@torch.no_grad()
def test_parts_put_together_are_the_whole_model(case: tuple[Path, Head], num_stages: int, virtual: int) -> None:
    folder, head = case
    parts = stages(folder, head, num_stages, virtual)
    assert [unit for units in parts for unit in units] == list(range(NUM_LAYERS + 2))
    draws = torch.Generator().manual_seed(3)
    ids = [torch.randint(3, 300, (2, length), generator=draws) for length in (9, 20, 4)]
    sequences = Sequences.responses([i[0] for i in ids], [i[1] for i in ids])
    batch = pack(sequences, [[0, 2], [1]])  # rows with one sequence and with two
    states: Tensor | TokenOutputs | None = None
    for number, units in enumerate(parts):
        assert states is None or isinstance(states, Tensor)
        states = filled(folder, head, units)(batch, 1.0, states)
        assert isinstance(states, Tensor) == (number < len(parts) - 1)
    outputs, wanted = states, filled(folder, head, None)(batch, 1.0)
    assert isinstance(outputs, TokenOutputs) and isinstance(wanted, TokenOutputs)
    assert torch.equal(outputs.values, wanted.values)


def test_parameters_keep_their_names_and_each_has_one_place(case: tuple[Path, Head]) -> None:
    """But for a tied embedding, which is on both ends under its own name."""
    folder, head = case
    wanted = dict(hf_parameters(on_meta(folder, head)))
    names: list[str] = []
    for units in stages(folder, head, 5):
        part = on_meta(folder, head)
        cut(part, units)
        here = dict(hf_parameters(part))
        assert all(p.shape == wanted[name].shape for name, p in here.items())
        names += here
    twice = [name for name in set(names) if names.count(name) == 2]
    tied = head is Head.lm and "lm_head.weight" not in wanted
    assert twice == (["model.embed_tokens.weight"] if tied else [])
    assert set(names) == wanted.keys() and len(names) == len(wanted) + len(twice)


def test_costs_count_what_a_token_is_multiplied_with(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "model", num_layers=2, hidden_size=64, num_heads=8, num_kv_heads=4, head_dim=32)
    model = on_meta(folder, Head.lm)
    layer = 2 * 64 * 8 * 32 + 2 * 64 * 4 * 32 + 3 * 64 * 128 + 2 * 64
    assert unit_costs(model) == [pytest.approx(0.1 * 320 * 64), layer, layer, 320 * 64 + 64]
    assert unit_costs(on_meta(folder, Head.token_value))[-1] == 64 + 64


# -- what cannot be cut ----------------------------------------------------------------------------------------------


def test_too_few_layers(case: tuple[Path, Head]) -> None:
    folder, head = case
    with pytest.raises(UserError, match=r"5 layers does not make 6 pipeline stages \(pipeline_parallel_size 3 x"):
        stage_units(on_meta(folder, head), 3, 2)


def test_a_decoder_that_changes_states_between_embedding_and_layers() -> None:
    config = GraniteConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, embedding_multiplier=12.0,
    )  # fmt: skip
    with torch.device("meta"):
        model = HeadedModel(GraniteForCausalLM(config), Head.lm, 8)
    with pytest.raises(UserError, match=r"GraniteForCausalLM changes hidden states outside its layers.*to 1"):
        stage_units(model, 2)
