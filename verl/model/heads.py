"""A Hugging Face decoder with one of three heads, run on packed micro-batches."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from verl.errors import UserError
from verl.model.context import Context, WholeRows
from verl.model.logprobs import VocabShard, token_logprobs
from verl.model.masks import attention_masks
from verl.model.packing import MicroBatch
from verl.model.peers import Peers

LOGIT_FACTORS = ("logits_scaling", "logit_scale", "lm_head_multiplier", "output_multiplier", "output_logit_soft_cap")
"""Settings by which some architectures (Granite, Cohere, Falcon-H1 and others) change their logits; not done here."""


class Head(StrEnum):
    lm = "lm"
    """Log-probs and entropies of tokens."""
    token_value = "value"
    """One value a token: the critic."""
    score = "score"
    """One score a sequence: the reward model."""


@dataclass(frozen=True)
class TokenOutputs:
    """What a head says of a micro-batch's chosen tokens, all [k] in float32."""

    values: Tensor
    """Log-probs of the tokens (lm), values or scores."""
    entropy: Tensor | None = None
    """lm: of each token's distribution, in nats."""


class HeadedModel(nn.Module):
    """The decoder and its head in one module, so that FSDP gathers the head's weight with the module's own forward.

    Parameter names are Hugging Face's behind the prefix `hf.`; a value or score head is `hf.score`, as in
    `AutoModelForSequenceClassification`.
    """

    def __init__(self, hf: PreTrainedModel, head: Head, chunk_tokens: int) -> None:
        super().__init__()
        self.hf, self.head, self.chunk_tokens = hf, head, chunk_tokens
        self.peers: Peers | None = None
        """Set where the model is split over tensor-parallel ranks: all of them run it on the same micro-batch."""
        self.context: Context | None = None
        """Set where the time of rows is shared out over context-parallel ranks, which run it on the same, too."""
        self.ends_with_head = True
        """False on a pipeline stage before the last."""
        self.copy_of: str | None = None
        """On the last pipeline stage: the tied embedding of the first one, by name, that the head here is a copy of."""
        config = vars(hf.config.get_text_config())
        self.softcap: float | None = config.get("final_logit_softcapping")
        if head is Head.lm:
            factors = [f"{name} = {config[name]}" for name in LOGIT_FACTORS if config.get(name) not in (None, 1)]
            if self.output_embeddings.bias is not None:
                factors.append("a bias in the language-model head")
            if factors:
                raise UserError(
                    f"{type(hf).__name__} has {', '.join(factors)}, which the log-probs here would leave out."
                )

    def forward(self, batch: MicroBatch, temperature: float, states: Tensor | None = None) -> TokenOutputs | Tensor:
        """The head's outputs, the same on all tensor- and context-parallel ranks.

        `states`: what the pipeline stage before this one made, [batch, time here, hidden]; the first stage begins with
        the tokens. A stage before the last gives states, too.
        """
        here, whole_rows = batch, {}
        if self.context is not None:
            here = batch.part(self.context.rank, self.context.size)
            whole_rows = {"whole_rows": WholeRows(self.context, self.hf.config, batch.position_ids)}
        source = {"input_ids": here.input_ids} if states is None else {"inputs_embeds": states}
        # a model with a part of the time would take its masks' size for the whole
        masks = attention_masks(self.hf.config, batch) if self.time_shares > 1 else None
        made: Tensor = self.hf.base_model(
            **source, attention_mask=masks, position_ids=here.position_ids, use_cache=False, **whole_rows
        ).last_hidden_state
        if not self.ends_with_head:
            return made
        outputs = self.outputs(made, here, temperature)
        return outputs if self.context is None else self._all_outputs(self.context, outputs, here, len(batch.select))

    @property
    def time_shares(self) -> int:
        """Ranks that share a row's time out between the layers."""
        return math.prod(ranks.size for ranks in (self.context, self.peers) if ranks is not None)

    def outputs(self, states: Tensor, batch: MicroBatch, temperature: float) -> TokenOutputs:
        """The head's, from the last layer's normalised states [batch, time here, hidden]."""
        if self.peers is not None:
            # a language-model head is cut by tokens of the vocabulary; a scalar one is whole on every rank
            states = self.peers.gather_time(states, gradients_are_parts=self.head is Head.lm)
        hidden = states.flatten(0, 1)[batch.select]
        if self.head is not Head.lm:
            return TokenOutputs(self.score(hidden.float()).squeeze(-1).clone())  # FSDP hooks dislike views
        weight, shard = self.output_embeddings.weight, None
        if self.peers is not None:
            assert isinstance(weight, DTensor)
            weight = weight.to_local()
            shard = VocabShard(self.peers.group, self.peers.rank * len(weight))
        return TokenOutputs(
            *token_logprobs(hidden, weight, batch.targets, temperature, self.chunk_tokens, self.softcap, shard)
        )

    def _all_outputs(self, context: Context, outputs: TokenOutputs, part: MicroBatch, count: int) -> TokenOutputs:
        """Of a whole micro-batch, from those of a part of its time."""
        columns = [outputs.values] if outputs.entropy is None else [outputs.values, outputs.entropy]
        every = context.all_outputs(torch.stack(columns), part.tokens, count)
        return TokenOutputs(*(column.clone() for column in every))  # FSDP hooks dislike views

    @property
    def head_module(self) -> nn.Linear:
        """The last module, whatever the head."""
        return self.output_embeddings if self.head is Head.lm else self.score

    @property
    def output_embeddings(self) -> nn.Linear:
        """The language-model head."""
        return self.hf.get_output_embeddings()  # type: ignore[return-value]

    @property
    def score(self) -> nn.Linear:
        """The value or score head, kept in float32: bfloat16 has three digits, too few for a regression target."""
        return self.hf.get_submodule("score")  # type: ignore[return-value]


def add_scalar_head(hf: PreTrainedModel) -> None:
    """Replaces the language-model head by a linear one with a single output."""
    name = next((n for n, module in hf.named_children() if module is hf.get_output_embeddings()), None)
    assert name is not None, f"{type(hf).__name__} has no output embedding among its children"
    delattr(hf, name)
    hf.add_module("score", nn.Linear(hf.config.get_text_config().hidden_size, 1, bias=False, dtype=torch.float32))
