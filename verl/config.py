"""Every setting of a run, declared once. The docstring under a field is its documentation and its help text."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from enum import StrEnum
from typing import Any, NamedTuple


class AdvantageEstimator(StrEnum):
    gae = "gae"
    grpo = "grpo"
    rloo = "rloo"


class KLEstimator(StrEnum):
    k1 = "k1"
    k2 = "k2"
    k3 = "k3"


class KLController(StrEnum):
    fixed = "fixed"
    adaptive = "adaptive"


class LossAggregation(StrEnum):
    token_mean = "token_mean"
    seq_mean_token_sum = "seq_mean_token_sum"
    seq_mean_token_mean = "seq_mean_token_mean"


class Schedule(StrEnum):
    constant = "constant"
    linear = "linear"
    cosine = "cosine"


class MismatchCorrection(StrEnum):
    none = "none"
    truncate = "truncate"
    mask = "mask"


class Resume(StrEnum):
    auto = "auto"
    never = "never"
    path = "path"


class Dtype(StrEnum):
    bfloat16 = "bfloat16"
    float32 = "float32"
    float16 = "float16"


@dataclass(kw_only=True)
class ModelConfig:
    path: str = "???"
    """Folder or hub id of the language model that the actor starts from. Required."""
    tokenizer_path: str | None = None
    """Folder or hub id of the tokenizer; the model's own when null."""
    trust_remote_code: bool = False
    """Run Python code that ships with the model. Off: a model that needs it is refused."""
    attn_implementation: str = "auto"
    """Attention kernel of the training engine: auto, sdpa, eager, flash_attention_2. auto: flash_attention_2 on a GPU that has it, else sdpa."""
    reshard_after_forward: bool | None = None
    """FSDP frees gathered parameters after each forward. null: on a GPU, where memory is short; not on a CPU, where messages are dear."""
    logprob_chunk_tokens: int = 512
    """Tokens whose logits are held at once when log-probs are computed; [tokens, vocabulary] never exists whole."""


@dataclass(kw_only=True)
class DataConfig:
    train_files: list[str] = field(default_factory=list)
    """Parquet or JSONL files of training prompts, in the format that docs/data.md describes. Required."""
    val_files: list[str] = field(default_factory=list)
    """Files of validation prompts. Empty: no validation."""
    prompt_key: str = "prompt"
    """Column that holds the prompt: chat messages or a string."""
    train_batch_size: int = 16
    """Prompts a step, over all devices. Each is sampled rollout.n times."""
    val_batch_size: int | None = None
    """Validation prompts generated at once, over all devices; null: all of them."""
    max_prompt_length: int = 512
    """Longest prompt in tokens, counted on the token ids that are fed to the model."""
    max_response_length: int = 512
    """Most tokens sampled for one response."""
    filter_overlong_prompts: bool = True
    """Drop prompts over max_prompt_length, counted and logged. Off: one such prompt is an error."""
    skip_bad_rows: bool = False
    """Drop malformed rows, counted and logged. Off: the first ones are named in an error."""
    shuffle: bool = True
    """Shuffle the training prompts anew each epoch, by trainer.seed and the epoch's number."""
    max_val_samples: int | None = None
    """Use only the first so many validation prompts."""


@dataclass(kw_only=True)
class OptimConfig:
    lr: float = 1e-6
    """Peak learning rate of AdamW."""
    betas: list[float] = field(default_factory=lambda: [0.9, 0.999])
    """AdamW's decay rates of the first and second moment."""
    eps: float = 1e-8
    """AdamW's epsilon."""
    weight_decay: float = 0.0
    """Decoupled weight decay; not applied to biases and norms."""
    clip_grad: float = 1.0
    """Largest global gradient norm, over all parameters and ranks; 0 turns clipping off."""
    lr_scheduler: Schedule = Schedule.constant
    """Shape of the learning rate after warm-up: constant, linear (to 0), cosine (to 0)."""
    lr_warmup_steps: int = 0
    """Optimizer steps over which the learning rate rises linearly from 0."""


@dataclass(kw_only=True)
class ActorConfig:
    optim: OptimConfig = field(default_factory=OptimConfig)
    """The actor's optimizer."""
    ppo_mini_batch_size: int = 16
    """Prompts an optimizer step sees, over all devices (each with its rollout.n responses)."""
    ppo_epochs: int = 1
    """Passes over a step's experience."""
    max_tokens_per_micro_batch: int = 4096
    """Token budget (prompt and response) of one forward-backward on one device; raised to the longest sequence if that is longer."""
    clip_ratio: float = 0.2
    """PPO's epsilon: the ratio is clipped to [1 - clip_ratio, 1 + clip_ratio]."""
    clip_ratio_high: float | None = None
    """Upper epsilon where it differs from clip_ratio (DAPO's clip-higher)."""
    clip_ratio_c: float | None = None
    """Dual clip: lower bound c > 1 of the objective for negative advantages; null turns it off."""
    entropy_coeff: float = 0.0
    """Weight of the entropy bonus in the loss."""
    use_kl_loss: bool = False
    """Add kl_loss_coef * KL(actor || reference) to the loss (GRPO's way), besides or instead of the penalty in the reward."""
    kl_loss_coef: float = 0.001
    """Weight of that KL loss."""
    kl_loss_type: KLEstimator = KLEstimator.k2
    """Estimator of the KL loss. Only k2 has the KL's gradient on policy; k1 and k3 are biased as a loss and warned of."""
    loss_agg_mode: LossAggregation = LossAggregation.token_mean
    """How token losses become one number; always over the global mini-batch, so no split changes it."""
    target_kl: float | None = None
    """Stop the actor's remaining mini-batches of a step once KL(old || new) of one exceeds 1.5 times this; null: never."""
    mismatch_correction: MismatchCorrection = MismatchCorrection.none
    """Weight tokens by old / rollout probability: none, truncate (at mismatch_cap), mask (drop tokens outside [1/cap, cap])."""
    mismatch_cap: float = 2.0
    """Bound of that weight."""


@dataclass(kw_only=True)
class CriticConfig:
    path: str | None = None
    """Model the critic starts from; the actor's when null. A value head is added unless the folder has one (score.weight)."""
    optim: OptimConfig = field(default_factory=lambda: OptimConfig(lr=1e-5))
    """The critic's optimizer."""
    ppo_mini_batch_size: int | None = None
    """Prompts an optimizer step sees; the actor's when null."""
    ppo_epochs: int | None = None
    """Passes over a step's experience; the actor's when null."""
    max_tokens_per_micro_batch: int = 4096
    """Token budget of one forward-backward on one device."""
    cliprange_value: float = 0.2
    """New values are clipped to this distance from the old ones in the value loss."""
    loss_agg_mode: LossAggregation = LossAggregation.token_mean
    """How token losses become one number."""


@dataclass(kw_only=True)
class ReferenceConfig:
    path: str | None = None
    """Model of the reference policy; the actor's initial model when null."""
    max_tokens_per_micro_batch: int = 8192
    """Token budget of one forward on one device."""


@dataclass(kw_only=True)
class RewardModelConfig:
    path: str | None = None
    """Folder or hub id of an AutoModelForSequenceClassification with one label; null: no reward model."""
    weight: float = 1.0
    """Its weight in the sum with the reward function."""
    max_tokens_per_micro_batch: int = 8192
    """Token budget of one forward on one device."""


@dataclass(kw_only=True)
class RewardFunctionConfig:
    path: str | None = "auto"
    """Reward function: auto (chosen by data_source), a built-in name, file.py:name or package.module:name; null: none."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments added to each call."""
    weight: float = 1.0
    """Its weight in the sum with the reward model."""
    num_workers: int = 1
    """Worker processes on each rank that scores."""
    timeout: float = 30.0
    """Seconds one sample may take before its worker is killed."""
    failure_score: float = 0.0
    """Score of a sample whose function timed out, raised or returned no finite number."""
    on_error: str = "raise"
    """What a raise or a non-finite score does: raise (stop the run and name the sample) or count (failure_score, counted and logged). A time-out is always counted."""


@dataclass(kw_only=True)
class RewardConfig:
    model: RewardModelConfig = field(default_factory=RewardModelConfig)
    """A reward model."""
    function: RewardFunctionConfig = field(default_factory=RewardFunctionConfig)
    """A reward function, compute_score(data_source, solution_str, ground_truth, extra_info=None) -> float or dict with "score"."""
    missing_eos_penalty: float = 0.0
    """Subtracted from the score of a response that was cut off before a stop token."""


@dataclass(kw_only=True)
class SamplingConfig:
    temperature: float = 1.0
    """Softmax temperature; 0 is greedy. Training log-probs use the same one."""
    top_p: float = 1.0
    """Nucleus mass; 1 is off."""
    top_k: int = 0
    """Tokens kept; 0 is off."""


@dataclass(kw_only=True)
class ValidationSamplingConfig(SamplingConfig):
    n: int = 1
    """Sampled responses a validation prompt gets beside the greedy one; 0: greedy only."""


@dataclass(kw_only=True)
class RolloutConfig(SamplingConfig):
    n: int = 1
    """Responses sampled for each prompt."""
    stop_token_ids: list[int] = field(default_factory=list)
    """Token ids that end a response, besides the model's own end tokens."""
    ignore_eos: bool = False
    """Go on past end tokens up to max_response_length (for benchmarks)."""
    start_timeout: float = 600.0
    """Seconds an engine may take to start."""
    cpu_threads: int | None = None
    """Threads of an engine on a CPU. null: vLLM takes its share of the node's cores, torch what the process has."""
    val: ValidationSamplingConfig = field(default_factory=ValidationSamplingConfig)
    """Sampling for validation."""


@dataclass(kw_only=True)
class KLControlConfig:
    type: KLController = KLController.fixed
    """fixed, or adaptive (Ziegler et al. 2019, section 2.2)."""
    kl_coef: float = 0.001
    """Coefficient of the KL penalty in the reward, at start. 0: no reference is built unless actor.use_kl_loss."""
    target_kl: float = 6.0
    """Adaptive: the KL a sequence that the controller aims at."""
    horizon: int = 10000
    """Adaptive: samples over which the coefficient can move by its proportional limit."""


@dataclass(kw_only=True)
class AlgorithmConfig:
    adv_estimator: AdvantageEstimator = AdvantageEstimator.gae
    """gae (with a critic); grpo (less the mean of the prompt's responses) or rloo (less that of its other ones), without."""
    gamma: float = 1.0
    """Discount."""
    lam: float = 1.0
    """GAE's lambda."""
    whiten_advantages: bool = True
    """Whiten the step's advantages over all trainable tokens."""
    norm_adv_by_std_in_grpo: bool = True
    """grpo: divide by the group's standard deviation (off: Dr. GRPO)."""
    kl_penalty: KLEstimator = KLEstimator.k1
    """Estimator of the KL penalty in the reward."""
    kl_ctrl: KLControlConfig = field(default_factory=KLControlConfig)
    """Coefficient of the KL penalty in the reward."""


@dataclass(kw_only=True)
class TrainerConfig:
    project_name: str = "verl"
    """First part of the run's folder."""
    experiment_name: str = "ppo"
    """Second part of the run's folder."""
    run_dir: str = "outputs/${trainer.project_name}/${trainer.experiment_name}"
    """The run's folder: checkpoints, metrics, samples, logs. Never derived from the clock, so that a restart finds it."""
    total_epochs: int = 1
    """Passes over the training prompts."""
    total_training_steps: int | None = None
    """Steps; overrides total_epochs when set."""
    save_freq: int = 0
    """Steps between checkpoints; 0: only at the end, negative: never."""
    keep_checkpoints: int = 2
    """Newest checkpoints kept; 0: all."""
    test_freq: int = 0
    """Steps between validations; 0: only at the end."""
    val_before_train: bool = True
    """Validate before the first step."""
    critic_warmup: int = 0
    """Steps in which only the critic learns."""
    resume: Resume = Resume.auto
    """auto: from the newest whole checkpoint in run_dir; never; path: from resume_path."""
    resume_path: str | None = None
    """Checkpoint folder for resume: path."""
    export_final: bool = False
    """Write the trained actor as a Hugging Face folder at the end (run_dir/hf)."""
    seed: int = 1
    """Seed of every random draw."""
    stage_timeout: float = 600.0
    """Seconds without a sign of life from an awaited rank before the job ends and names it."""
    trackers: list[str] = field(default_factory=lambda: ["tensorboard"])
    """accelerate's trackers besides the JSONL file that is always written: tensorboard, wandb, mlflow, ..."""
    log_samples: int = 4
    """Responses written to run_dir/samples a step."""
    progress: bool = True
    """Live progress on rank 0 (plain lines when the output is not a terminal)."""


@dataclass(kw_only=True)
class DebugConfig:
    collapse_mesh: bool = False
    """Put all roles of the mesh on device 0 of this one process."""
    check_program: bool = False
    """Compare a hash of the hand-over log of all ranks at each step's end."""
    record_rollouts: str | None = None
    """Folder to write each step's responses to."""
    replay_rollouts: str | None = None
    """Folder to read each step's responses from instead of generating."""
    timeline: bool = False
    """Write each rank's stages with start and end to run_dir/timeline."""


@dataclass(kw_only=True)
class PPOConfig:
    model: ModelConfig = field(default_factory=ModelConfig)
    """The language model."""
    data: DataConfig = field(default_factory=DataConfig)
    """Prompts and lengths."""
    actor: ActorConfig = field(default_factory=ActorConfig)
    """The policy's update."""
    critic: CriticConfig = field(default_factory=CriticConfig)
    """The value function's update."""
    reference: ReferenceConfig = field(default_factory=ReferenceConfig)
    """The frozen policy of the KL term."""
    reward: RewardConfig = field(default_factory=RewardConfig)
    """Where scores come from."""
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    """Sampling. The engine and its devices are the mesh's."""
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    """Advantages and the KL penalty."""
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    """The run."""
    debug: DebugConfig = field(default_factory=DebugConfig)
    """For finding faults."""
    device_mesh: Any = None
    """Which role runs where and how it is split: see configs/device_mesh/ and docs/device_mesh.md. null: all roles on device 0."""

    @property
    def needs_critic(self) -> bool:
        return self.algorithm.adv_estimator is AdvantageEstimator.gae

    @property
    def needs_reference(self) -> bool:
        return self.actor.use_kl_loss or self.algorithm.kl_ctrl.kl_coef != 0


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
    f"{role}.optim.{name}": rule
    for role in ("actor", "critic")
    for name, rule in {
        "lr": _AT_LEAST_0,
        "betas": _DECAY,
        "eps": _ABOVE_0,
        "weight_decay": _AT_LEAST_0,
        "clip_grad": _AT_LEAST_0,
        "lr_warmup_steps": _AT_LEAST_0,
    }.items()
}

CHOICES: dict[str, tuple[str, ...]] = {
    "model.attn_implementation": ("auto", "sdpa", "eager", "flash_attention_2"),
    "reward.function.on_error": ("raise", "count"),
}


def problems(config: PPOConfig, dp: dict[str, int]) -> list[str]:
    """Everything that makes a run with these settings impossible, one message each.

    Args:
        config: the settings.
        dp: data-parallel degree of every role that the mesh names (the rollout: its replicas).
    Returns:
        Messages that start with the setting and its value; empty if the run can start.
    """
    return [*_value_problems(config), *_combination_problems(config, dp), *_batch_problems(config, dp)]


def leaves(section: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every setting below a dataclass with its dotted name."""
    for entry in fields(section):
        value = vars(section)[entry.name]
        if is_dataclass(value):
            yield from leaves(value, f"{prefix}{entry.name}.")
        else:
            yield prefix + entry.name, value


def _value_problems(config: PPOConfig) -> Iterator[str]:
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
    if config.trainer.critic_warmup > 0 and not config.needs_critic:
        yield f"trainer.critic_warmup={config.trainer.critic_warmup}: there is no critic with {estimator}; set it to 0"
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
    lines += [f"note: {caution}" for caution in _cautions(config)]
    return "\n".join(lines)


def _share(prompts: int, n: int) -> str:
    return f"{_count(prompts, 'prompt')} ({_count(prompts * n, 'sample')})"


def _count(number: int, noun: str) -> str:
    ending = "" if number == 1 else "es" if noun.endswith("tch") else "s"
    return f"{number} {noun}{ending}"


def _cautions(config: PPOConfig) -> Iterator[str]:
    """Settings that work and bias what is learnt."""
    sampling = config.rollout
    if sampling.top_p < 1 or sampling.top_k > 0:
        yield (
            f"rollout.top_p={sampling.top_p}, rollout.top_k={sampling.top_k} cut the distribution that is sampled "
            "from, and training log-probs are of the uncut one: the importance ratio is biased "
            "(actor.mismatch_correction)"
        )
    if config.actor.use_kl_loss and config.actor.kl_loss_type is not KLEstimator.k2:
        kind = config.actor.kl_loss_type
        yield f"actor.kl_loss_type={kind} as a loss does not have the gradient of the KL; k2 has"
