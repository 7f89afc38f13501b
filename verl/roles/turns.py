"""Turns on a device that the rollout shares, made for this rank."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
import torch.distributed as dist

from verl.config import PPOConfig
from verl.engine.parked import Parked
from verl.engine.train_engine import TrainEngine
from verl.flow.job import Job
from verl.flow.placement import Groups, Placement
from verl.generation.residency import Turns, sharing
from verl.roles.build_rollout import Engines, takes_turns
from verl.roles.role import Here

logger = logging.getLogger(__name__)


def make_turns(
    config: PPOConfig,
    engines: Engines,
    placement: Placement,
    others: Sequence[Placement],
    trainers: Sequence[TrainEngine],
    groups: Groups | None,
    here: Here,
) -> Turns:
    """`others`: the roles with a model; `trainers`: this rank's part of them. `groups`: the rollout's, on its ranks."""
    job, replica = here.job, takes_turns(placement, others, here.job)

    def barrier() -> None:
        assert replica is not None and groups is not None
        with job.board.waiting([rank for rank in replica.ranks if rank != job.rank], "the device"):
            dist.all_reduce(torch.zeros(1), group=groups.mesh["tp"].get_group())  # on the CPU, so by gloo

    leaving: list[Parked] = []
    if config.rollout.offload_trainers:
        reason = _nothing_moves(config, placement, others, job)
        if reason is not None and job.is_main:
            logger.warning("rollout.offload_trainers=true: nothing moves, since %s. Leave it out", reason)
        moves = replica is not None and config.debug.replay_rollouts is None
        leaving = [engine.parked for engine in trainers] if moves else []
    if engines.in_process is not None:
        for parked in leaving:  # the engine computes with some of the trainers' own tensors
            parked.stay(engines.in_process.weights().values())
    return Turns(replica, engines.sleeper, leaving, torch.cuda.empty_cache, barrier, here.stages)


def _nothing_moves(config: PPOConfig, placement: Placement, others: Sequence[Placement], job: Job) -> str | None:
    """Why, if that is so on all ranks."""
    if job.device.type == "cpu":
        return "what a CPU computes with is in host memory anyway"
    if config.debug.replay_rollouts is not None:
        return "no engine needs a device where debug.replay_rollouts gives the responses"
    shared = any(sharing(placement, others, rank) for rank in placement.ranks)
    return None if shared else "the rollout shares no device with a role that has a model"
