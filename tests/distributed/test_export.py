"""Exports from sharded engines and from checkpoints, loaded by transformers."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, GenerationConfig

from scripts.make_tiny_model import make_tiny_model
from tests.support.engines import Layout, learnt, make_engines, merged, train
from tests.support.ranks import run_ranks
from verl.cli.main import main
from verl.engine.checkpoint import Checkpoints
from verl.engine.export import export_checkpoint, export_hf
from verl.errors import UserError
from verl.flow.job import start_job
from verl.flow.placement import Placement
from verl.model.packing import Sequences

pytestmark = pytest.mark.dist

LAYOUTS: dict[str, Layout] = {
    "ranks": {"actor": (2, 1), "critic": (3,)},
    "stages": {"actor": Placement("actor", (2, 1), pp=2), "critic": Placement("critic", (3, 1), pp=2)},
    "copies": {
        "actor": Placement("actor", (2, 1), fsdp_size=1),
        "critic": Placement("critic", (3, 1), fsdp_size=1),
    },
    "tensors": {"actor": Placement("actor", (2, 1), tp=2), "critic": Placement("critic", (3, 1), tp=2)},
}
"""Rank 0 of the job serves no role."""
PARAMS = ["tied ranks", "untied ranks", "tied stages", "untied stages", "tied tensors", "untied copies"]
IDS = torch.tensor([5, 77, 300, 12, 4, 9, 101])
MAX_FILE_BYTES = 100_000


@dataclass
class Exported:
    folder: Path
    source: Path
    learnt: dict[str, Tensor]
    outputs: Tensor
    """What the engine itself says of IDS: log-probs of all but the first token, or the values at each token."""

    @property
    def checkpoint(self) -> Path:
        return self.folder / "checkpoints" / "step_3"


def train_and_export(
    layout: Layout, models: dict[str, Path], folder: Path
) -> tuple[dict[str, dict[str, Tensor]], dict[str, Tensor]]:
    """By role: what this rank's stage has learnt; what the engine says, where the head is."""
    job = start_job(stage_timeout=300, check_program=True)
    engines = make_engines(job, layout, models)
    train(engines, 2)
    Checkpoints(folder, 2, job).save(3, engines, {}, {})
    said = {}
    for role, engine in engines.items():
        for dtype in (torch.float32, torch.bfloat16):
            out = folder / f"{role}_{dtype}"
            export_hf(engine, out, models[role], job.board, dtype, MAX_FILE_BYTES)
        shift = 1 if role == "actor" else 0
        sequence = Sequences((IDS,), (shift,), (len(IDS) - shift,), shift)
        outputs = engine.forward(sequence)
        if outputs is not None:
            said[role] = outputs.values
    parameters = {role: learnt(engine) for role, engine in engines.items()}
    job.close()
    return parameters, said


@pytest.fixture(scope="module", params=PARAMS)
def exported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Exported]:
    tied, layout = request.param.split()
    folder = tmp_path_factory.mktemp(layout)
    source = make_tiny_model(folder / "source", num_layers=2, tied=tied == "tied")
    GenerationConfig(eos_token_id=2, temperature=0.6, do_sample=True).save_pretrained(source)
    models = {"actor": source, "critic": source}
    parts = run_ranks(4, train_and_export, LAYOUTS[layout], models, folder)
    parameters = merged([part for part, _ in parts])
    said = {role: outputs for _, by_role in parts for role, outputs in by_role.items()}
    return {role: Exported(folder, source, parameters[role], said[role]) for role in models}


def stored(folder: Path) -> dict[str, Tensor]:
    tensors = {}
    for file in folder.glob("*.safetensors"):
        tensors |= load_file(file)
    return tensors


@torch.no_grad()
def test_the_actor_is_a_causal_lm_with_the_engines_logprobs(exported: dict[str, Exported]) -> None:
    actor = exported["actor"]
    model, report = AutoModelForCausalLM.from_pretrained(actor.folder / "actor_torch.float32", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert model.dtype is torch.float32
    logprobs = model(IDS[None]).logits[0, :-1].log_softmax(-1).gather(-1, IDS[1:, None])[:, 0]
    torch.testing.assert_close(logprobs, actor.outputs, rtol=0, atol=1e-5)
    untrained = AutoModelForCausalLM.from_pretrained(actor.source)
    assert (untrained(IDS[None]).logits - model(IDS[None]).logits).abs().max() > 0.1


@torch.no_grad()
def test_the_logits_are_those_of_the_trained_parameters(exported: dict[str, Exported]) -> None:
    actor = exported["actor"]
    expected = AutoModelForCausalLM.from_pretrained(actor.source)
    for name, parameter in expected.named_parameters():
        parameter.copy_(actor.learnt[name])
    model = AutoModelForCausalLM.from_pretrained(actor.folder / "actor_torch.float32")
    assert torch.equal(model(IDS[None]).logits, expected(IDS[None]).logits)


@torch.no_grad()
def test_the_critic_is_a_sequence_classifier_with_the_engines_values(exported: dict[str, Exported]) -> None:
    critic = exported["critic"]
    folder = critic.folder / "critic_torch.float32"
    model, report = AutoModelForSequenceClassification.from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert model.config.num_labels == 1
    for length in (1, 4, len(IDS)):
        score = model(IDS[None, :length]).logits
        torch.testing.assert_close(score.flatten(), critic.outputs[length - 1 : length], rtol=0, atol=1e-5)


def test_bfloat16_is_the_rounded_model(exported: dict[str, Exported]) -> None:
    for role in ("actor", "critic"):
        folder = exported[role].folder / f"{role}_torch.bfloat16"
        tensors = stored(folder)
        for name, tensor in tensors.items():
            assert torch.equal(tensor, exported[role].learnt[name].bfloat16())
        assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"


def test_files_keep_to_the_limit_and_the_index_names_them(exported: dict[str, Exported]) -> None:
    folder = exported["actor"].folder / "actor_torch.float32"
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    files = sorted(folder.glob("*.safetensors"))
    assert len(files) > 2
    assert {file.name for file in files} == set(index["weight_map"].values())
    for file in files:
        tensors = load_file(file)
        assert sum(tensor.nbytes for tensor in tensors.values()) <= MAX_FILE_BYTES or len(tensors) == 1
        assert all(index["weight_map"][name] == file.name for name in tensors)
        assert file.stat().st_mode == (folder / "config.json").stat().st_mode, "readable for others if the config is"
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in stored(folder).values())
    tied = json.loads((folder / "config.json").read_text())["tie_word_embeddings"]
    assert ("lm_head.weight" in index["weight_map"]) is not tied


def test_tokenizer_and_generation_config_come_along(exported: dict[str, Exported], tmp_path: Path) -> None:
    actor = exported["actor"]
    export_checkpoint(actor.checkpoint, "actor", tmp_path / "out")
    for folder in (actor.folder / "actor_torch.float32", tmp_path / "out"):
        assert GenerationConfig.from_pretrained(folder).temperature == 0.6
        chat = [{"role": "user", "content": "he is in the inn"}]
        old, new = (
            AutoTokenizer.from_pretrained(f).apply_chat_template(chat, tokenize=False) for f in (actor.source, folder)
        )
        assert new == old != ""


@pytest.mark.parametrize("role", ["actor", "critic"])
def test_a_checkpoint_gives_the_same_folder_without_a_job(
    role: str, exported: dict[str, Exported], tmp_path: Path
) -> None:
    live = exported[role].folder / f"{role}_torch.float32"
    export_checkpoint(exported[role].checkpoint, role, tmp_path / "out", torch.float32, MAX_FILE_BYTES)
    names = {path.name for path in live.iterdir()}
    assert {path.name for path in (tmp_path / "out").iterdir()} == names
    for name in names:
        assert (tmp_path / "out" / name).read_bytes() == (live / name).read_bytes(), name


def test_an_existing_folder_is_replaced_on_demand_alone(exported: dict[str, Exported], tmp_path: Path) -> None:
    out, checkpoint = tmp_path / "out", exported["actor"].checkpoint
    out.mkdir()
    (out / "mine").write_text("precious")
    with pytest.raises(UserError, match="exists already"):
        export_checkpoint(checkpoint, "actor", out)
    with pytest.raises(UserError, match="is no model's folder"):
        export_checkpoint(checkpoint, "actor", out, replace=True)
    assert [path.name for path in tmp_path.iterdir()] == ["out"] and (out / "mine").exists()
    (out / "config.json").write_text("{}")
    export_checkpoint(checkpoint, "actor", out, replace=True)
    assert (out / "model.safetensors").exists() and not (out / "mine").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_what_cannot_be_exported_is_said(exported: dict[str, Exported], tmp_path: Path) -> None:
    checkpoint = exported["actor"].checkpoint
    with pytest.raises(UserError, match="holds actor, critic, no 'reward'"):
        export_checkpoint(checkpoint, "reward", tmp_path / "out")
    with pytest.raises(UserError, match=r"checkpoints has no manifest\.json.*step_100"):
        export_checkpoint(checkpoint.parent, "actor", tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_the_command_writes_the_same_folder(
    exported: dict[str, Exported], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    critic = exported["critic"]
    out, reference = tmp_path / "out", tmp_path / "reference"
    export_checkpoint(critic.checkpoint, "critic", reference, torch.float16)
    command = ["export", str(critic.checkpoint), str(out), "--role", "critic", "--dtype", "float16"]
    assert main(command) == 0
    assert capsys.readouterr().out == f"{out}: critic of {critic.checkpoint} in float16\n"
    assert {f.name: f.read_bytes() for f in out.iterdir()} == {f.name: f.read_bytes() for f in reference.iterdir()}
    assert main(command) == 2
    assert capsys.readouterr().err == f"{out} exists already. Name another folder, or remove that one first.\n"
    assert main([*command, "--replace"]) == 0


def test_the_command_says_what_is_wrong(
    exported: dict[str, Exported], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    actor = exported["actor"]

    def said(*arguments: object) -> str:
        assert main(["export", *map(str, arguments)]) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        return captured.err.rstrip("\n")

    out = tmp_path / "out"
    assert said(actor.folder, out) == (
        f"verl export: {actor.folder} holds a checkpoint of a run; name one itself, such as {actor.checkpoint}"
    )
    assert said(actor.checkpoint, out, "--role", "reward") == f"{actor.checkpoint} holds actor, critic, no 'reward'."
    assert said(tmp_path / "none", out) == (
        f"{tmp_path}/none has no manifest.json. Name a folder like run_dir/checkpoints/step_100."
    )
    assert said(actor.checkpoint, out, "--adapter") == (
        f"{actor.checkpoint}: the actor was trained without adapters (lora.rank=0). Leave --adapter out."
    )
    inside = actor.checkpoint / "hf"
    assert said(actor.checkpoint, inside) == f"verl export: {inside} lies in the checkpoint; name a folder outside it"
    (tmp_path / "file").touch()
    assert said(actor.checkpoint, tmp_path / "file" / "out").startswith(f"verl export: {tmp_path}/file")
    assert "invalid choice: 'fp8'" in said(actor.checkpoint, out, "--dtype", "fp8")
    assert not out.exists()
