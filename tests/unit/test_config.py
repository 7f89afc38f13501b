"""The settings: what is refused, with the message, and what the batch sizes come to."""

import ast
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from verl import config as settings
from verl.checks import CHOICES, RULES, cautions, problems, resolved_plan
from verl.config import AdvantageEstimator, PPOConfig, leaves

ONE = {"actor": 1, "critic": 1, "reference": 1, "reward": 1, "rollout": 1}


def make(**changes: Any) -> PPOConfig:
    """A config that can run, with settings changed by dotted name ("__" for the dots)."""
    config = OmegaConf.structured(PPOConfig)
    config.model.path = "model"
    config.data.train_files = ["train.parquet"]
    for name, value in changes.items():
        OmegaConf.update(config, name.replace("__", "."), value)
    made = OmegaConf.to_object(config)
    assert isinstance(made, PPOConfig)
    return made


def test_the_defaults_can_run_once_model_and_data_are_named():
    assert problems(make(), ONE) == []
    assert problems(PPOConfig(), ONE) == [
        "model.path: missing; set model.path=FOLDER_OR_HUB_ID",
        "data.train_files: missing; set data.train_files=[FILE.parquet]",
    ]


OUT_OF_RANGE = [
    ("data__train_batch_size", 0, "data.train_batch_size=0: must be at least 1"),
    ("data__max_response_length", -1, "data.max_response_length=-1: must be at least 1"),
    ("data__val_batch_size", 0, "data.val_batch_size=0: must be at least 1"),
    ("actor__ppo_mini_batch_size", 0, "actor.ppo_mini_batch_size=0: must be at least 1"),
    ("actor__ppo_epochs", 0, "actor.ppo_epochs=0: must be at least 1"),
    ("critic__ppo_mini_batch_size", 0, "critic.ppo_mini_batch_size=0: must be at least 1"),
    ("actor__max_tokens_per_micro_batch", -5, "actor.max_tokens_per_micro_batch=-5: must be at least 1"),
    ("actor__clip_ratio", 0, "actor.clip_ratio=0.0: must be above 0 and below 1"),
    ("actor__clip_ratio", 1.5, "actor.clip_ratio=1.5: must be above 0 and below 1"),
    ("actor__clip_ratio_high", -0.1, "actor.clip_ratio_high=-0.1: must be above 0"),
    ("actor__clip_ratio_c", 1.0, "actor.clip_ratio_c=1.0: must be above 1"),
    ("actor__target_kl", 0.0, "actor.target_kl=0.0: must be above 0"),
    ("actor__mismatch_cap", 0.5, "actor.mismatch_cap=0.5: must be at least 1"),
    ("actor__optim__lr", -1e-6, "actor.optim.lr=-1e-06: must be 0 or more"),
    ("actor__optim__lr", float("inf"), "actor.optim.lr=inf: must be finite"),
    ("actor__entropy_coeff", float("nan"), "actor.entropy_coeff=nan: must be finite"),
    ("critic__optim__betas", [0.9, 1.0], "critic.optim.betas=[0.9, 1.0]: must be 0 or more and below 1"),
    ("critic__optim__betas", [0.9], "critic.optim.betas=[0.9]: must be two numbers, for example [0.9, 0.999]"),
    ("critic__cliprange_value", 0, "critic.cliprange_value=0.0: must be above 0"),
    ("rollout__n", 0, "rollout.n=0: must be at least 1"),
    ("actor__lora__rank", -1, "actor.lora.rank=-1: must be 0 or more"),
    ("critic__lora__alpha", 0, "critic.lora.alpha=0: must be above 0"),
    ("rollout__temperature", 0.0, "rollout.temperature=0.0: must be above 0"),
    ("rollout__top_p", 0.0, "rollout.top_p=0.0: must be above 0 and at most 1"),
    ("rollout__top_p", 1.1, "rollout.top_p=1.1: must be above 0 and at most 1"),
    ("rollout__top_p", float("nan"), "rollout.top_p=nan: must be finite"),
    ("rollout__top_k", -1, "rollout.top_k=-1: must be 0 or more"),
    ("rollout__val__temperature", -1.0, "rollout.val.temperature=-1.0: must be 0 or more"),
    ("algorithm__gamma", 1.01, "algorithm.gamma=1.01: must be from 0 to 1"),
    ("algorithm__lam", -0.1, "algorithm.lam=-0.1: must be from 0 to 1"),
    ("algorithm__kl_ctrl__kl_coef", -1, "algorithm.kl_ctrl.kl_coef=-1.0: must be 0 or more"),
    ("algorithm__kl_ctrl__horizon", 0, "algorithm.kl_ctrl.horizon=0: must be at least 1"),
    ("reward__function__timeout", 0, "reward.function.timeout=0.0: must be above 0"),
    ("reward__function__on_error", "ignore", "reward.function.on_error=ignore: must be one of raise, count"),
    (
        "model__attn_implementation",
        "flash",
        "model.attn_implementation=flash: must be one of auto, sdpa, eager, flash_attention_2",
    ),
    ("trainer__total_training_steps", -1, "trainer.total_training_steps=-1: must be 0 or more"),
    ("trainer__stage_timeout", 0, "trainer.stage_timeout=0.0: must be above 0"),
    ("trainer__keep_checkpoints", -1, "trainer.keep_checkpoints=-1: must be 0 or more"),
]


@pytest.mark.parametrize(("name", "value", "message"), OUT_OF_RANGE)
def test_a_value_out_of_range(name: str, value: Any, message: str):
    assert problems(make(**{name: value}), ONE) == [message]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("rollout__val__temperature", 0.0),  # greedy validation
        ("actor__optim__clip_grad", 0.0),  # off
        ("actor__optim__lr", 0.0),
        ("trainer__save_freq", -1),  # never
        ("rollout__top_p", 1.0),
        ("actor__clip_ratio_high", 0.28),
        ("actor__target_kl", None),
        ("reward__missing_eos_penalty", -1.0),
        ("algorithm__gamma", 0.0),
    ],
)
def test_a_value_at_its_edge(name: str, value: Any):
    assert problems(make(**{name: value}), ONE) == []


CONTRADICTIONS = [
    (
        {"reward__function__path": None},
        "reward.model.path, reward.function.path: both null, so nothing gives a score; set one of them",
    ),
    (
        {"algorithm__adv_estimator": "grpo"},
        "rollout.n=1: grpo compares the responses of one prompt, and one response has advantage 0; set rollout.n=2 or "
        "more",
    ),
    (
        {"algorithm__adv_estimator": "rloo"},
        "rollout.n=1: rloo compares the responses of one prompt, and one response has advantage 0; set rollout.n=2 or "
        "more",
    ),
    (
        {"algorithm__recompute_old_logprobs": False, "actor__mismatch_correction": "truncate"},
        "algorithm.recompute_old_logprobs=false: actor.mismatch_correction=truncate compares the actor's old log-probs "
        "with the engine's, and there would be the engine's alone; set it to none, or set "
        "algorithm.recompute_old_logprobs=true",
    ),
    (
        {"algorithm__recompute_old_logprobs": False, "rollout__top_p": 0.9},
        "algorithm.recompute_old_logprobs=false: with rollout.top_p=0.9, top_k=0 the engine's log-probs are of a "
        "truncated distribution, and the policy's of the whole one; set rollout.top_p=1 and rollout.top_k=0, or set "
        "algorithm.recompute_old_logprobs=true",
    ),
    (
        {"algorithm__adv_estimator": "grpo", "rollout__n": 2, "trainer__critic_warmup": 3},
        "trainer.critic_warmup=3: there is no critic with grpo; set it to 0",
    ),
    (
        {"algorithm__kl_ctrl__type": "adaptive", "algorithm__kl_ctrl__kl_coef": 0},
        "algorithm.kl_ctrl.kl_coef=0.0: the adaptive controller multiplies it, so it stays 0; set a start above 0",
    ),
    ({"trainer__resume": "path"}, "trainer.resume=path: needs trainer.resume_path=CHECKPOINT_FOLDER"),
    (
        {"trainer__resume_path": "x"},
        "trainer.resume_path=x: is used with trainer.resume=path only; set that too",
    ),
    (
        {"trainer__test_freq": 5},
        "trainer.test_freq=5: there is nothing to validate on; set data.val_files=[FILE]",
    ),
    (
        {"debug__record_rollouts": "a", "debug__replay_rollouts": "b"},
        "debug.record_rollouts, debug.replay_rollouts: both set; a run records or replays",
    ),
]


@pytest.mark.parametrize(("changes", "message"), CONTRADICTIONS)
def test_settings_that_contradict_each_other(changes: dict[str, Any], message: str):
    assert problems(make(**changes), ONE) == [message]


def test_roles_that_the_mesh_lacks():
    assert problems(make(reward__model__path="rm"), {"actor": 1, "rollout": 1}) == [
        "algorithm.adv_estimator=gae: trains a critic, and the device mesh has none; add critic: {devices: "
        "[...]} to the "
        "mesh, or set algorithm.adv_estimator=grpo",
        "reward.model.path=rm: needs devices, and the device mesh has no reward; add reward: {devices: [...]} to the "
        "mesh, or set reward.model.path=null",
    ]
    assert problems(make(algorithm__adv_estimator="grpo", rollout__n=4), {"actor": 1, "rollout": 1}) == []


def test_layers_for_adapters_are_all_or_named():
    for targets in ([], ["q_proj", "all-linear"]):
        (said,) = problems(make(critic__lora__rank=8, critic__lora__target_modules=targets), ONE)
        assert said.startswith(f"critic.lora.target_modules={targets}: must be [all-linear], or the names of linear ")
        assert problems(make(critic__lora__target_modules=targets), ONE) == []
    assert problems(make(actor__lora__rank=8, actor__lora__target_modules=["q_proj"]), ONE) == []


def test_batches_that_do_not_divide_are_told_with_the_numbers():
    degrees = {"actor": 4, "critic": 2, "rollout": 3}
    config = make(data__train_batch_size=10, actor__ppo_mini_batch_size=6, critic__ppo_mini_batch_size=5)
    assert problems(config, degrees) == [
        "data.train_batch_size=10: 10 prompts over the 4 data-parallel ranks of actor are 2 each and 2 left "
        "over; take a "
        "multiple of 60",
        "data.train_batch_size=10: 10 prompts over the 3 data-parallel ranks of rollout are 3 each and 1 "
        "left over; take "
        "a multiple of 60",
        "actor.ppo_mini_batch_size=6: 6 prompts over the 4 data-parallel ranks of actor are 1 each and 2 "
        "left over; take "
        "a multiple of 4",
        "actor.ppo_mini_batch_size=6: data.train_batch_size=10 is not a multiple of it; take a divisor of 10",
        "critic.ppo_mini_batch_size=5: 5 prompts over the 2 data-parallel ranks of critic are 2 each and 1 left over; "
        "take a multiple of 2",
    ]


def test_a_mini_batch_that_leaves_a_rank_without_prompts():
    config = make(data__train_batch_size=8, actor__ppo_mini_batch_size=2)
    assert problems(config, {"actor": 4, "critic": 1, "rollout": 1}) == [
        "actor.ppo_mini_batch_size=2: 2 prompts over the 4 data-parallel ranks of actor are 0 each and 2 "
        "left over; take "
        "a multiple of 4"
    ]


def test_the_critics_mini_batch_is_the_actors_unless_it_is_set():
    config = make(data__train_batch_size=8, actor__ppo_mini_batch_size=2)
    assert problems(config, {"actor": 1, "critic": 4, "rollout": 1}) == [
        "actor.ppo_mini_batch_size=2: 2 prompts over the 4 data-parallel ranks of critic are 0 each and 2 "
        "left over; take "
        "a multiple of 4"
    ]


def test_roles_that_are_not_built_set_no_condition():
    config = make(algorithm__adv_estimator="grpo", rollout__n=2, data__train_batch_size=4, actor__ppo_mini_batch_size=4)
    config.algorithm.kl_ctrl.kl_coef = 0.0
    assert problems(config, {"actor": 1, "critic": 3, "reference": 3, "rollout": 1}) == []


@given(
    prompts=st.integers(1, 40),
    actor_mini=st.integers(1, 40),
    critic_mini=st.none() | st.integers(1, 40),
    degrees=st.fixed_dictionaries({role: st.integers(1, 6) for role in ("actor", "critic", "rollout", "reward")}),
)
def test_exactly_the_batches_that_can_be_shared_out_pass(
    prompts: int, actor_mini: int, critic_mini: int | None, degrees: dict[str, int]
):
    config = PPOConfig()
    config.model.path, config.data.train_files = "model", ["train.parquet"]
    config.data.train_batch_size = prompts
    config.actor.ppo_mini_batch_size, config.critic.ppo_mini_batch_size = actor_mini, critic_mini
    minis = {"actor": actor_mini, "critic": actor_mini if critic_mini is None else critic_mini}
    works = all(prompts % degree == 0 for degree in degrees.values()) and all(
        mini % degrees[role] == 0 and prompts % mini == 0 for role, mini in minis.items()
    )
    assert (problems(config, degrees) == []) == works


def test_all_problems_come_at_once():
    config = make(
        data__train_batch_size=7, actor__ppo_mini_batch_size=2, rollout__top_p=2.0, reward__function__path=None
    )
    found = problems(config, {"actor": 2, "rollout": 1})
    assert [problem.partition(":")[0].partition("=")[0] for problem in found] == [
        "rollout.top_p",
        "reward.model.path, reward.function.path",
        "algorithm.adv_estimator",
        "data.train_batch_size",
        "actor.ppo_mini_batch_size",
    ]


def test_the_plan_in_prompts_and_samples():
    config = make(
        data__train_batch_size=16,
        rollout__n=4,
        actor__ppo_mini_batch_size=8,
        actor__ppo_epochs=3,
        critic__ppo_epochs=1,
        critic__ppo_mini_batch_size=16,
        data__max_prompt_length=96,
        data__max_response_length=24,
    )
    assert resolved_plan(config, {"actor": 4, "critic": 1, "reward": 2, "rollout": 2}) == "\n".join(
        [
            "a step: 16 prompts x 4 responses = 64 samples, each of at most 96 + 24 tokens",
            "  actor: 4 data-parallel ranks, 4 prompts (16 samples) on each; 3 epochs x 2 mini-batches of 8 "
            "prompts (32 "
            "samples), 2 prompts (8 samples) of it on each rank = 6 optimizer steps; micro-batches of at most "
            "4096 tokens",
            "  critic: 1 data-parallel rank, 16 prompts (64 samples) on each; 1 epoch x 1 mini-batch of 16 prompts (64 "
            "samples), 16 prompts (64 samples) of it on each rank = 1 optimizer step; micro-batches of at most 4096 "
            "tokens",
            "  reward: 2 data-parallel ranks, 8 prompts (32 samples) on each",
            "  rollout: 2 replicas, 8 prompts (32 samples) on each",
        ]
    )


def test_what_biases_learning_is_said():
    said = cautions(make(rollout__top_p=0.9, actor__use_kl_loss=True, actor__kl_loss_type="k3"))
    assert [caution.partition(":")[0] for caution in said] == ["actor.kl_loss_type=k3", "rollout.top_p=0.9, top_k=0"]
    assert "k2's is" in said[0] and "actor.mismatch_correction=truncate" in said[1]
    assert cautions(make()) == []


def test_every_rule_and_choice_is_about_a_setting():
    names = {name for name, _ in leaves(PPOConfig())}
    assert RULES.keys() | CHOICES.keys() <= names


def test_every_setting_has_a_docstring_and_every_number_a_rule_or_a_reason():
    free = {  # any finite number, or any sign, makes sense
        "actor.entropy_coeff",
        "reward.model.weight",
        "reward.function.weight",
        "reward.function.failure_score",
        "reward.missing_eos_penalty",
        "trainer.save_freq",
    }
    hints: dict[str, Any] = {}

    def walk(cls: type, prefix: str) -> None:
        for name, hint in get_type_hints(cls).items():
            if is_dataclass(hint):
                walk(hint, f"{prefix}{name}.")  # type: ignore[arg-type]
            else:
                hints[prefix + name] = hint

    walk(PPOConfig, "")
    numbers = {name for name, hint in hints.items() if hint in (int, float, int | None, float | None)}
    assert numbers - RULES.keys() == free

    module = ast.parse(Path(settings.__file__).read_text())
    for cls in (node for node in module.body if isinstance(node, ast.ClassDef)):
        made = vars(settings)[cls.name]
        if is_dataclass(made):
            texts = [node for node in cls.body if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)]
            own = [field for field in fields(made) if field.name in vars(made).get("__annotations__", {})]
            assert len(texts) == len(own), cls.name


def test_omegaconf_takes_every_type():
    """What the command line stands on: the dataclasses are a schema that gives real instances back."""
    config = make(algorithm__adv_estimator="grpo", actor__optim__lr="1e-5", actor__optim__betas=[0, 0.5])
    assert type(config.algorithm.adv_estimator) is AdvantageEstimator
    assert config.actor.optim.lr == 1e-5 and type(config.actor.optim) is settings.OptimConfig
