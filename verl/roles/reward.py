"""Scores of responses: by a function in worker processes, by a model, or a weighted sum of both."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from verl.config import RewardConfig
from verl.data.prompts import Prompt, PromptBatch
from verl.engine.train_engine import TrainEngine
from verl.flow.batch import Column, Responses, Rows
from verl.flow.placement import Groups, Placement
from verl.model.packing import Sequences
from verl.monitor.metrics import Metrics
from verl.rewards.pool import RewardPool, Status
from verl.roles.role import Here, ModelRole


class Reward(ModelRole):
    def __init__(
        self,
        placement: Placement,
        here: Here,
        engine: TrainEngine | None,
        groups: Groups | None,
        pool: RewardPool | None,
        tokenizer: PreTrainedTokenizerBase,
        config: RewardConfig,
    ) -> None:
        """`pool`: the function's workers, on the role's leaders; None elsewhere and where there is no function."""
        super().__init__(placement, here, engine, groups)
        self.config, self._pool, self._tokenizer = config, pool, tokenizer
        self._submitted: set[int] = set()
        self._failures = Metrics()

    def submit(self, row: int, size: int, prompt: Prompt, token_ids: list[int]) -> None:
        """A sample of a batch of `size` rows has finished on this rank: if the rank will score the row, let that begin
        while others are still generated.
        """
        if self._pool is not None and row in self.placement.outputs.rows(self.here.rank, size):
            text = self._tokenizer.decode(token_ids, skip_special_tokens=True)
            assert isinstance(text, str)
            self._pool.submit(row, prompt.data_source, text, prompt.ground_truth, prompt.extra_info)
            self._submitted.add(row)

    def scores(self, prompts: PromptBatch, responses: Responses) -> Column:
        """One float32 a row; 0 in dead rows."""
        size = responses.weight.size
        rows = None
        with self.stage("reward"):
            of_model = self._model_scores(responses) if self._engine is not None else None
            if self.holds_rows:
                total = torch.zeros(len(self.placement.outputs.rows(self.here.rank, size)))
                if of_model is not None:
                    total += self.config.model.weight * of_model
                if self.config.function.path is not None:
                    total += self.config.function.weight * self._function_scores(prompts, responses)
                cut_off = ~responses.ended.on(self.placement).scalar()
                total -= self.config.missing_eos_penalty * cut_off
                live = responses.weight.on(self.placement).scalar() != 0
                rows = Rows.scalars(torch.where(live, total, 0.0), torch.float32)
        return self.produced("scores", size, rows)

    def grade(self, prompts: PromptBatch, responses: Responses, name: str) -> Metrics:
        """The mean score of validation responses: `name`/mean over all and `name`/<data source>/mean."""
        metrics = Metrics()
        column = self.scores(prompts, responses)
        if self.speaks:
            live = responses.weight.on(self.placement).scalar()
            scores = column.on(self.placement).scalar()
            group = column.size // len(prompts.prompts)
            metrics.spread(name, scores, live)
            for row, score, weight in zip(
                self.placement.outputs.rows(self.here.rank, column.size), scores, live, strict=True
            ):
                source = prompts.prompts[row // group].data_source
                metrics.mean(f"{name}/{source}/mean", score, weight)
        return metrics

    def drain(self) -> Metrics:
        """Counts of samples whose function failed since the last call."""
        failures, self._failures = self._failures, Metrics()
        return failures

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()

    def _model_scores(self, responses: Responses) -> Tensor | None:
        """At the last token of each row, wherever the response ended; None where the model's head is not."""
        sequences = self._sequences(responses, Sequences.last_tokens)
        with self.in_step():
            outputs = self.engine.forward(sequences)
        return None if outputs is None else outputs.values

    def _function_scores(self, prompts: PromptBatch, responses: Responses) -> Tensor:
        """One of the ranks that hold the same rows calls the function, which may answer otherwise the next time."""
        scores = torch.zeros(len(self.placement.outputs.rows(self.here.rank, responses.weight.size)))
        if self._pool is not None:
            scores = self._called(self._pool, prompts, responses)
        with self.in_step():
            if self.placement.cp > 1:
                dist.broadcast(scores, group=self.groups.context, group_src=0)
            if self.placement.tp > 1:
                dist.broadcast(scores, group=self.groups.mesh.get_group("tp"), group_src=0)
        return scores

    def _called(self, pool: RewardPool, prompts: PromptBatch, responses: Responses) -> Tensor:
        size = responses.weight.size
        group = size // len(prompts.prompts)
        rows = self.placement.outputs.rows(self.here.rank, size)
        live = [row for row, weight in zip(rows, responses.weight.on(self.placement).scalar(), strict=True) if weight]
        late = [row for row in live if row not in self._submitted]
        if late:
            ids = responses.response_ids.on(self.placement).split()
            for row in late:
                self.submit(row, size, prompts.prompts[row // group], ids[row - rows.start].tolist())
        self._submitted.clear()
        scores = torch.zeros(len(rows))
        for score in pool.collect(live, self.here.job.board.beat):
            scores[score.row - rows.start] = score.score
            self._failures.total("reward/num_timeouts", float(score.status is Status.timeout))
            self._failures.total("reward/num_errors", float(score.status is Status.error))
            for name, value in score.extra.items():
                self._failures.mean(f"reward/{name}", value)
        return scores
