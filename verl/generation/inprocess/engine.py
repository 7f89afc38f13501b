"""Generation in this process, with continuous batching."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from verl.errors import UserError
from verl.flow.window import Address, Window
from verl.generation.inprocess.batch import Batch
from verl.generation.inprocess.cache import KVCache
from verl.generation.inprocess.model import build_model, longest_sequence
from verl.generation.inprocess.peers import Peers
from verl.generation.types import Request, Sample, Sampling
from verl.model.pieces import pieces


class TorchEngine:
    """A rollout replica, or one rank's part of it; see `verl.generation.types.Backend`.

    Its weights come by `weights()` and `commit()` alone. The KV cache lives as long as one call of `generate`, so that
    between calls the device holds nothing but the weights.

    A sample is a function of the weights, its prompt, its seed and the sampling settings: other requests, their order
    and `max_num_seqs` move its logits by no more than the rounding of differently shaped matrix products.

    Args:
        model_path: Hugging Face folder or hub id; its config decides the architecture, its weights are not read.
        dtype: of the weights, the KV cache and the computation.
        max_num_seqs: sequences generated at once.
        trust_remote_code: run Python code that comes with the model.
        on_progress: called after each forward pass and for each finished sample; a sign of life.
        peers: the ranks of a replica that is split over several. All of them make it together, and call `generate`
            together, with the same requests; each gets all samples.
    """

    def __init__(
        self,
        model_path: str,
        dtype: torch.dtype,
        device: torch.device,
        max_num_seqs: int,
        trust_remote_code: bool,
        on_progress: Callable[[], None],
        peers: Peers | None = None,
    ) -> None:
        if max_num_seqs < 1:
            raise UserError(f"rollout.max_num_seqs is {max_num_seqs}; it must be at least 1")
        self._path, self._dtype = model_path, dtype
        self._model = build_model(model_path, dtype, device, trust_remote_code, peers)
        self._peers = peers
        self._longest = longest_sequence(self._model.config)
        self._max_num_seqs = max_num_seqs
        self._on_progress = on_progress
        self._version: int | None = None
        self._window: Window | None = None
        """Of the parameters that other ranks write into."""

    def weights(self) -> dict[str, Tensor]:
        """The live parameters as the folder's files name them: what is copied there is what the model computes with.
        Of a split replica they are this rank's parts."""
        named = self._model.named_parameters()  # a tied tensor once, by its embedding
        return {piece.name: p.detach()[piece.index] for name, p in named for piece in pieces(name, p.shape)}

    def adopt(self, tensors: Mapping[str, Tensor]) -> None:
        """Computes from now on with those of these tensors that are what one of its parameters is: of the same shape,
        dtype and device. Their owner changes them, between calls of `generate`; there is no second copy.

        `tensors`: by parameter; for a split replica those that are the same part of the parameter as this rank's.
        """
        for name, parameter in self._model.named_parameters():
            tensor = tensors.get(name)
            if tensor is not None and (tensor.shape, tensor.dtype, tensor.device) == (
                parameter.shape,
                parameter.dtype,
                parameter.device,
            ):
                parameter.data = tensor

    def share(self, names: Collection[str]) -> Address | None:
        """Moves parameters of these names, as `weights` has them, to memory that other ranks of the node can open and
        write, and says where they are; None: there are none. They are in host memory.
        """
        moved = {
            name: parameter
            for name, parameter in self._model.named_parameters()
            if any(piece.name in names for piece in pieces(name, parameter.shape))
        }
        if not moved:
            return None
        self._window = Window({name: parameter.shape for name, parameter in moved.items()}, self._dtype)
        for name, parameter in moved.items():
            parameter.data = self._window.tensors[name].copy_(parameter)
        weights = self.weights()
        return self._window.address({name: weights[name] for name in names})

    def begin_load(self) -> None:
        """The weights change from now on: what is generated before `commit` would be of mixed ones, and is refused."""
        self._version = None

    def take_bucket(self, number: int) -> None:
        """Nothing: what is written into the parameters has been taken in."""

    def await_bucket(self) -> None:
        """Nothing."""

    def commit(self, version: int) -> None:
        """Notes that the weights are whole and of this version."""
        self._version = version

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[Sample]:
        """Samples in the order in which they finish.

        Raises:
            RuntimeError: before the first load, within one, and after `close`.
            UserError: for requests or settings that cannot be served.
        """
        if self._version is None:
            raise RuntimeError("generate before load: the engine has no whole weights yet (or was closed)")
        _check_sampling(sampling)
        self._check_requests(requests, sampling)
        return self._samples(requests, sampling, self._version)  # a generator of its own, so that the checks run now

    def close(self) -> None:
        """Frees the weights, in the hands of whoever asked for them too."""
        for parameter in self._model.parameters():
            parameter.data = parameter.new_empty(0)
        if self._window is not None:
            self._window.close()
            self._window = None
        self._version = None

    def _samples(self, requests: Sequence[Request], sampling: Sampling, version: int) -> Iterator[Sample]:
        waiting = deque(requests)
        longest = max((len(request.prompt_ids) for request in requests), default=0) + sampling.max_tokens
        num_slots = min(self._max_num_seqs, len(requests))
        batch = Batch(self._model, KVCache(num_slots, limit=longest), sampling, self._peers)
        while waiting or len(batch):
            num_joining = min(num_slots - len(batch), len(waiting))
            if num_joining:
                batch.admit([waiting.popleft() for _ in range(num_joining)])
                self._on_progress()
            for sample in batch.decode():
                self._on_progress()
                yield replace(sample, version=version)
            self._on_progress()

    def _check_requests(self, requests: Sequence[Request], sampling: Sampling) -> None:
        if len({request.row for request in requests}) != len(requests):
            raise UserError("two requests have the same row, which names the sample")
        for request in requests:
            length = len(request.prompt_ids)
            if length == 0:
                raise UserError(f"the prompt of row {request.row} is empty; a model needs one token to start from")
            if self._longest is not None and length + sampling.max_tokens > self._longest:
                raise UserError(
                    f"row {request.row}: {length} prompt tokens and up to {sampling.max_tokens} response tokens exceed "
                    f"the {self._longest} tokens of {self._path}: lower data.max_prompt_length or "
                    "data.max_response_length"
                )


def _check_sampling(sampling: Sampling) -> None:
    if sampling.temperature < 0:
        raise UserError(f"rollout.temperature is {sampling.temperature}; it must be 0 (greedy) or more")
    if not 0 < sampling.top_p <= 1:
        raise UserError(f"rollout.top_p is {sampling.top_p}; it must be above 0 and at most 1 (off)")
    if sampling.top_k < 0:
        raise UserError(f"rollout.top_k is {sampling.top_k}; it must be 0 (off) or more")
    if sampling.max_tokens < 1:
        raise UserError(f"data.max_response_length is {sampling.max_tokens}; it must be at least 1")
