"""Adapters on real ranks against peft in one process: what they learn, what they are merged into, and their files."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from scripts.make_tiny_model import make_tiny_model
from tests.support.engine_cases import Case, Rank, assert_same_steps, make_engine, make_models, outputs, train_on_ranks
from tests.support.plain_loop import Plain, Steps
from tests.support.ranks import run_ranks
from verl.cli.main import main
from verl.config import LoraConfig
from verl.engine.checkpoint import Checkpoints
from verl.engine.export import export_hf
from verl.errors import UserError
from verl.flow.job import start_job
from verl.flow.placement import Placement, make_groups
from verl.model.heads import Head
from verl.model.load import shards_by_file

pytestmark = pytest.mark.dist

LORA = LoraConfig(rank=3, alpha=6)
"""Three rows are not shared out evenly over two ranks."""
CASES = {
    "all linear layers": Case("qwen2", lora=LORA),
    "some, rank-stabilised, in host memory": Case(
        lora=replace(LORA, rslora=True, target_modules=["o_proj", "v_proj", "gate_proj"]),
        offload=("activations", "parameters"),
    ),
    "one KV head": Case("one KV head", lora=LORA, checkpointing=True),
    "a critic": Case("tied", head=Head.token_value, lora=LORA, reshard=True),
}
PLACES = {
    "one rank": Placement("actor", (0,)),
    "FSDP 2": Placement("actor", (1, 0)),
    "two copies": Placement("actor", (0, 1), fsdp_size=1),
    "TP 2": Placement("actor", (0, 1), tp=2),
    "FSDP 2 x TP 2": Placement("actor", (2, 0, 3, 1), tp=2),
    "two stages": Placement("actor", (0, 1), pp=2),
    "CP 2": Placement("actor", (0, 1), cp=2),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    made = make_models(folder, ["llama", "qwen2", "tied"])
    return made | {"one KV head": make_tiny_model(folder / "one_head", "llama", num_layers=2, num_kv_heads=1)}


@pytest.fixture(scope="module")
def plain(models: dict[str, Path]) -> Callable[[str], Steps]:
    return functools.cache(lambda name: CASES[name].plainly(models[CASES[name].model]))


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
def test_adapters_learn_what_pefts_do(place: Placement, models: dict[str, Path], plain: Callable[[str], Steps]) -> None:
    names = [*CASES] if len(place.ranks) < 4 else ["all linear layers", "a critic"]  # many ranks share few cores
    cases = {name: CASES[name] for name in names}
    results = run_ranks(len(place.ranks), train_on_ranks, place, cases, models)
    for name in names:
        assert_same_steps(place, {rank: results[rank][name] for rank in place.ranks}, plain(name))


def test_there_is_something_to_learn(plain: Callable[[str], Steps]) -> None:
    """So that the comparison above means something."""
    for name in CASES:
        steps = plain(name)
        assert (steps.after - steps.before).abs().max() > 0.02
        assert all(gradient.abs().max() > 1e-5 for gradient in steps.gradients[0].values())


# -- what becomes of them ----------------------------------------------------------------------------------------------


@dataclass
class Trained:
    """By one rank."""

    without: Tensor
    """Its outputs with the adapters off, after training."""
    outputs: Tensor
    shards: dict[str, tuple[tuple[slice, ...], Tensor]]
    """What goes to an engine: which part of each weight, and its values."""


def train_and_save(place: Placement, case: Case, folder: Path, out: Path) -> Trained:
    job = start_job(stage_timeout=300, check_program=False)
    groups = make_groups([place], job.rank, "cpu", job.timeout)["actor"]
    engine, part = make_engine(job, groups, case, folder), Rank(case, place, job.rank, groups)
    for batch in part.mini_batches:
        engine.train_step(part.sequences, batch.rows, part.loss(batch))
    with engine.adapters_off():
        without = outputs(engine, part)
    boxes, shards = shards_by_file(engine.model), engine.shards()
    Checkpoints(out, 1, job).save(2, {"actor": engine}, {}, {})
    export_hf(engine, out / "live", folder, job.board, torch.float32)
    trained = Trained(without, outputs(engine, part), {name: (boxes[name][0], shards[name]) for name in shards})
    job.close()
    return trained


@dataclass
class Saved:
    case: Case
    base: Path
    out: Path
    place: Placement
    ranks: list[Trained]

    @property
    def checkpoint(self) -> Path:
        return self.out / "checkpoints" / "step_2"


@pytest.fixture(
    scope="module",
    params=[("all linear layers", "FSDP 2 x TP 2"), ("a critic", "two stages")],
    ids=["actor on FSDP 2 x TP 2", "critic on two stages"],
)
def saved(request: pytest.FixtureRequest, models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Saved:
    case, place, out = CASES[request.param[0]], PLACES[request.param[1]], tmp_path_factory.mktemp("run")
    base = models[case.model]
    return Saved(case, base, out, place, run_ranks(len(place.ranks), train_and_save, place, case, base, out))


def weights(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


def test_without_them_the_model_is_the_one_that_was_loaded(saved: Saved) -> None:
    plain = Plain(saved.base, 11 if saved.case.head is Head.token_value else None)
    batch, leaders = saved.case.batch, [saved.ranks[rank] for rank in saved.place.leaders]
    off, on = (torch.cat([getattr(rank, name) for rank in leaders]) for name in ("without", "outputs"))
    assert (on - off).abs().max() > 0.02
    if saved.case.head is Head.lm:  # a value head is trained, adapters or not
        with torch.no_grad():
            loaded = torch.cat([plain.outputs(*row)[0] for row in zip(batch.prompts, batch.responses, strict=True)])
        torch.testing.assert_close(off, loaded, rtol=0, atol=1e-5)


def test_a_checkpoint_has_them_and_not_the_model(saved: Saved) -> None:
    size = sum(file.stat().st_size for file in (saved.checkpoint / "actor").glob("*.distcp"))
    model = sum(tensor.numel() for tensor in weights(saved.out / "live").values())
    assert size < 4 * model, "less than the model in float32, though AdamW's state is there, too"


def test_merged_weights_are_what_peft_merges(saved: Saved, tmp_path: Path) -> None:
    """In an export, in one from a checkpoint, and in the shards that go to the rollout."""
    assert main(["export", str(saved.checkpoint), str(tmp_path / "adapter"), "--adapter"]) == 0
    assert main(["export", str(saved.checkpoint), str(tmp_path / "whole"), "--dtype", "float32"]) == 0
    if saved.case.head is Head.lm:
        model = AutoModelForCausalLM.from_pretrained(saved.base, dtype=torch.float32)
    else:
        model = AutoModelForSequenceClassification.from_pretrained(saved.base, dtype=torch.float32, num_labels=1)
    merged = peft.PeftModel.from_pretrained(model, str(tmp_path / "adapter")).merge_and_unload()
    merged = {name: tensor for name, tensor in merged.state_dict().items() if "lm_head" not in name or not tied(saved)}
    live, whole = weights(saved.out / "live"), weights(tmp_path / "whole")
    assert merged.keys() == live.keys() == whole.keys()
    for name, tensor in merged.items():
        assert torch.equal(whole[name], tensor), name
        assert torch.equal(live[name], tensor), name
    for rank in saved.ranks:
        for name, (box, shard) in rank.shards.items():
            torch.testing.assert_close(shard, merged[name][box], rtol=0, atol=1e-6)
    base = load_file(saved.base / "model.safetensors")
    changed = {name for name in base if name in merged and not torch.equal(base[name], merged[name])}
    assert changed == {name for name in merged if name.endswith("_proj.weight")}


def tied(saved: Saved) -> bool:
    return json.loads((saved.base / "config.json").read_bytes())["tie_word_embeddings"]


def test_an_exported_critic_has_the_engines_values(saved: Saved, tmp_path: Path) -> None:
    if saved.case.head is Head.lm:
        model = AutoModelForCausalLM.from_pretrained(saved.out / "live")
    else:
        model = AutoModelForSequenceClassification.from_pretrained(saved.out / "live")
    batch = saved.case.batch
    prompt, response = batch.prompts[0], batch.responses[0]
    expected = saved.ranks[saved.place.leaders[0]].outputs[: len(response)]
    ids = torch.cat([prompt, response])
    with torch.no_grad():
        if saved.case.head is Head.lm:
            logprobs = model(ids[None]).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
            said = logprobs.gather(-1, response[:, None]).squeeze(-1)
        else:
            said = torch.cat([model(ids[None, :end]).logits[0] for end in range(len(prompt), len(ids))])
    torch.testing.assert_close(said, expected, rtol=0, atol=1e-5)


def test_a_model_that_has_moved_is_named_again(
    saved: Saved, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    moved = tmp_path / "moved"
    saved.base.rename(moved)
    try:
        command = ["export", str(saved.checkpoint), str(tmp_path / "out")]
        assert main(command) == 2
        assert f"{saved.base}: no such folder; name the folder" in capsys.readouterr().err
        assert main([*command, "--base", str(moved)]) == 0
    finally:
        moved.rename(saved.base)


def go_on(place: Placement, case: Case, folder: Path, out: Path) -> tuple[str, bool]:
    job = start_job(stage_timeout=300, check_program=False)
    groups = make_groups([place], job.rank, "cpu", job.timeout)["actor"]
    engine, checkpoints = make_engine(job, groups, case, folder), Checkpoints(out, 1, job)
    found = checkpoints.latest()
    assert found is not None
    said = ""
    try:
        checkpoints.load(found, {"actor": engine})
    except UserError as error:
        said = str(error)
    job.close()
    return said, engine.optimizer is not None and engine.optimizer.steps_done == 2


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({}, ""),
        ({"alpha": 7}, "actor.lora: adapters count 2.33333 times with these settings, and 2 times in the checkpoint"),
        ({"rank": 4, "alpha": 8}, r"lora_A.weight' has shape (3, 64) in the checkpoint, but (4, 64) in the model"),
        ({"target_modules": ["q_proj"]}, "of the checkpoint is not in the model"),
        (None, "'model.model.embed_tokens.weight' of the model is not in the checkpoint"),
    ],
)
def test_what_goes_on_from_a_checkpoint(saved: Saved, change: dict[str, object] | None, said: str) -> None:
    """On another number of ranks than wrote it."""
    assert saved.case.lora is not None
    lora = None if change is None else replace(saved.case.lora, **change)
    case = replace(saved.case, lora=lora)
    ((message, loaded),) = run_ranks(1, go_on, Placement("actor", (0,)), case, saved.base, saved.out)
    assert said in message and loaded == (not said) == (not message)
