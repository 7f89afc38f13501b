"""One run's surroundings: its prompts, its books (metrics, samples, checkpoints), and where it stands."""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from verl.config import PPOConfig, Resume
from verl.data.dataset import PromptDataset
from verl.data.loader import PromptLoader, validation_batches
from verl.data.prompts import PromptBatch
from verl.data.select import select_rows
from verl.engine.checkpoint import Checkpoints
from verl.engine.export import export_hf
from verl.engine.manifest import Found
from verl.flow.batch import Experience
from verl.flow.job import Job
from verl.monitor.log import LoggedSample, MetricsLog, SampleLog
from verl.monitor.metrics import Metrics
from verl.monitor.names import VALIDATION_SCORE, throughput
from verl.monitor.progress import Progress
from verl.monitor.stages import Stages, timings
from verl.monitor.timeline import Timeline
from verl.monitor.trackers import Trackers
from verl.rewards.auto import check_data_sources
from verl.roles.build import Roles

logger = logging.getLogger(__name__)


def open_dataset(
    config: PPOConfig,
    files: list[str],
    setting: str,
    max_rows: int | None,
    tokenizer: PreTrainedTokenizerBase,
    job: Job,
) -> PromptDataset:
    """The usable prompts of `files`: rank 0 tokenises all of them and says which to keep."""
    data = config.data
    needs_truth = config.reward.function.path is not None
    dataset = job.together(
        lambda: PromptDataset(
            files, tokenizer, prompt_key=data.prompt_key, needs_ground_truth=needs_truth, setting=setting
        )
    )

    def select() -> list[int]:
        if not job.is_main:
            return []
        selection = select_rows(
            dataset,
            max_prompt_length=data.max_prompt_length,
            filter_overlong=data.filter_overlong_prompts,
            skip_bad_rows=data.skip_bad_rows,
            max_rows=max_rows,
            on_row=job.board.beat,
        )
        if config.reward.function.path is not None:
            check_data_sources(config.reward.function.path, selection.data_sources)
        return selection.indices

    kept = job.hand_over.agree(job.together(select), source=0)
    job.together(lambda: dataset.keep(kept))
    return dataset


class Prompts:
    """A run's training and validation prompts."""

    def __init__(self, config: PPOConfig, tokenizer: PreTrainedTokenizerBase, job: Job) -> None:
        data = config.data
        train = open_dataset(config, data.train_files, "data.train_files", None, tokenizer, job)
        self.loader = job.together(
            lambda: PromptLoader(train, data.train_batch_size, config.trainer.seed, data.shuffle)
        )
        self.validation: PromptDataset | None = None
        if data.val_files:
            self.validation = open_dataset(
                config, data.val_files, "data.val_files", data.max_val_samples, tokenizer, job
            )
        steps = config.trainer.total_training_steps
        self.total_steps = steps if steps is not None else config.trainer.total_epochs * self.loader.batches_per_epoch


def find_start(config: PPOConfig, checkpoints: Checkpoints, prompts: Prompts) -> Found | None:
    """The checkpoint that the run goes on from; its prompts are brought to that place.

    Before any model is loaded, since a checkpoint may be none, or of other settings: then it raises UserError.
    """
    trainer = config.trainer
    checkpoints.prepare()
    if trainer.resume is Resume.path:
        assert trainer.resume_path is not None
        found = checkpoints.at(Path(trainer.resume_path))
    else:
        found = checkpoints.latest() if trainer.resume is Resume.auto else None
    if found is not None:
        checkpoints.check(found, ["actor", "critic"] if config.needs_critic else ["actor"])
        prompts.loader.load_state_dict(found.trainer_state["loader"])
    return found


class Run:
    """What `fit` needs besides the roles. Its methods are called on every rank."""

    def __init__(
        self,
        config: PPOConfig,
        prompts: Prompts,
        roles: Roles,
        tokenizer: PreTrainedTokenizerBase,
        model_folder: Path,
        checkpoints: Checkpoints,
        start: Found | None,
        run_dir: Path,
        job: Job,
        stages: Stages,
    ) -> None:
        self.config, self.job, self.loader, self.total_steps = config, job, prompts.loader, prompts.total_steps
        self._validation, self._roles, self._tokenizer, self._stages = prompts.validation, roles, tokenizer, stages
        self._model_folder, self._checkpoints, self._run_dir = model_folder, checkpoints, run_dir
        self.best: dict[str, float] | None = None
        """The best validation score so far and its step; on rank 0."""
        self.first_step = self._resume(start)
        self._began = time.monotonic()
        self._pause = 0.0
        first_logged = self.first_step + 1 if self.first_step else 0
        self._metrics = MetricsLog(run_dir, first_logged) if job.is_main else None
        self._samples = SampleLog(run_dir) if job.is_main else None
        self._timeline = Timeline(run_dir, job.rank, first_logged) if config.debug.timeline else None
        self._trackers = Trackers(
            config.trainer.trackers,
            run_dir,
            project=config.trainer.project_name,
            experiment=config.trainer.experiment_name,
            config=asdict(config),
            first_step=first_logged,
        )
        self.progress = Progress(
            self.total_steps, done=self.first_step, enabled=job.is_main and config.trainer.progress
        )

    @property
    def validates(self) -> bool:
        return self._validation is not None

    def validation_batches(self) -> Iterator[PromptBatch]:
        """All validation prompts, in batches that the roles' data-parallel ranks divide."""
        assert self._validation is not None
        ranks = math.lcm(self._roles.rollout.placement.dp, self._roles.reward.placement.dp)
        return validation_batches(self._validation, self.config.data.val_batch_size, ranks, 0)

    def due(self, step: int, frequency: int) -> bool:
        """Whether something is due after `step` steps: every `frequency` steps (0: never) and at the end."""
        return step == self.total_steps or (frequency > 0 and step % frequency == 0)

    def begin_step(self) -> None:
        self._began = time.monotonic()

    def settle(self, step: int, prompts: PromptBatch, metrics: Metrics, experience: Experience) -> None:
        """The end of a step: rank 0 gets every rank's part of the metrics and writes the books."""
        self._checkpoints.raise_if_failed()
        metrics |= self._roles.reward.drain() | self._roles.rollout.load_metrics()
        figures = self._collect(step, metrics, self._samples_here(prompts, experience))
        if figures is not None:
            seconds = time.monotonic() - self._began
            tokens, samples = figures.pop("perf/total_num_tokens"), figures.pop("perf/num_samples")
            figures |= throughput(tokens, samples, seconds, self.job.world) | {"timing_s/step": seconds}
            self._log(step, figures)
            self.progress.update(step, figures)

    def settle_validation(self, step: int, metrics: Metrics) -> None:
        figures = self._collect(step, metrics | self._roles.reward.drain(), [])
        if figures is not None:
            score = figures[VALIDATION_SCORE]
            if self.best is None or score > self.best["score"]:
                self.best = {"score": score, "step": step}
            figures |= {"val/best_score": self.best["score"], "val/best_step": self.best["step"]}
            self._log(step, figures)
            self.progress.note(f"validation after step {step}: reward {score:.3f} (best {self.best['score']:.3f})")

    def save(self, step: int) -> None:
        """The whole run after `step` steps, on disk; with trainer.async_save that is so after `finish_save`."""
        with self._stages("save_checkpoint"):
            judge = self._roles.judge
            state = {
                "step": step,
                "loader": self.loader.state_dict(),
                "kl": self.job.hand_over.agree(judge.controller.state_dict(), source=judge.placement.leader),
                "best": self.best,
            }
            self._checkpoints.save(step, self._roles.trained(), state, _rng_state())

    def finish_save(self) -> None:
        """Waits for a checkpoint that is written in the background."""
        with self._stages("save_checkpoint"):
            self._checkpoints.finish()

    def export(self) -> None:
        """The actor as a Hugging Face folder, run_dir/hf."""
        if self._roles.actor.serves:
            export_hf(
                self._roles.actor.engine,
                self._run_dir / "hf",
                self._model_folder,
                self.job.board,
                tokenizer_folder=self._checkpoints.tokenizer_folder,
                replace=True,
            )

    def close(self) -> None:
        self._trackers.close()
        for book in (self._metrics, self._timeline):
            if book is not None:
                book.close()

    def _resume(self, found: Found | None) -> int:
        """The number of steps that are done already."""
        if found is None:
            return 0
        state, rank_state = self._checkpoints.load(found, self._roles.trained())
        self._roles.judge.controller.load_state_dict(state["kl"])
        self.best = state["best"]
        if rank_state is not None:
            _set_rng_state(rank_state)
        logger.info("resumed after step %d from %s", state["step"], found.folder)
        return state["step"]

    def _collect(self, step: int, metrics: Metrics, samples: list[dict[str, Any]]) -> dict[str, float] | None:
        """All ranks' metrics as figures, on rank 0."""
        spans = self._stages.drain()
        if self._timeline is not None:
            self._timeline.log(step, spans)
        report = {"metrics": (metrics | timings(spans)).to_json().decode(), "samples": samples}
        reports = self.job.hand_over.settle(json.dumps(report).encode())
        if reports is None:
            return None
        parts = [json.loads(raw) for raw in reports]
        logged = [LoggedSample(**sample) for part in parts for sample in part["samples"]]
        if self._samples is not None and logged:
            self._samples.log(step, logged)
        return Metrics.merge(Metrics.from_json(part["metrics"].encode()) for part in parts).result()

    def _samples_here(self, batch: PromptBatch, experience: Experience) -> list[dict[str, Any]]:
        """The first rows of the step, from the ranks that judge them, as text."""
        judge = self._roles.judge
        if not judge.speaks:
            return []
        at, responses = judge.placement, experience.responses
        held = at.outputs.rows(self.job.rank, responses.weight.size)
        prompts, answers = responses.prompt_ids.on(at).split(), responses.response_ids.on(at).split()
        scores = experience.scores.on(at).scalar().tolist()
        group = responses.weight.size // len(batch.prompts)
        return [
            {
                "prompt": self._tokenizer.decode(prompts[row - held.start].tolist()),
                "response": self._tokenizer.decode(answers[row - held.start].tolist()),
                "score": scores[row - held.start],
                "ground_truth": batch.prompts[row // group].ground_truth,
            }
            for row in range(held.start, min(held.stop, self.config.trainer.log_samples))
        ]

    def _log(self, step: int, figures: dict[str, float]) -> None:
        assert self._metrics is not None
        self._metrics.log(step, figures)
        self._trackers.log(step, figures)


def _rng_state() -> dict[str, bytes]:
    state = {"torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return {name: bytes(tensor.numpy()) for name, tensor in state.items()}


def _set_rng_state(state: dict[str, bytes]) -> None:
    tensors = {name: torch.frombuffer(bytearray(raw), dtype=torch.uint8) for name, raw in state.items()}
    torch.set_rng_state(tensors["torch"])
    if "cuda" in tensors:
        torch.cuda.set_rng_state(tensors["cuda"])
