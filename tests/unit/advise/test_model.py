"""The shapes of models, against what is published of them and what the run itself makes of them."""

import json
from math import prod
from pathlib import Path

import pytest

from tests.support.advice import shape
from verl.advise.model import find_config, shape_of
from verl.errors import UserError
from verl.mesh.spec import Device, Parallelism, RoleSpec
from verl.model.heads import Head

MODELS = Path(__file__).parents[3] / "configs" / "models"
PUBLISHED = {"llama_7b": 6_738_415_616, "llama_13b": 13_015_864_320, "llama_70b": 70_553_706_496}
"""Parameters, as the models' cards and index files say: Llama-2-7B, Llama-2-13B, Llama-3-70B."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_shipped_configs_have_the_published_numbers_of_parameters(name: str):
    model = shape_of(find_config(str(MODELS / f"{name}.json")), name)
    assert model.num_elements == PUBLISHED[name]


def test_every_shipped_config_is_one_of_them():
    assert {file.stem for file in MODELS.glob("*.json")} == set(PUBLISHED)


def test_sizes():
    model = shape()
    assert (model.num_layers, model.hidden_size, model.intermediate_size, model.vocabulary) == (3, 48, 112, 320)
    assert (model.num_heads, model.num_kv_heads, model.head_dim) == (6, 2, 8)
    assert model.shapes["model.layers.2.self_attn.k_proj.weight"] == (16, 48)


@pytest.mark.parametrize(
    ("kind", "normed"),
    [("llama", 2 * 48), ("qwen3", 2 * 48 + 6 * 8 + 2 * 8), ("gemma2", 4 * 48)],
)
def test_what_the_norms_of_a_layer_take_in(kind: str, normed: int):
    assert shape(kind).normed == normed


def test_a_tied_head_is_there_once_and_on_both_ends():
    tied, untied = shape(tie_word_embeddings=True), shape()
    assert untied.num_elements - tied.num_elements == 320 * 48
    assert tied.units["model.embed_tokens.weight"] == (0, 4)
    assert untied.units["model.embed_tokens.weight"] == (0,) and untied.units["lm_head.weight"] == (4,)


def test_the_value_head_takes_the_place_of_the_language_models():
    critic = shape(head=Head.token_value)
    assert critic.shapes["score.weight"] == (1, 48) and "lm_head.weight" not in critic.shapes
    assert not critic.has_lm_head


def test_every_parameter_is_in_one_unit_and_every_unit_in_one_stage():
    model = shape()
    assert {unit for units in model.units.values() for unit in units} == set(range(5))
    assert model.units["model.layers.1.mlp.up_proj.weight"] == (2,) and model.units["model.norm.weight"] == (4,)
    for pp, parts in ((1, 1), (2, 1), (3, 1), (2, 2)):
        stages = model.stages(pp, parts)
        assert len(stages) == pp and sorted(unit for stage in stages for unit in stage) == list(range(5))


def test_a_split_holds_each_element_of_a_stage_once():
    model = shape()
    spec = RoleSpec(tuple(Device(None, i) for i in range(8)), Parallelism(True, 2, 2))
    split = model.split(spec, dp=2)
    assert (split.pp, split.dp, split.tp) == (2, 2, 2)
    assert all(len(stages) == 1 for stages in split.stages.values())
    assert split.tp_dims["model.layers.0.self_attn.o_proj.weight"] == 1
    assert "model.layers.0.input_layernorm.weight" not in split.tp_dims


def test_key_heads_that_are_fewer_than_the_ranks_stay_whole():
    dims = shape(num_attention_heads=8, head_dim=6).tp_dims(4)
    assert "model.layers.0.self_attn.k_proj.weight" not in dims
    assert dims["model.layers.0.self_attn.q_proj.weight"] == 0


def test_a_config_is_found_in_a_folder_and_in_a_file(tmp_path: Path):
    text = (MODELS / "llama_7b.json").read_text()
    (tmp_path / "config.json").write_text(text)
    assert find_config(str(tmp_path)).hidden_size == find_config(str(tmp_path / "config.json")).hidden_size == 4096


BAD = {
    "not json": ("{", "a model's config.json is JSON, and this file is not"),
    "a list": ("[1]", "no model's config"),
    "nothing in it": ("{}", "a model's config needs 'model_type', and this file has none"),
    "an unknown type": ('{"model_type": "lama"}', "no model's config"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_file_that_is_no_config(tmp_path: Path, name: str):
    text, message = BAD[name]
    (tmp_path / "model.json").write_text(text)
    with pytest.raises(UserError) as caught:
        find_config(str(tmp_path / "model.json"))
    assert str(caught.value).startswith(f"{tmp_path}/model.json: {message}")


@pytest.mark.parametrize("sizes", [{"hidden_size": 0}, {"num_attention_heads": 7}, {"num_hidden_layers": -1}])
def test_a_config_of_no_model(tmp_path: Path, sizes: dict[str, int]):
    settings = json.loads((MODELS / "llama_7b.json").read_text()) | {"num_hidden_layers": 1} | sizes
    (tmp_path / "model.json").write_text(json.dumps(settings))
    with pytest.raises(UserError, match=r"model\.json"):
        shape_of(find_config(str(tmp_path / "model.json")), "model.json")


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("nowhere", "nowhere: neither a model folder nor a config file here"),
        ("/nowhere/at/all", "/nowhere/at/all: neither a model folder nor a config file here"),
        (str(MODELS), f"{MODELS}: the folder holds no config.json"),
    ],
)
def test_a_path_that_leads_nowhere(path: str, message: str):
    with pytest.raises(UserError) as caught:
        find_config(path)
    assert str(caught.value).startswith(message)


def test_the_sum_of_parameters_is_the_sum_of_shapes():
    model = shape()
    assert model.num_elements == sum(prod(size) for size in model.shapes.values())
