"""A whole run, from a config to the end of the job."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
import traceback
from contextlib import ExitStack
from pathlib import Path

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from verl.advise.run import check_mesh
from verl.checks import cautions, resolved_plan
from verl.config import PPOConfig
from verl.engine.background import Background
from verl.engine.checkpoint import Checkpoints
from verl.flow.job import Job, start_job
from verl.mesh.spec import MeshSpec
from verl.monitor.stages import Stages
from verl.monitor.trackers import check_trackers
from verl.ppo import fit
from verl.preflight.check import check_cluster
from verl.roles.build import build_roles, place
from verl.roles.folders import check_models, find_folders, load_tokenizer
from verl.run import Prompts, Run, find_start

logger = logging.getLogger(__name__)

EXIT_SECONDS = 10.0
"""After an error a rank that cannot end by itself, since a thread or a library waits for a peer, is ended by force."""
BYSTANDER_SECONDS = 1.5
"""A rank that has lost a peer waits so long before it fails too: torchrun names the rank that fails first."""


def train(config: PPOConfig, mesh: MeshSpec) -> None:
    """Every rank runs it. UserError: what the user can mend, found before a model is loaded where that is possible."""
    signal.signal(signal.SIGTERM, _terminated)
    rank = os.environ.get("RANK", "0")
    # no handler of ours where a caller has set up logging
    logging.basicConfig(
        level=logging.INFO if rank == "0" else logging.WARNING,
        format=f"[%(asctime)s rank {rank}] %(message)s",
        datefmt="%H:%M:%S",
    )
    trainer, check_program = config.trainer, config.debug.check_program
    job = start_job(trainer.stage_timeout, check_program, lambda meeting: check_cluster(config, mesh, meeting))
    try:
        with ExitStack() as closing:
            job.board.on_stall.append(closing.close)
            try:
                _train(config, mesh, job, closing)
            except BaseException as error:
                if job.world > 1:
                    _leave_by_force_later(error)
                raise
        job.close()
    except BaseException as error:
        # with peers there is no collective from here on, not even to leave the group: they may be anywhere
        if job.world == 1:
            job.leave()
        elif _lost_a_peer(error):
            time.sleep(BYSTANDER_SECONDS)
        raise


def _train(config: PPOConfig, mesh: MeshSpec, job: Job, closing: ExitStack) -> None:
    stages = Stages(listeners=[lambda stage: job.board.at(stage or "between stages")])
    placements = place(config, mesh, job)
    run_dir = Path(job.hand_over.agree(config.trainer.run_dir, source=0))
    job.together(lambda: check_trackers(config.trainer.trackers))
    folders = find_folders(config, job)
    doubts = check_mesh(config, mesh, placements, folders.by_role(), job)
    check_models(config, placements, folders, job)
    tokenizer = job.together(lambda: load_tokenizer(folders.tokenizer, config.model.trust_remote_code))
    prompts = Prompts(config, tokenizer, job)
    trained = {role: placements[role] for role in ("actor", "critic") if role in placements}
    background = Background(job, trained) if config.trainer.async_save else None
    checkpoints = Checkpoints(run_dir, config.trainer.keep_checkpoints, job, folders.tokenizer, background)
    start = job.together(lambda: find_start(config, checkpoints, prompts))
    if job.is_main:
        logger.info("%s", resolved_plan(config, {role: p.dp for role, p in placements.items()}))
        for caution in [*cautions(config), *doubts]:
            logger.warning("%s", caution)
    roles = build_roles(
        config, mesh, placements, folders, tokenizer, prompts.total_steps, run_dir, job, stages, closing
    )
    run = Run(config, prompts, roles, tokenizer, folders.actor, checkpoints, start, run_dir, job, stages)
    closing.callback(run.close)
    with run.progress:
        fit(run, roles)
        run.finish_save()
    roles.rollout.finish()
    if config.trainer.export_final:
        run.export()


def _terminated(number: int, _: object) -> None:
    """torchrun or a scheduler ends the job: an exception, so that children and trackers are closed. Twice: at once."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    raise SystemExit(128 + number)


def _leave_by_force_later(error: BaseException) -> None:
    def leave() -> None:
        try:
            raise error
        except BaseException:  # nobody else will come to show it and to note it for torchrun
            traceback.print_exc()
            get_error_handler().record_exception(error)
        os._exit(1)

    timer = threading.Timer(EXIT_SECONDS, leave)
    timer.daemon = True
    timer.start()


def _lost_a_peer(error: BaseException) -> bool:
    """Whether another rank has gone in the middle of a message, as gloo and NCCL tell it."""
    return isinstance(error, dist.DistError) or "gloo/transport" in str(error)
