"""Sampling responses, with the actor's weights."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence

import torch

from verl.config import SamplingConfig
from verl.data.prompts import Prompt, PromptBatch
from verl.flow.batch import Column, Responses, Rows
from verl.flow.placement import Placement
from verl.generation.residency import Turns
from verl.generation.types import Backend, Request, Sample, Sampling
from verl.monitor.metrics import Metrics
from verl.reshard.execute import Reader, Target, WeightSync
from verl.roles.actor import Actor
from verl.roles.role import Here, Role

OnSample = Callable[[int, int, Prompt, list[int]], None]
"""(row, rows of the batch, prompt, token ids) of a sample that has just finished on this rank."""


class Rollout(Role):
    def __init__(
        self,
        placement: Placement,
        here: Here,
        backend: Backend | None,
        reader: Reader | None,
        sync: WeightSync,
        targets: Mapping[str, Target],
        turns: Turns,
        peers: Sequence[int],
        node_memory: int,
        seed: int,
        max_tokens: int,
        stop_token_ids: tuple[int, ...],
        ignore_eos: bool,
    ) -> None:
        """`backend`: the replica that this rank leads, or is a part of. `reader`: what takes the weights of this rank's
        memory, or of the replica. `targets`: the memory that it writes, by domain. `peers`: the other ranks of that
        replica where all of them generate. `node_memory`: bytes of that memory that this rank has made.
        """
        super().__init__(placement, here)
        self._backend, self._reader, self._sync = backend, reader, sync
        self._targets, self._turns = targets, turns
        self._peers, self._node_memory = peers, node_memory
        self._seed, self._max_tokens, self._stop, self._ignore_eos = seed, max_tokens, stop_token_ids, ignore_eos
        self.version = 0

    def load(self, actor: Actor) -> None:
        """The actor's weights into every engine, each byte once into each memory that engines read."""
        self.version += 1
        with self.stage("reshard"):
            shards = actor.shards()  # of trainers that leave the device they are read from the host
            self._turns.to_load()
            self._sync.run(shards, self._targets, self._reader)
            if self._backend is not None:
                self._backend.commit(self.version)

    def generate(
        self, prompts: PromptBatch, sampling: SamplingConfig, n: int, key: str, on_sample: OnSample | None = None
    ) -> Responses:
        """`n` responses to each prompt; a dead one gets empty ones.

        A draw depends on the seed, `key`, the step, the prompt's place and the sample's number alone.
        """
        size = len(prompts.prompts) * n
        samples: list[Sample] = []
        rows = range(0)
        with self.stage("gen"):
            self._turns.to_generate()
            if self._backend is not None:
                rows = self._replicas_rows(size)
                drawn: dict[int, Sample] = {}
                requests = self._requests(prompts, rows, n, key)
                with self.here.job.board.waiting(self._peers, "their part of the replica's tokens"):
                    for sample in self._backend.generate(requests, self._sampling(sampling)):
                        drawn[sample.row] = sample
                        self.here.job.board.beat()
                        if on_sample is not None and self.holds_rows:
                            on_sample(sample.row, size, prompts.prompts[sample.row // n], sample.token_ids)
                samples = [drawn.get(row, Sample(row, [], [], ended=True, version=self.version)) for row in rows]
        with self.stage("reshard_back"):
            self._turns.back_to_train()
        return self._responses(prompts, samples, rows, n, size)

    def load_metrics(self) -> Metrics:
        """What one load moves: bytes over all ranks, and the most memory that one rank keeps for them."""
        metrics = Metrics()
        metrics.total("perf/reshard_wire_bytes", self._sync.traffic.wire)
        metrics.total("perf/reshard_local_bytes", self._sync.traffic.local)
        metrics.max("perf/reshard_extra_bytes", self._sync.staging_bytes + self._node_memory)
        if self._turns.host_bytes:
            metrics.max("perf/offload_host_bytes", self._turns.host_bytes)
        return metrics

    def finish(self) -> None:
        """The normal end of a run: the last load is over on every rank, and trainers are on their devices."""
        self._sync.close()
        with self.stage("reshard_back"):
            self._turns.back_to_train()

    def close(self) -> None:
        if self._backend is not None:
            self._backend.close()

    def _replicas_rows(self, size: int) -> range:
        """Those of the replica that this rank is in. All of its ranks may generate; its leader has them afterwards."""
        return self.placement.outputs.share(self.placement.coordinate(self.here.rank).dp, size)

    def _requests(self, prompts: PromptBatch, rows: range, n: int, key: str) -> list[Request]:
        return [
            Request(row, prompts.prompts[row // n].ids, draw_seed(self._seed, key, prompts.step, row // n, row % n))
            for row in rows
            if prompts.weights[row // n]
        ]

    def _sampling(self, config: SamplingConfig) -> Sampling:
        return Sampling(config.temperature, config.top_p, config.top_k, self._max_tokens, self._stop, self._ignore_eos)

    def _responses(self, prompts: PromptBatch, samples: list[Sample], rows: range, n: int, size: int) -> Responses:
        def column(name: str, make: Callable[[], Rows]) -> Column:
            return self.produced(name, size, make() if self.holds_rows else None)

        return Responses(
            prompt_ids=column(
                "prompt_ids", lambda: Rows.ragged([prompts.prompts[r // n].ids for r in rows], torch.int64)
            ),
            response_ids=column("response_ids", lambda: Rows.ragged([s.token_ids for s in samples], torch.int64)),
            rollout_logprobs=column(
                "rollout_logprobs", lambda: Rows.ragged([s.logprobs for s in samples], torch.float32)
            ),
            ended=column("ended", lambda: Rows.scalars([s.ended for s in samples], torch.bool)),
            weight=column("weight", lambda: Rows.scalars([prompts.weights[r // n] for r in rows], torch.float32)),
            version=column("version", lambda: Rows.scalars([s.version for s in samples], torch.int64)),
        )


def draw_seed(seed: int, key: str, step: int, prompt: int, sample: int) -> int:
    """A 63-bit seed of one sample."""
    digest = hashlib.sha256(f"{seed}/{key}/{step}/{prompt}/{sample}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
