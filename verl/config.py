"""Every setting of a run, declared once. The docstring under a field is its documentation and its help text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from enum import StrEnum
from typing import Any


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
class LoraConfig:
    rank: int = 0
    """Rank r of the adapters B A that are trained in place of the model's own weights (docs/lora.md; needs peft). 0: the weights are trained."""
    alpha: int = 16
    """The adapters count alpha / rank times."""
    rslora: bool = False
    """They count alpha / sqrt(rank) times (rank-stabilised LoRA)."""
    target_modules: list[str] = field(default_factory=lambda: ["all-linear"])
    """Linear layers that get one, by the end of their names: [q_proj, v_proj]. [all-linear]: all of the decoder's layers, not the head."""


@dataclass(kw_only=True)
class ActorConfig:
    optim: OptimConfig = field(default_factory=OptimConfig)
    """The actor's optimizer."""
    lora: LoraConfig = field(default_factory=LoraConfig)
    """The actor's adapters."""
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
    lora: LoraConfig = field(default_factory=LoraConfig)
    """The critic's adapters; its value head is trained beside them."""
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
    reshard_bucket_mib: int = 64
    """MiB of weights that are on their way to the engines at a time, twice: one bucket is written while one is read. A larger block that an engine takes whole is a bucket of its own."""
    offload_trainers: bool = False
    """On a GPU that the rollout shares, trainers move to host memory while its engine is awake: the device then needs the larger of the two, not the sum (docs/hybrid_engine.md). It costs pinned host memory for all that they hold, and its way over PCIe there and back in every step."""
    weight_transfer: str = "node_memory"
    """How vLLM's engines get weights: node_memory (host memory that a node shares; everywhere), ipc (CUDA IPC, out of their own GPUs), nccl (broadcast by a GPU that no engine uses). docs/hybrid_engine.md compares them."""
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
    recompute_old_logprobs: bool = True
    """Take old log-probs from the actor, in a forward pass of their own; off: from the engine that sampled (the whole distribution's: top_p 1, top_k 0). Saves the pass, and the engine's error goes unseen into ratios and the KL penalty."""
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
    async_save: bool = False
    """Write checkpoints while the next steps go on: a step waits only until its shards are copied. It takes CPU memory for one copy of each rank's parameters and optimizer state, for the whole run (docs/checkpoints.md)."""
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


def leaves(section: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every setting below a dataclass with its dotted name."""
    for entry in fields(section):
        value = vars(section)[entry.name]
        if is_dataclass(value):
            yield from leaves(value, f"{prefix}{entry.name}.")
        else:
            yield prefix + entry.name, value
