"""From config and mesh to roles: placements, process groups, engines, workers, each on its own ranks."""

from __future__ import annotations

import logging
import os
import socket
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from verl.checks import problems
from verl.config import LoraConfig, LossAggregation, OptimConfig, PPOConfig
from verl.engine.train_engine import EngineSpec, TrainEngine
from verl.errors import ConfigError
from verl.flow.job import Job
from verl.flow.place import place_roles, reference_is_actor
from verl.flow.placement import Groups, Placement, make_groups
from verl.generation.vllm.delivery import WeightTransfer
from verl.mesh.resolve import Process, idle, resolve
from verl.mesh.spec import MeshSpec, RolloutSpec
from verl.model.heads import Head
from verl.model.load import read_config, shards_by_file
from verl.monitor.stages import Stages
from verl.reshard.layout import Box
from verl.rewards.pool import RewardPool
from verl.rewards.resolve import FunctionSpec
from verl.rewards.resolve import resolve as resolve_function
from verl.roles.actor import Actor
from verl.roles.build_rollout import (
    choose_backend,
    generating_peers,
    make_sync,
    share_weights,
    start_engines,
)
from verl.roles.critic import Critic
from verl.roles.folders import Folders, stop_tokens
from verl.roles.judge import Judge
from verl.roles.learner import Schedule
from verl.roles.reference import Reference
from verl.roles.reward import Reward
from verl.roles.role import Here, torch_dtype
from verl.roles.rollout import Rollout
from verl.roles.turns import make_turns
from verl.roles.weight_paths import refuse_transfer

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Roles:
    actor: Actor
    critic: Critic | None
    reference: Reference | None
    reward: Reward
    rollout: Rollout
    judge: Judge

    def trained(self) -> dict[str, TrainEngine]:
        """The engines on this rank that learn, by role."""
        return {
            role.placement.role: role.engine for role in (self.actor, self.critic) if role is not None and role.serves
        }


def place(config: PPOConfig, mesh: MeshSpec, job: Job) -> dict[str, Placement]:
    """The ranks of every role that the algorithm has. Raises UserError with all that does not fit."""
    num_devices = None if job.device.type == "cpu" else _visible_devices()
    here = Process.from_environment(os.environ, [socket.gethostname()], num_devices)
    processes = job.everywhere(here)
    placements = job.together(lambda: _place(config, mesh, processes))
    if job.is_main and (unused := idle(mesh, processes)):
        logger.warning("no role uses the devices of rank %s", ", ".join(str(process.rank) for process in unused))
    return placements


def _place(config: PPOConfig, mesh: MeshSpec, processes: list[Process]) -> dict[str, Placement]:
    ranks = resolve(mesh, processes, sys.argv[1:])
    needed = {"critic": config.needs_critic, "reference": config.needs_reference}
    placements = place_roles(mesh, ranks, [role for role in ranks if not needed.get(role, True)])
    if found := problems(config, {role: placement.dp for role, placement in placements.items()}):
        raise ConfigError(*found)
    return placements


def build_roles(
    config: PPOConfig,
    mesh: MeshSpec,
    placements: dict[str, Placement],
    folders: Folders,
    tokenizer: PreTrainedTokenizerBase,
    total_steps: int,
    run_dir: Path,
    job: Job,
    stages: Stages,
    closing: ExitStack,
) -> Roles:
    """Engines start first, since they take longest, then the trainers load, then the engines are awaited."""
    rollout_spec = mesh.roles["rollout"]
    assert isinstance(rollout_spec, RolloutSpec)
    model = job.together(lambda: read_config(folders.actor, config.model.trust_remote_code))
    stop = job.together(lambda: stop_tokens(folders.actor, tokenizer, config.rollout.stop_token_ids))
    backend = choose_backend(config, rollout_spec, placements["rollout"], job)
    transfer = WeightTransfer(config.rollout.weight_transfer)
    job.together(
        lambda: refuse_transfer(transfer, backend, job.device.type, placements["rollout"], placements["actor"])
    )
    builder = _Builder(config, mesh, placements, total_steps, Here(job, stages))
    nodes = [
        f"{node[0]}/{node[1]}" for node in job.everywhere((socket.gethostname(), os.environ.get("GROUP_RANK", "0")))
    ]
    pool = job.together(lambda: start_pool(config, placements["reward"], job))
    if pool is not None:
        closing.callback(pool.close)
    modelled = [
        place for role, place in placements.items() if role != "rollout" and (role != "reward" or folders.reward)
    ]
    groups = builder.groups
    engines = start_engines(
        config,
        rollout_spec,
        backend,
        placements["rollout"],
        modelled,
        folders.actor,
        model,
        run_dir,
        nodes,
        groups.get("rollout"),
        job,
    )
    if engines.backend is not None:
        closing.callback(engines.backend.close)
    actor = builder.actor(folders.actor)
    critic = builder.critic(folders.critic) if "critic" in placements else None
    reference = builder.reference(folders.reference, actor) if "reference" in placements else None
    reward_engine = builder.engine("reward", folders.reward, Head.score) if folders.reward else None
    reward = Reward(
        placements["reward"], builder.here, reward_engine, groups.get("reward"), pool, tokenizer, config.reward
    )
    engines.wait_ready()
    boxes = _boxes(actor)
    share_weights(engines, actor, boxes, job)
    sync = make_sync(engines, actor, boxes, nodes, job)
    limit = config.data.max_response_length
    rollout = Rollout(
        placements["rollout"],
        builder.here,
        engines.backend,
        engines.reader,
        sync,
        engines.targets,
        make_turns(config, engines, placements["rollout"], modelled, builder.made, groups.get("rollout"), builder.here),
        generating_peers(engines, placements["rollout"], job),
        engines.node_memory,
        config.trainer.seed,
        limit,
        stop,
        config.rollout.ignore_eos,
    )
    if pool is not None:
        pool.wait_ready(config.rollout.start_timeout)
    at = placements["critic"] if critic is not None else placements["actor"]
    judge = Judge(at, builder.here, groups.get(at.role), config.algorithm, config.rollout.n)
    return Roles(actor, critic, reference, reward, rollout, judge)


def start_pool(config: PPOConfig, placement: Placement, job: Job) -> RewardPool | None:
    """The reward function's workers, on the ranks that score; the function is checked on each of them first."""
    function = config.reward.function
    if function.path is None or job.rank not in placement.leaders:
        return None
    spec = FunctionSpec(function.path, function.kwargs)
    resolve_function(spec)
    return RewardPool(
        spec,
        num_workers=function.num_workers,
        timeout=function.timeout,
        failure_score=function.failure_score,
        on_error=function.on_error,
    )


class _Builder:
    """The model roles, each engine on the ranks of its role."""

    def __init__(
        self, config: PPOConfig, mesh: MeshSpec, placements: dict[str, Placement], total_steps: int, here: Here
    ) -> None:
        self.config, self.mesh, self.placements, self.total_steps, self.here = (
            config,
            mesh,
            placements,
            total_steps,
            here,
        )
        self.groups: dict[str, Groups] = make_groups(
            list(placements.values()), here.rank, here.job.device.type, here.job.timeout
        )
        self.made: list[TrainEngine] = []
        """On this rank."""

    def engine(
        self,
        role: str,
        folder: Path,
        head: Head,
        optim: OptimConfig | None = None,
        steps: int = 0,
        lora: LoraConfig | None = None,
    ) -> TrainEngine | None:
        if role not in self.groups:
            return None
        spec = self.mesh.roles.get(role, self.mesh.roles["actor"])
        budget = {
            "actor": self.config.actor.max_tokens_per_micro_batch,
            "critic": self.config.critic.max_tokens_per_micro_batch,
            "reference": self.config.reference.max_tokens_per_micro_batch,
            "reward": self.config.reward.model.max_tokens_per_micro_batch,
        }[role]
        model = self.config.model
        engine = TrainEngine(
            EngineSpec(
                folder=folder,
                head=head,
                trained=optim is not None,
                dtype=torch_dtype(spec.dtype),
                seed=self.config.trainer.seed,
                max_tokens_per_micro_batch=budget,
                attn_implementation=model.attn_implementation,
                logprob_chunk_tokens=model.logprob_chunk_tokens,
                trust_remote_code=model.trust_remote_code,
                reshard_after_forward=model.reshard_after_forward,
                activation_checkpointing=spec.hybrid_engine.activation_checkpointing,
                offload_activations=spec.hybrid_engine.offload_activations,
                offload_parameters=spec.hybrid_engine.offload_parameters,
                offload_optimizer=spec.hybrid_engine.offload_optimizer,
                virtual_stages=spec.parallelism.virtual_stages,
                lora=lora if lora is not None and lora.rank else None,
            ),
            self.groups[role],
            self.here.job.device,
            self.here.job.board,
        )
        if optim is not None:
            engine.add_optimizer(optim, steps)
        self.made.append(engine)
        return engine

    def actor(self, folder: Path) -> Actor:
        config = self.config.actor
        schedule = self._schedule(config.ppo_mini_batch_size, config.ppo_epochs, config.loss_agg_mode)
        steps = self.total_steps * schedule.optimizer_steps
        engine = self.engine("actor", folder, Head.lm, config.optim, steps, config.lora)
        groups, temperature = self.groups.get("actor"), self.config.rollout.temperature
        return Actor(self.placements["actor"], self.here, engine, groups, schedule, config, temperature)

    def critic(self, folder: Path) -> Critic:
        config, actor = self.config.critic, self.config.actor
        mini_batch_size = config.ppo_mini_batch_size or actor.ppo_mini_batch_size
        schedule = self._schedule(mini_batch_size, config.ppo_epochs or actor.ppo_epochs, config.loss_agg_mode)
        steps = self.total_steps * schedule.optimizer_steps
        engine = self.engine("critic", folder, Head.token_value, config.optim, steps, config.lora)
        return Critic(self.placements["critic"], self.here, engine, self.groups.get("critic"), schedule, config)

    def _schedule(self, mini_batch_size: int, epochs: int, mode: LossAggregation) -> Schedule:
        return Schedule(self.config.data.train_batch_size // mini_batch_size, epochs, self.config.rollout.n, mode)

    def reference(self, folder: Path, actor: Actor) -> Reference:
        if reference_is_actor(self.config, self.mesh, self.placements):
            engine = actor.engine if actor.serves else None
        else:
            engine = self.engine("reference", folder, Head.lm)
        return Reference(
            self.placements["reference"],
            self.here,
            engine,
            self.groups.get("reference"),
            self.config.rollout.temperature,
        )


def _boxes(actor: Actor) -> dict[str, Box]:
    if not actor.serves:
        return {}
    parts = shards_by_file(actor.engine.model)
    return {name: tuple((side.start, side.stop) for side in box) for name, (box, _) in parts.items()}


def _visible_devices() -> int:
    import torch

    return torch.cuda.device_count()
