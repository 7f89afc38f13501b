"""The shipped meshes for models of 7, 13 and 70 billion parameters, against their real shapes and 80 GB devices."""

from functools import cache
from pathlib import Path

import pytest

from verl.advise.job import imagine, nodes_of
from verl.advise.model import ModelShape, find_config, shape_of
from verl.advise.report import examine
from verl.advise.traffic import hand_overs, weight_load
from verl.config import ActorConfig, AdvantageEstimator, AlgorithmConfig, DataConfig, PPOConfig, RolloutConfig
from verl.mesh.parse import parse
from verl.model.heads import Head

CONFIGS = Path(__file__).parents[3] / "configs"
MESHES = sorted((CONFIGS / "device_mesh").glob("llama_*gpu.yaml"))
DEVICE_MEMORY = 81_559 << 20
"""What nvidia-smi says of an H100 or A100 of 80 GB."""


@cache
def model(name: str, head: Head = Head.lm) -> ModelShape:
    return shape_of(find_config(str(CONFIGS / "models" / f"{name}.json")), name, head)


def settings(has_critic: bool) -> PPOConfig:
    """A usual step: 256 prompts of up to 1024 tokens, answers of up to 1024."""
    return PPOConfig(
        data=DataConfig(train_batch_size=256, max_prompt_length=1024, max_response_length=1024),
        actor=ActorConfig(ppo_mini_batch_size=64),
        rollout=RolloutConfig(n=1 if has_critic else 8),
        algorithm=AlgorithmConfig(adv_estimator=AdvantageEstimator.gae if has_critic else AdvantageEstimator.grpo),
    )


def test_sizes_and_numbers_of_devices():
    assert [file.stem for file in MESHES] == [
        *(f"llama_13b_{count}gpu" for count in (16, 4, 64, 8)),
        "llama_70b_64gpu",
        *(f"llama_7b_{count}gpu" for count in (16, 4, 64, 8)),
    ]


@pytest.mark.parametrize("file", MESHES, ids=lambda file: file.stem)
def test_a_mesh_fits_its_model(file: Path):
    spec = parse(file.read_text(), file.name)
    config = settings("critic" in spec.roles)
    job = imagine(spec, nodes_of(spec), config)
    name = file.stem.rpartition("_")[0]
    models = {
        role: model(name, Head.token_value if role == "critic" else Head.lm)
        for role in job.placements
        if role != "reward"
    } | ({"reward": model(name, Head.score)} if "reward" in spec.roles else {})
    report = examine(job, models, config, DEVICE_MEMORY, settings=True)
    assert (report.problems, report.warnings) == ((), ())
    assert len(job.processes) == int(file.stem.rpartition("_")[2].removesuffix("gpu"))
    assert all(step.columns for step in hand_overs(job, config))
    load = weight_load(job, models["actor"], config, itemsize=2)
    assert sum(m.size for m in [*load.sent, *load.written]) == len(load.domains) * 2 * models["actor"].num_elements


@pytest.mark.parametrize(("count", "estimator"), [(8, "grpo"), (16, "gae"), (16, "grpo")])
def test_70b_does_not_fit_on_fewer(count: int, estimator: str):
    """Parameters, gradients and moments of one 70B model alone are 1,129 GB, and the reference and the engine come on
    top: none is shipped.
    """
    devices = ", ".join(f'"node{node}:0-7"' for node in range(1, count // 8 + 1))
    split = f"{{tensor_parallel_size: 8, pipeline_parallel_size: {count // 8}}}"
    role = f"{{devices: [{devices}], parallelism: {split}, hybrid_engine: {{activation_checkpointing: true}}}}"
    text = f"actor: {role}\ncritic: {role}\n" if estimator == "gae" else f"actor: {role}\n"
    cache = "{kv_cache_memory_bytes: 4000000000}"
    text += f"rollout: {{devices: [{devices}], tensor_parallel_size: 8, engine_kwargs: {cache}}}"
    spec = parse(text, "mesh.yaml")
    config = settings(estimator == "gae")
    job = imagine(spec, nodes_of(spec), config)
    models = {
        role: model("llama_70b", Head.token_value if role == "critic" else Head.lm)
        for role in ("actor", "critic", "reference", "rollout")
        if role in job.placements
    }
    problems = examine(job, models, config, DEVICE_MEMORY, settings=True).problems
    assert problems and all(" would need " in problem for problem in problems)
