"""Whatever the mesh, the nodes, the settings and the sizes of the model: a report or a UserError, and soon."""

from typing import Any

import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig

from tests.support.advice import job_of, shape
from verl.advise.model import shape_of
from verl.advise.picture import as_text, draw
from verl.advise.report import Report, examine
from verl.advise.svg import as_svg
from verl.advise.traffic import hand_overs, weight_load
from verl.checks import problems
from verl.config import ActorConfig, AdvantageEstimator, AlgorithmConfig, DataConfig, PPOConfig, RolloutConfig
from verl.errors import UserError
from verl.model.heads import Head

DEVICES = st.one_of(
    st.just("all"),
    st.lists(st.integers(0, 7), unique=True, min_size=1, max_size=8),
    st.lists(st.sampled_from(["a:0", "a:1-3", "a:2", "b:0", "b:1", "b:2-3", "b:0-3"]), unique=True, max_size=4),
    st.lists(st.sampled_from(["0-3", "4-7", "2", "cuda:0", "c:0", 9]), max_size=3),
)
DEGREE = st.sampled_from([1, 1, 1, 2, 3, 4, 8])
TRAINED = st.fixed_dictionaries(
    {"devices": DEVICES},
    optional={
        "parallelism": st.fixed_dictionaries(
            {},
            optional={
                "fsdp": st.booleans(),
                "tensor_parallel_size": DEGREE,
                "pipeline_parallel_size": DEGREE,
                "virtual_stages": st.sampled_from([1, 2]),
            },
        ),
        "dtype": st.sampled_from(["bfloat16", "float32", "float16"]),
    },
)
ROLLOUT = st.fixed_dictionaries(
    {"devices": DEVICES},
    optional={
        "tensor_parallel_size": DEGREE,
        "backend": st.sampled_from(["vllm", "torch", "auto"]),
        "max_num_seqs": st.integers(1, 1000),
        "engine_kwargs": st.dictionaries(
            st.sampled_from(["kv_cache_memory_bytes", "gpu_memory_utilization"]),
            st.sampled_from([0, 1, -5, 0.5, 2.0, "x", None, True, 10**12]),
            max_size=2,
        ),
    },
)
MESHES = st.fixed_dictionaries(
    {"actor": TRAINED, "rollout": ROLLOUT}, optional=dict.fromkeys(("critic", "reference", "reward"), TRAINED)
)
MODELS = st.sampled_from(
    [
        shape(),
        shape(tie_word_embeddings=True),
        shape(num_attention_heads=8, head_dim=6, intermediate_size=96),
        shape("qwen3"),
        shape("gpt_neox", num_key_value_heads=6),
    ]
)
CONFIGS = st.builds(
    lambda prompts, mini, length, budget, n, estimator: PPOConfig(
        data=DataConfig(train_batch_size=prompts, max_prompt_length=length, max_response_length=length),
        actor=ActorConfig(ppo_mini_batch_size=mini, max_tokens_per_micro_batch=budget),
        rollout=RolloutConfig(n=n),
        algorithm=AlgorithmConfig(adv_estimator=estimator),
    ),
    st.sampled_from([1, 8, 16, 24]),
    st.sampled_from([1, 8, 7]),
    st.sampled_from([1, 100, 10**6]),
    st.sampled_from([1, 4096]),
    st.sampled_from([1, 3]),
    st.sampled_from(AdvantageEstimator),
)


@given(
    MESHES, st.sampled_from([None, "a:4,b:4", "8", "a:4"]), MODELS, CONFIGS, st.sampled_from([None, 1, 10**6, 80 << 30])
)
@settings(max_examples=150, deadline=None)
def test_any_mesh(mesh: dict[str, Any], nodes: str | None, model: Any, config: PPOConfig, device_memory: int | None):
    try:
        job = job_of(yaml.safe_dump(mesh), nodes, config)
    except UserError as error:
        assert error.problems
        return
    models = dict.fromkeys(job.placements, model)
    report = examine(job, models, config, device_memory, settings=True)
    assert isinstance(report, Report) and all(problem.strip() for problem in report.problems)
    picture = draw(job)
    assert "\n".join(as_text(picture, 80)) and as_svg(picture, "x").startswith("<svg")
    if not problems(config, {role: placement.dp for role, placement in job.placements.items()}):
        assert hand_overs(job, config)
    if report.budgets:
        assert all(budget.peak >= budget.stays > 0 for budget in report.budgets)
        assert weight_load(job, model, config, 2).domains


SIZE = st.sampled_from([None, -1, 0, 1, 2, 3, 6, 48, 64, "x", 1.5, True])


@given(
    st.sampled_from(["llama", "qwen2", "qwen3", "gpt2", "mamba", "bert", "t5", "mixtral"]),
    st.dictionaries(
        st.sampled_from(
            [
                "hidden_size",
                "intermediate_size",
                "num_attention_heads",
                "num_key_value_heads",
                "head_dim",
                "num_hidden_layers",
                "vocab_size",
            ]
        ),
        SIZE,
        max_size=4,
    ),
    st.sampled_from(Head),
)
@settings(max_examples=60, deadline=None)
def test_any_config_of_a_model(kind: str, sizes: dict[str, Any], head: Head):
    try:
        config = AutoConfig.for_model(kind, **{"num_hidden_layers": 2, "hidden_size": 48} | sizes)
    except Exception:  # transformers refuses it by itself, which `find_config` turns into a UserError
        return
    try:
        model = shape_of(config, "the model", head)
    except UserError as error:
        assert str(error)
        return
    assert model.num_elements > 0 and min(model.num_layers, model.num_heads, model.vocabulary) >= 1
