"""One engine for actor, critic, reference and reward model: forward, and forward-backward with an optimizer step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from verl.config import OptimConfig
from verl.engine.host_memory import keep_freed_memory
from verl.engine.optimizer import Optimizer
from verl.flow.placement import Groups
from verl.model.heads import Head, TokenOutputs
from verl.model.load import attention, load_shards, materialise, meta_model, read_config
from verl.model.packing import MicroBatch, Sequences, dummy_micro_batch, pack, plan_micro_batches
from verl.parallel.parallelize import ParallelPlan, parallelize

Loss = Callable[[TokenOutputs, Tensor], Tensor]
"""(outputs of a micro-batch [k], where they stand in the rank's flat outputs [k]) -> its share of the global loss."""


@dataclass(frozen=True)
class EngineSpec:
    folder: Path
    head: Head
    trained: bool
    """Trained models keep float32 parameters and compute in `dtype`; frozen ones are stored in it."""
    dtype: torch.dtype
    seed: int
    max_tokens_per_micro_batch: int
    attn_implementation: str = "auto"
    logprob_chunk_tokens: int = 512
    trust_remote_code: bool = False
    reshard_after_forward: bool | None = None
    """None: on a GPU, where memory is short; not on a CPU, where messages are dear."""
    activation_checkpointing: bool = False
    offload_activations: bool = False


class TrainEngine:
    """A model sharded over a role's ranks. All of its methods are collective over them."""

    def __init__(self, spec: EngineSpec, groups: Groups, device: torch.device, beat: Callable[[], None]) -> None:
        self.spec, self.groups, self.device, self._beat = spec, groups, device, beat
        if device.type == "cpu":
            keep_freed_memory()
        kernel = attention(spec.attn_implementation, device)
        # flash attention keeps packed sequences apart by position; SDPA takes a dense mask, whose cost is time^2
        self._row_capacity = spec.max_tokens_per_micro_batch if kernel.startswith("flash") else None
        config = read_config(spec.folder, spec.trust_remote_code)
        stored = torch.float32 if spec.trained else spec.dtype
        self.model = meta_model(config, spec.head, stored, kernel, spec.logprob_chunk_tokens, spec.trust_remote_code)
        parallelize(self.model, groups.mesh, self._plan())
        materialise(self.model, device)
        load_shards(self.model, spec.folder, spec.seed, beat)
        self.model.train(spec.trained)
        self.model.requires_grad_(spec.trained)
        self.optimizer: Optimizer | None = None

    def add_optimizer(self, config: OptimConfig, total_steps: int) -> None:
        """`total_steps`: optimizer steps of the whole run, for the schedule."""
        assert self.spec.trained
        self.optimizer = Optimizer(self.model, config, total_steps)

    @torch.no_grad()
    def forward(self, sequences: Sequences, temperature: float = 1.0) -> TokenOutputs:
        """The head's outputs for all of a rank's sequences, flat and in their order, on the CPU."""
        values = torch.zeros(sequences.num_outputs, dtype=torch.float32)
        entropy = torch.zeros_like(values) if self.spec.head is Head.lm else None
        for batch in self._micro_batches(sequences, range(len(sequences.ids))):
            outputs = self.model(batch.to(self.device), temperature)
            values[batch.tokens] = outputs.values.cpu()
            if entropy is not None:
                entropy[batch.tokens] = outputs.entropy.cpu()
            self._beat()
        self._free()
        return TokenOutputs(values, entropy)

    def train_step(
        self, sequences: Sequences, rows: Sequence[int], loss: Loss, temperature: float = 1.0
    ) -> tuple[float, float]:
        """One optimizer step on this rank's `rows`; (gradient norm, learning rate).

        `loss` gives each micro-batch's share of a loss that is normalised over the whole mini-batch of all ranks, so
        shares and gradients are summed.
        """
        assert self.optimizer is not None
        batches = self._micro_batches(sequences, rows)
        for number, batch in enumerate(batches):
            self._sync_gradients(last=number == len(batches) - 1)
            with self._activations():
                outputs = self.model(batch.to(self.device), temperature)
                loss(outputs, batch.tokens).backward()
            self._beat()
        result = self.optimizer.step()
        self._beat()
        return result

    def _micro_batches(self, sequences: Sequences, rows: Sequence[int]) -> list[MicroBatch]:
        """As many on every rank: the most that any rank needs, since each one is a collective."""
        rows = [r for r in rows if sequences.count[r]]
        plan = plan_micro_batches(sequences.lengths, rows, self.spec.max_tokens_per_micro_batch, self._row_capacity)
        most = torch.tensor([len(plan)])
        dist.all_reduce(most, dist.ReduceOp.MAX, group=self.groups.everyone)
        batches = [pack(sequences, rows_of_batch) for rows_of_batch in plan]
        return batches + [dummy_micro_batch()] * (max(1, int(most)) - len(plan))

    def _sync_gradients(self, last: bool) -> None:
        """Reduce gradients in the last micro-batch's backward only; parameters stay gathered until then if they may."""
        assert isinstance(self.model, FSDPModule)
        self.model.set_requires_gradient_sync(last)
        self.model.set_is_last_backward(last)
        if not self._plan().reshard_after_forward:
            self.model.set_reshard_after_backward(last)

    def _free(self) -> None:
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def _activations(self) -> AbstractContextManager[object]:
        if self.spec.offload_activations and self.device.type == "cuda":
            return torch.autograd.graph.save_on_cpu(pin_memory=True)
        return nullcontext()

    def _plan(self) -> ParallelPlan:
        reshard = self.spec.reshard_after_forward
        return ParallelPlan(
            compute_dtype=self.spec.dtype,
            reshard_after_forward=self.device.type == "cuda" if reshard is None else reshard,
            activation_checkpointing=self.spec.activation_checkpointing,
        )
