"""Settings held against each other and against the mesh: what makes a run impossible, and what its sizes come to."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

from verl.config import AdvantageEstimator, KLController, KLEstimator, MismatchCorrection, PPOConfig, Resume, leaves


class Rule(NamedTuple):
    """What a number must fulfil. NaN fulfils none, since every comparison with it is false."""

    text: str
    holds: Callable[[float], bool]


_AT_LEAST_1 = Rule("at least 1", lambda value: value >= 1)
_AT_LEAST_0 = Rule("0 or more", lambda value: value >= 0)
_ABOVE_0 = Rule("above 0", lambda value: value > 0)
_ABOVE_1 = Rule("above 1", lambda value: value > 1)
_FRACTION = Rule("from 0 to 1", lambda value: 0 <= value <= 1)
_NUCLEUS = Rule("above 0 and at most 1", lambda value: 0 < value <= 1)
_EPSILON = Rule("above 0 and below 1", lambda value: 0 < value < 1)
_DECAY = Rule("0 or more and below 1", lambda value: 0 <= value < 1)

RULES: dict[str, Rule] = {
    "model.logprob_chunk_tokens": _AT_LEAST_1,
    "data.train_batch_size": _AT_LEAST_1,
    "data.val_batch_size": _AT_LEAST_1,
    "data.max_prompt_length": _AT_LEAST_1,
    "data.max_response_length": _AT_LEAST_1,
    "data.max_val_samples": _AT_LEAST_1,
    "actor.ppo_mini_batch_size": _AT_LEAST_1,
    "actor.ppo_epochs": _AT_LEAST_1,
    "actor.max_tokens_per_micro_batch": _AT_LEAST_1,
    "actor.clip_ratio": _EPSILON,
    "actor.clip_ratio_high": _ABOVE_0,
    "actor.clip_ratio_c": _ABOVE_1,
    "actor.kl_loss_coef": _AT_LEAST_0,
    "actor.target_kl": _ABOVE_0,
    "actor.mismatch_cap": _AT_LEAST_1,
    "critic.ppo_mini_batch_size": _AT_LEAST_1,
    "critic.ppo_epochs": _AT_LEAST_1,
    "critic.max_tokens_per_micro_batch": _AT_LEAST_1,
    "critic.cliprange_value": _ABOVE_0,
    "reference.max_tokens_per_micro_batch": _AT_LEAST_1,
    "reward.model.max_tokens_per_micro_batch": _AT_LEAST_1,
    "reward.function.num_workers": _AT_LEAST_1,
    "reward.function.timeout": _ABOVE_0,
    "rollout.n": _AT_LEAST_1,
    "rollout.temperature": _ABOVE_0,
    "rollout.top_p": _NUCLEUS,
    "rollout.top_k": _AT_LEAST_0,
    "rollout.cpu_threads": _AT_LEAST_1,
    "rollout.reshard_bucket_mib": _AT_LEAST_1,
    "rollout.start_timeout": _ABOVE_0,
    "rollout.val.n": _AT_LEAST_0,
    "rollout.val.temperature": _AT_LEAST_0,
    "rollout.val.top_p": _NUCLEUS,
    "rollout.val.top_k": _AT_LEAST_0,
    "algorithm.gamma": _FRACTION,
    "algorithm.lam": _FRACTION,
    "algorithm.kl_ctrl.kl_coef": _AT_LEAST_0,
    "algorithm.kl_ctrl.target_kl": _ABOVE_0,
    "algorithm.kl_ctrl.horizon": _AT_LEAST_1,
    "trainer.total_epochs": _AT_LEAST_1,
    "trainer.total_training_steps": _AT_LEAST_0,
    "trainer.keep_checkpoints": _AT_LEAST_0,
    "trainer.test_freq": _AT_LEAST_0,
    "trainer.critic_warmup": _AT_LEAST_0,
    "trainer.seed": _AT_LEAST_0,
    "trainer.stage_timeout": _ABOVE_0,
    "trainer.log_samples": _AT_LEAST_0,
} | {
    f"{role}.{name}": rule
    for role in ("actor", "critic")
    for name, rule in {
        "optim.lr": _AT_LEAST_0,
        "optim.betas": _DECAY,
        "optim.eps": _ABOVE_0,
        "optim.weight_decay": _AT_LEAST_0,
        "optim.clip_grad": _AT_LEAST_0,
        "optim.lr_warmup_steps": _AT_LEAST_0,
        "lora.rank": _AT_LEAST_0,
        "lora.alpha": _ABOVE_0,
    }.items()
}

CHOICES: dict[str, tuple[str, ...]] = {
    "model.attn_implementation": ("auto", "sdpa", "eager", "flash_attention_2"),
    "reward.function.on_error": ("raise", "count"),
    "rollout.weight_transfer": ("node_memory", "ipc", "nccl"),
}


def problems(config: PPOConfig, dp: dict[str, int]) -> list[str]:
    """Everything that makes a run with these settings impossible, one message each.

    Args:
        config: the settings.
        dp: data-parallel degree of every role that the mesh names (the rollout: its replicas).
    Returns:
        Messages that start with the setting and its value; empty if the run can start.
    """
    return [*value_problems(config), *_combination_problems(config, dp), *_batch_problems(config, dp)]


def cautions(config: PPOConfig) -> list[str]:
    """What runs, but may not be what is meant; said once at the start."""
    said = []
    if config.actor.use_kl_loss and config.actor.kl_loss_type is not KLEstimator.k2:
        said.append(
            f"actor.kl_loss_type={config.actor.kl_loss_type}: as a loss its gradient is not the KL's (k1's mean is 0, "
            f"k3's is that of the reverse KL); k2's is"
        )
    if config.rollout.top_p < 1 or config.rollout.top_k > 0:
        said.append(
            f"rollout.top_p={config.rollout.top_p:g}, top_k={config.rollout.top_k}: responses come from a truncated "
            f"distribution, and the policy's log-probs are of the whole one. "
            "actor.mismatch_correction=truncate weights tokens by the ratio of the two"
        )
    return said


def value_problems(config: PPOConfig) -> Iterator[str]:
    """Single values out of their range."""
    for name, value in leaves(config):
        numbers = [item for item in (value if isinstance(value, list) else [value]) if type(item) in (int, float)]
        if any(not math.isfinite(number) for number in numbers):
            yield f"{name}={value}: must be finite"
        elif name in RULES and not all(RULES[name].holds(number) for number in numbers):
            yield f"{name}={value}: must be {RULES[name].text}"
        if name in CHOICES and value not in CHOICES[name]:
            yield f"{name}={value}: must be one of {', '.join(CHOICES[name])}"
    for role, optim in (("actor", config.actor.optim), ("critic", config.critic.optim)):
        if len(optim.betas) != 2:
            yield f"{role}.optim.betas={optim.betas}: must be two numbers, for example [0.9, 0.999]"


def _combination_problems(config: PPOConfig, dp: dict[str, int]) -> Iterator[str]:
    """What is missing, and settings that contradict each other or the roles of the mesh."""
    if config.model.path in ("", "???"):
        yield "model.path: missing; set model.path=FOLDER_OR_HUB_ID"
    if not config.data.train_files:
        yield "data.train_files: missing; set data.train_files=[FILE.parquet]"
    if config.reward.model.path is None and config.reward.function.path is None:
        yield "reward.model.path, reward.function.path: both null, so nothing gives a score; set one of them"
    if config.needs_critic and "critic" not in dp:
        yield (
            "algorithm.adv_estimator=gae: trains a critic, and the device mesh has none; add critic: {devices: [...]} "
            "to the mesh, or set algorithm.adv_estimator=grpo"
        )
    if config.reward.model.path is not None and "reward" not in dp:
        yield (
            f"reward.model.path={config.reward.model.path}: needs devices, and the device mesh has no reward; "
            "add reward: {devices: [...]} to the mesh, or set reward.model.path=null"
        )
    estimator = config.algorithm.adv_estimator
    if estimator is not AdvantageEstimator.gae and config.rollout.n == 1:
        yield (
            f"rollout.n=1: {estimator} compares the responses of one prompt, and one response has advantage 0; "
            "set rollout.n=2 or more"
        )
    if not config.algorithm.recompute_old_logprobs:
        name, remedy = "algorithm.recompute_old_logprobs=false", "or set algorithm.recompute_old_logprobs=true"
        correction = config.actor.mismatch_correction
        if correction is not MismatchCorrection.none:
            yield (
                f"{name}: actor.mismatch_correction={correction} compares the actor's old log-probs with the engine's, "
                f"and there would be the engine's alone; set it to none, {remedy}"
            )
        if config.rollout.top_p < 1 or config.rollout.top_k > 0:
            yield (
                f"{name}: with rollout.top_p={config.rollout.top_p:g}, top_k={config.rollout.top_k} the engine's "
                "log-probs are of a truncated distribution, and the policy's of the whole one; set rollout.top_p=1 and "
                f"rollout.top_k=0, {remedy}"
            )
    if config.trainer.critic_warmup > 0 and not config.needs_critic:
        yield f"trainer.critic_warmup={config.trainer.critic_warmup}: there is no critic with {estimator}; set it to 0"
    for role, lora in (("actor", config.actor.lora), ("critic", config.critic.lora)):
        targets = lora.target_modules
        if lora.rank and (not targets or ("all-linear" in targets and len(targets) > 1)):
            yield (
                f"{role}.lora.target_modules={targets}: must be [all-linear], or the names of linear layers, for "
                "example [q_proj, v_proj]"
            )
    control = config.algorithm.kl_ctrl
    if control.type is KLController.adaptive and control.kl_coef == 0:
        yield "algorithm.kl_ctrl.kl_coef=0.0: the adaptive controller multiplies it, so it stays 0; set a start above 0"
    if config.trainer.resume is Resume.path and not config.trainer.resume_path:
        yield "trainer.resume=path: needs trainer.resume_path=CHECKPOINT_FOLDER"
    if config.trainer.resume is not Resume.path and config.trainer.resume_path:
        yield f"trainer.resume_path={config.trainer.resume_path}: is used with trainer.resume=path only; set that too"
    if config.trainer.test_freq > 0 and not config.data.val_files:
        frequency = config.trainer.test_freq
        yield f"trainer.test_freq={frequency}: there is nothing to validate on; set data.val_files=[FILE]"
    if config.debug.record_rollouts is not None and config.debug.replay_rollouts is not None:
        yield "debug.record_rollouts, debug.replay_rollouts: both set; a run records or replays"


def _batch_problems(config: PPOConfig, dp: dict[str, int]) -> Iterator[str]:
    """Prompts that cannot be shared out evenly. Sizes below 1 were named before."""
    prompts = config.data.train_batch_size
    minis = mini_batches(config)
    if prompts < 1 or any(mini < 1 for mini in minis.values()):
        return
    used = _used(config, dp)
    step = math.lcm(*used.values(), *minis.values())
    for role, degree in used.items():
        if prompts % degree:
            yield f"data.train_batch_size={prompts}: {_uneven(prompts, degree, role)}; take a multiple of {step}"
    for role, mini in minis.items():
        own = role == "actor" or config.critic.ppo_mini_batch_size is not None
        name = f"{role if own else 'actor'}.ppo_mini_batch_size={mini}"
        degree = used.get(role, 1)
        if mini % degree:
            yield f"{name}: {_uneven(mini, degree, role)}; take a multiple of {degree}"
        if prompts % mini and own:
            yield f"{name}: data.train_batch_size={prompts} is not a multiple of it; take a divisor of {prompts}"


def _uneven(prompts: int, degree: int, role: str) -> str:
    each, over = divmod(prompts, degree)
    return f"{prompts} prompts over the {degree} data-parallel ranks of {role} are {each} each and {over} left over"


def mini_batches(config: PPOConfig) -> dict[str, int]:
    """Prompts that an optimizer step sees, over all devices, for each role that learns."""
    actor = config.actor.ppo_mini_batch_size
    critic = config.critic.ppo_mini_batch_size
    return {"actor": actor} | ({"critic": actor if critic is None else critic} if config.needs_critic else {})


def _used(config: PPOConfig, dp: dict[str, int]) -> dict[str, int]:
    """Degrees of the roles that this run builds."""
    absent = {"critic": not config.needs_critic, "reference": not config.needs_reference}
    return {role: degree for role, degree in dp.items() if not absent.get(role, False)}


def resolved_plan(config: PPOConfig, dp: dict[str, int]) -> str:
    """What the batch sizes come to, for the log: prompts and samples a step, a mini-batch and a data-parallel rank.

    `config` and `dp` are as for `problems`, and have none.
    """
    prompts, n = config.data.train_batch_size, config.rollout.n
    lines = [
        f"a step: {_count(prompts, 'prompt')} x {_count(n, 'response')} = {_count(prompts * n, 'sample')}, "
        f"each of at most {config.data.max_prompt_length} + {config.data.max_response_length} tokens"
    ]
    minis = mini_batches(config)
    for role, degree in _used(config, dp).items():
        ranks = _count(degree, "replica" if role == "rollout" else "data-parallel rank")
        share = f"  {role}: {ranks}, {_share(prompts // degree, n)} on each"
        if role in minis:
            epochs = config.actor.ppo_epochs
            tokens = config.actor.max_tokens_per_micro_batch
            if role == "critic":
                epochs = epochs if config.critic.ppo_epochs is None else config.critic.ppo_epochs
                tokens = config.critic.max_tokens_per_micro_batch
            mini, count = minis[role], prompts // minis[role]
            share += (
                f"; {_count(epochs, 'epoch')} x {_count(count, 'mini-batch')} of {_share(mini, n)}, "
                f"{_share(mini // degree, n)} of it on each rank = {_count(epochs * count, 'optimizer step')}; "
                f"micro-batches of at most {tokens} tokens"
            )
        lines.append(share)
    return "\n".join(lines)


def _share(prompts: int, n: int) -> str:
    return f"{_count(prompts, 'prompt')} ({_count(prompts * n, 'sample')})"


def _count(number: int, noun: str) -> str:
    ending = "" if number == 1 else "es" if noun.endswith("tch") else "s"
    return f"{number} {noun}{ending}"
