"""The sequences that are being generated at one time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import PreTrainedModel

from verl.generation.inprocess.attention import DecodeKV, PromptKV
from verl.generation.inprocess.cache import KVCache
from verl.generation.inprocess.peers import Peers
from verl.generation.inprocess.sampler import draw, uniform
from verl.generation.types import Request, Sample, Sampling

_PREFILL_TOKENS = 8192
"""Prompt tokens in one forward pass (at least one prompt): bounds its activations."""


@dataclass
class Running:
    """A sequence under way."""

    request: Request
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    @property
    def newest(self) -> int:
        """The token that the next forward pass reads; all before it is in the cache."""
        return self.token_ids[-1] if self.token_ids else self.request.prompt_ids[-1]

    @property
    def position(self) -> int:
        """Of `newest`, and so the number of positions cached."""
        return len(self.request.prompt_ids) + len(self.token_ids) - 1


class Batch:
    """Sequence i of the batch owns slot i of the cache, so that slots in use are always the first ones.

    A prompt is prefilled up to its last token, which then goes the way of every other token: one forward pass of
    `decode` reads the newest token of each sequence and draws the next. Samples of one prompt share its prefill.
    """

    def __init__(self, model: PreTrainedModel, cache: KVCache, sampling: Sampling, peers: Peers | None = None) -> None:
        self._model = model
        self._peers = peers
        self._cache = cache
        self._sampling = sampling
        self._stop_token_ids = frozenset() if sampling.ignore_eos else frozenset(sampling.stop_token_ids)
        self._running: list[Running] = []

    def __len__(self) -> int:
        return len(self._running)

    def admit(self, requests: Sequence[Request]) -> None:
        """Takes new sequences in and computes those of their prompts that no running sequence has."""
        cached = {sequence.request.prompt_ids: slot for slot, sequence in enumerate(self._running)}
        slots_of: dict[tuple[int, ...], list[int]] = {}
        for slot, request in enumerate(requests, start=len(self._running)):
            self._running.append(Running(request))
            slots_of.setdefault(request.prompt_ids, []).append(slot)
        self._cache.reserve(max(len(prompt) for prompt in slots_of))

        packed: dict[tuple[int, ...], list[int]] = {}
        for prompt, slots in slots_of.items():
            if len(prompt) == 1:
                continue
            if prompt in cached:
                for slot in slots:
                    self._cache.copy(cached[prompt], slot, len(prompt) - 1)
                continue
            if packed and sum(map(len, packed)) + len(prompt) > _PREFILL_TOKENS:
                self._prefill(packed)
                packed = {}
            packed[prompt] = slots
        if packed:
            self._prefill(packed)

    def decode(self) -> list[Sample]:
        """Draws a token for every sequence; those that it finished leave the batch."""
        positions = [sequence.position for sequence in self._running]
        self._cache.reserve(max(positions) + 1)
        logits = self._logits([sequence.newest for sequence in self._running], positions)
        uniforms = [uniform(sequence.request.seed, len(sequence.token_ids)) for sequence in self._running]
        drawn = self._draw(logits, uniforms)
        finished = []
        for slot, (token_id, logprob) in enumerate(zip(*(column.tolist() for column in drawn), strict=True)):
            sequence = self._running[slot]
            if not math.isfinite(logprob):
                raise FloatingPointError(
                    f"the logits of row {sequence.request.row} at response token {len(sequence.token_ids)} are not "
                    "finite: the weights are broken or were not loaded in full"
                )
            sequence.token_ids.append(token_id)
            sequence.logprobs.append(logprob)
            if token_id in self._stop_token_ids or len(sequence.token_ids) == self._sampling.max_tokens:
                finished.append(slot)
        samples = [self._sample(self._running[slot]) for slot in finished]
        for slot in reversed(finished):  # from the back, so that the last sequence is always one that goes on
            self._remove(slot)
        return samples

    def _draw(self, logits: Tensor, uniforms: list[float]) -> tuple[Tensor, Tensor]:
        """ids [B] and log-probs [B]. `logits`: this rank's part of the vocabulary's."""
        if self._peers is None:
            return draw(logits, self._sampling, uniforms)
        return self._peers.draw(logits, lambda whole: draw(whole, self._sampling, uniforms))

    def _remove(self, slot: int) -> None:
        """Closes the gap with the last sequence."""
        last = self._running.pop()
        if slot < len(self._running):
            self._cache.copy(len(self._running), slot, last.position)
            self._running[slot] = last

    def _sample(self, sequence: Running) -> Sample:
        return Sample(
            row=sequence.request.row,
            token_ids=sequence.token_ids,
            logprobs=sequence.logprobs,
            ended=sequence.token_ids[-1] in self._stop_token_ids,
        )

    @torch.no_grad()
    def _prefill(self, slots_of: dict[tuple[int, ...], list[int]]) -> None:
        """Fills the cache with prompts, each without its last token."""
        ids = [token_id for prompt in slots_of for token_id in prompt[:-1]]
        positions = [position for prompt in slots_of for position in range(len(prompt) - 1)]
        kv = PromptKV(self._cache, [len(prompt) - 1 for prompt in slots_of], list(slots_of.values()))
        body = self._model.base_model  # without the head: no logits are wanted
        body(input_ids=self._tensor([ids]), position_ids=self._tensor([positions]), use_cache=False, kv=kv)

    @torch.no_grad()
    def _logits(self, ids: list[int], positions: list[int]) -> Tensor:
        """[B, V] for one token each of the running sequences; on a rank with peers its part of V."""
        column = self._tensor(positions)
        kv = DecodeKV(self._cache, column, longest=max(positions) + 1)
        output = self._model(input_ids=self._tensor(ids)[:, None], position_ids=column[:, None], use_cache=False, kv=kv)
        return output.logits[:, -1]

    def _tensor(self, values: list[int] | list[list[int]]) -> Tensor:
        return torch.tensor(values, device=self._model.device)
