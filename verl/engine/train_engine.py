"""One engine for actor, critic, reference and reward model: forward, and forward-backward with an optimizer step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers import PretrainedConfig

from verl.config import LoraConfig, OptimConfig
from verl.engine.host_memory import keep_freed_memory
from verl.engine.offload import HostActivations
from verl.engine.optimizer import Copied, Optimizer
from verl.engine.parked import Lasting, Parked
from verl.flow.placement import Groups
from verl.flow.signs import Signs
from verl.model.heads import Head, HeadedModel, TokenOutputs
from verl.model.load import attention, load_shards, local_tensor, materialise, meta_model, read_config
from verl.model.lora import adapters_off, add_adapters
from verl.model.merge import MergedShards
from verl.model.packing import MicroBatch, Sequences, dummy_micro_batch, pack, plan_micro_batches
from verl.parallel.idle import Idle
from verl.parallel.parallelize import ParallelPlan, parallelize
from verl.parallel.passes import Around, Passes, Straight
from verl.parallel.pipeline import Pipelined
from verl.parallel.stages import cut, stage_units

Loss = Callable[[TokenOutputs, Tensor], Tensor]
"""(outputs of a micro-batch [k], where they stand in the rank's flat outputs [k]) -> its share of the global loss."""


@dataclass(frozen=True)
class EngineSpec:
    folder: Path
    head: Head
    trained: bool
    """Trained parameters are kept in float32 and computed with in `dtype`; frozen ones are stored in it."""
    dtype: torch.dtype
    seed: int
    max_tokens_per_micro_batch: int
    attn_implementation: str = "auto"
    logprob_chunk_tokens: int = 512
    trust_remote_code: bool = False
    reshard_after_forward: bool | None = None
    """None: on a GPU without a pipeline, where memory is short; not on a CPU, where messages are dear, nor on a stage,
    whose micro-batches would each gather the parameters again."""
    activation_checkpointing: bool = False
    offload_activations: bool = False
    offload_parameters: bool = False
    """Parameters are in host memory, and so gradients and the optimizer are."""
    offload_optimizer: bool = False
    """The optimizer's state is in host memory between steps."""
    virtual_stages: int = 1
    """Parts of the model that a pipeline stage takes turns with."""
    lora: LoraConfig | None = None
    """Train adapters, in float32; the model is frozen, and stored in `dtype`. Their rank is above 0."""


class TrainEngine:
    """A model split over a role's ranks. All of its methods are collective over them."""

    def __init__(self, spec: EngineSpec, groups: Groups, device: torch.device, signs: Signs) -> None:
        """`signs`: those of the thread that calls its methods."""
        self.spec, self.groups, self.device, self._signs = spec, groups, device, signs
        if device.type == "cpu":
            keep_freed_memory()
        config = read_config(spec.folder, spec.trust_remote_code)
        kernel = attention(spec.attn_implementation, device, config)
        # flash attention keeps packed sequences apart by position; SDPA takes a dense mask, whose cost is time^2
        self._row_capacity = spec.max_tokens_per_micro_batch if kernel.startswith("flash") else None
        self._num_stages: int = groups.mesh["pp"].size()
        self.parts = self._make_parts(config, kernel)
        """What this rank has of the model, in the model's order: all of it, or a pipeline stage's part or parts."""
        for part in self.parts:
            parallelize(part, groups.mesh, self._plan(), groups.context)
            materialise(part, device, spec.offload_parameters)
            load_shards(part, spec.folder, spec.seed, signs.beat)
        self.model = nn.ModuleList(self.parts)
        self.model.train(spec.trained)
        if spec.lora is None:
            self.model.requires_grad_(spec.trained)
        self._host_activations = HostActivations(self.model) if spec.offload_activations else None
        self._passes = self._make_passes()
        self.optimizer: Optimizer | None = None
        self.parked = Parked(self._lasting, device, signs.beat)
        """Takes its tensors off the device and back. While they are away, only `shards()` made before can be read."""
        self.idle: Idle | None = None
        """Of the last `train_step`, while gradients were made; None without a pipeline."""

    def add_optimizer(self, config: OptimConfig, total_steps: int) -> None:
        """`total_steps`: optimizer steps of the whole run, for the schedule."""
        assert self.spec.trained
        # the state of parameters that are in host memory is there anyway
        offload = self.spec.offload_optimizer and not self.spec.offload_parameters
        self.optimizer = Optimizer(self.model, config, total_steps, self.groups.everyone, self._copied(), offload)

    def forward(self, sequences: Sequences, temperature: float = 1.0) -> TokenOutputs | None:
        """The head's outputs for all of a rank's sequences, flat and in their order, on the CPU.

        None on a pipeline stage without the head.
        """
        values = torch.zeros(sequences.num_outputs, dtype=torch.float32)
        entropy = torch.zeros_like(values) if self.spec.head is Head.lm else None

        def take(outputs: TokenOutputs, batch: MicroBatch) -> None:
            values[batch.tokens] = outputs.values.cpu()
            if entropy is not None:
                assert outputs.entropy is not None
                entropy[batch.tokens] = outputs.entropy.cpu()

        self._passes.forward(self._micro_batches(sequences, range(len(sequences.ids))), temperature, take)
        self._free()
        return TokenOutputs(values, entropy) if self.parts[-1].ends_with_head else None

    def adapters_off(self) -> AbstractContextManager[None]:
        """Around `forward`: the outputs of the model that was loaded, where adapters are all that is trained."""
        return adapters_off(self.model)

    def shards(self) -> MergedShards:
        """This rank's part of the weights, with the adapters in them; readable when they have left the device, too.
        Collective.
        """
        assert not self.parked.away, "the ranks exchange parts of the adapters"
        return MergedShards(self.model, self.device, self.parked.now)

    def train_step(
        self, sequences: Sequences, rows: Sequence[int], loss: Loss, temperature: float = 1.0
    ) -> tuple[float, float]:
        """One optimizer step on this rank's `rows`; (gradient norm, learning rate), the same on all ranks.

        `loss` gives each micro-batch's share of a loss that is normalised over the whole mini-batch of all ranks, so
        shares and gradients are summed. It is called where the head is: on a pipeline's last stage.
        """
        assert self.optimizer is not None
        batches = self._micro_batches(sequences, rows)
        self.idle = self._passes.train(batches, temperature, lambda outputs, batch: loss(outputs, batch.tokens))
        result = self.optimizer.step()
        self._signs.beat()
        return result

    def _make_parts(self, config: PretrainedConfig, kernel: str) -> list[HeadedModel]:
        """On the meta device, cut down to this rank's stage."""
        spec = self.spec
        stored = torch.float32 if spec.trained and spec.lora is None else spec.dtype

        def whole() -> HeadedModel:
            chunk_tokens = spec.logprob_chunk_tokens
            model = meta_model(config, spec.head, stored, kernel, chunk_tokens, spec.trust_remote_code)
            if spec.lora is not None:
                add_adapters(model, spec.lora)
            return model

        if self._num_stages == 1:
            return [whole()]
        parts = []
        for units in stage_units(whole(), self._num_stages, spec.virtual_stages)[self.groups.mesh.get_local_rank("pp")]:
            parts.append(whole())
            cut(parts[-1], units)
        return parts

    def _copied(self) -> Copied | None:
        """An embedding that is the language-model head, too: the first and the last stage each have it."""
        if self.groups.ends is None or not self.parts[-1].hf.config.get_text_config().tie_word_embeddings:
            return None
        if self.spec.head is not Head.lm or self.spec.lora is not None:
            return None
        last = self.parts[-1].ends_with_head
        shared = self.parts[-1].output_embeddings if last else self.parts[0].hf.get_input_embeddings()
        return Copied(shared.get_parameter("weight"), self.groups.ends)

    def _make_passes(self) -> Passes:
        around = Around(self.device, self._signs, self._activations, self._before_backward)
        if self._num_stages == 1:
            return Straight(self.parts[0], around)
        mesh = self.groups.mesh
        stage = mesh.mesh[mesh.get_local_rank("pp")].flatten().tolist()
        stage_peers = [rank for rank in stage if rank != self._signs.rank]
        return Pipelined(self.parts, mesh.get_group("pp"), self.spec.dtype, around, stage_peers)

    def _micro_batches(self, sequences: Sequences, rows: Sequence[int]) -> list[MicroBatch]:
        """As many on every rank: the most that any rank needs, since each one is a collective."""
        assert not self.parked.away, "the device is the rollout's"
        rows = [r for r in rows if sequences.count[r]]
        shares = self.parts[0].time_shares
        plan = plan_micro_batches(
            sequences.lengths, rows, self.spec.max_tokens_per_micro_batch, self._row_capacity, shares
        )
        most = torch.tensor([max(1, len(plan))])
        dist.all_reduce(most, dist.ReduceOp.MAX, group=self.groups.everyone)
        # interleaved stages go through a model's parts with as many micro-batches at a time as there are stages
        turn = self._num_stages if len(self.parts) > 1 else 1
        count = -(-int(most) // turn) * turn
        batches = [pack(sequences, rows_of_batch, shares) for rows_of_batch in plan]
        return batches + [dummy_micro_batch(shares)] * (count - len(plan))

    def _before_backward(self, part: HeadedModel, last: bool) -> None:
        """Reduce gradients in the last micro-batch's backward only; parameters stay gathered until then if they may."""
        assert isinstance(part, FSDPModule)
        part.set_requires_gradient_sync(last)
        part.set_is_last_backward(last)
        if not self._plan().reshard_after_forward:
            part.set_reshard_after_backward(last)

    def _lasting(self) -> Iterator[Lasting]:
        """What lies on the device between two calls."""
        self._free()  # gathered parameters do not, and stand in the shards' place
        for parameter in self.model.parameters():
            yield Lasting(local_tensor(parameter.detach()), changes=parameter.requires_grad)
        for buffer in self.model.buffers():
            yield Lasting(local_tensor(buffer), changes=True)
        if self.optimizer is not None:
            for state in self.optimizer.states():
                yield Lasting(local_tensor(state), changes=True)

    def _free(self) -> None:
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def _activations(self) -> AbstractContextManager[object]:
        return nullcontext() if self._host_activations is None else self._host_activations.kept()

    def _plan(self) -> ParallelPlan:
        reshard = self.spec.reshard_after_forward
        by_default = self.device.type == "cuda" and self._num_stages == 1
        return ParallelPlan(
            compute_dtype=self.spec.dtype,
            reshard_after_forward=by_default if reshard is None else reshard,
            activation_checkpointing=self.spec.activation_checkpointing,
            offload_parameters=self.spec.offload_parameters,
        )
