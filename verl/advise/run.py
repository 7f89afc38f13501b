"""A run's own check of its mesh against its models, before any of them is loaded."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from pathlib import Path

import torch

from verl.advise.budget import budgets
from verl.advise.degrees import spanning, unsuitable
from verl.advise.fit import too_large
from verl.advise.job import Job
from verl.advise.model import ModelShape, shape_of
from verl.config import PPOConfig
from verl.errors import MeshError, UserError
from verl.flow import job as flow
from verl.flow.placement import Placement
from verl.mesh.resolve import Process
from verl.mesh.spec import MeshSpec
from verl.model.heads import Head
from verl.model.load import read_config

HEADS = {"critic": Head.token_value, "reward": Head.score}
"""Of the roles that do without a language-model head."""


def check_mesh(
    config: PPOConfig,
    mesh: MeshSpec,
    placements: Mapping[str, Placement],
    folders: Mapping[str, Path | None],
    job: flow.Job,
) -> list[str]:
    """On every rank, before a model is loaded.

    Args:
        folders: of each role with a model. One whose model cannot be measured is left out and spoken of.
    Returns:
        What may not work: devices on which an estimate of memory is too much.
    Raises:
        SharedError: degrees that do not suit the models or the nodes, and devices on which what stays is too much.
    """
    planned = Job(mesh, tuple(job.everywhere(_process(job))), placements)
    models, doubts = _models(config, placements, folders)
    device_memory = torch.cuda.get_device_properties(job.device).total_memory if job.device.type == "cuda" else None
    return doubts + job.together(lambda: _doubts(planned, models, config, device_memory))


def _doubts(job: Job, models: Mapping[str, ModelShape], config: PPOConfig, device_memory: int | None) -> list[str]:
    wrong = [*spanning(job), *unsuitable(job, models)]
    doubts: list[str] = []
    if not wrong and device_memory is not None:
        found = budgets(job, models, config, device_memory)
        wrong += too_large(job, [budget for budget in found if budget.stays > device_memory], device_memory)
        doubts += too_large(job, [budget for budget in found if budget.stays <= device_memory], device_memory)
    if wrong:
        raise MeshError(*wrong)
    return doubts


def _models(
    config: PPOConfig, placements: Mapping[str, Placement], folders: Mapping[str, Path | None]
) -> tuple[dict[str, ModelShape], list[str]]:
    trust = config.model.trust_remote_code
    models: dict[str, ModelShape] = {}
    doubts: list[str] = []
    for role, folder in folders.items():
        if folder is not None and role in placements:
            try:
                models[role] = shape_of(read_config(folder, trust), str(folder), HEADS.get(role, Head.lm), trust)
            except UserError as error:
                doubts.append(f"the mesh is not held against the {role}'s model: {error}")
    return models, doubts


def _process(job: flow.Job) -> Process:
    num_devices = torch.cuda.device_count() if job.device.type == "cuda" else None
    return Process.from_environment(os.environ, [socket.gethostname()], num_devices)
