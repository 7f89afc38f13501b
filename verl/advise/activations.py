"""What a forward pass leaves for the backward pass, and what both need on the way. Pure: sizes in, bytes out.

Counted from what autograd keeps of a Llama-like layer as transformers writes it; `scripts/bench/memory.py` measures it.
"""

from __future__ import annotations

from dataclasses import dataclass

from verl.advise.model import ModelShape
from verl.mesh.spec import HybridEngine
from verl.parallel.schedule import Kind, schedule
from verl.reshard.boxes import Split

FLOAT32 = 4
_ROUTED = 40
"""Bytes of indices and weights for each expert that a token goes to: four int64, two float32."""


@dataclass(frozen=True)
class Tokens:
    """What a device is given at a time."""

    micro_batch: int
    """Tokens of one forward or forward-backward."""
    longest: int
    """Tokens of the longest sequence, prompt and response."""
    chunk: int
    """Tokens whose logits are held at once."""
    accumulates: bool
    """An optimizer step has more than one micro-batch. FSDP then keeps whole float32 gradients until the last one."""
    attention: str = "flash_attention_2"
    """What else attention keeps for the backward pass: a mask (sdpa) or the probabilities (eager)."""
    cp: int = 1
    """Devices that share the time of each row out; `micro_batch` is this one's part."""


def layer_bytes(model: ModelShape, itemsize: int, tokens: Tokens, tp: int = 1) -> int:
    """Bytes a token that one layer keeps for its backward pass on each of `tp` devices.

    Norms: the input in float32 and, for the gradient of their weight, the result before it, of a part of the time
    (sequence parallelism, Korthikanti et al. 2022). In front of attention and MLP: their inputs, for which the time is
    gathered. Of adapters, what is between their two matrices.
    """
    learns = model.learns
    weighted = (FLOAT32 if model.norms_in_float32 else itemsize) * learns.weights
    norms = model.normed * (FLOAT32 + weighted) // tp
    inputs = model.hidden_size * itemsize * (learns.attention + learns.mlp)
    between = learns.between * itemsize
    return norms + inputs + between + _attention_bytes(model, itemsize, tokens, tp) + _mlp_bytes(model, itemsize, tp)


def _attention_bytes(model: ModelShape, itemsize: int, tokens: Tokens, tp: int) -> int:
    """Queries, keys, values and output, and a sum for each query; with context parallelism the output, of all time and
    some heads, is made one of some time and all heads.
    """
    queries = model.num_heads * model.head_dim // tp
    # of fewer heads than context-parallel ranks each has one
    keys = max(1, model.num_kv_heads // tp, tokens.cp) * model.head_dim
    if tokens.attention in ("sdpa", "eager"):  # with a mask they repeat a key for each of its queries
        keys = queries
    outputs = queries * (1 if tokens.cp == 1 else 2)
    sums = FLOAT32 * model.num_heads // tp
    return (queries + outputs + 2 * keys) * itemsize + sums + _scores_bytes(model, itemsize, tokens, tp)


def _mlp_bytes(model: ModelShape, itemsize: int, tp: int) -> int:
    """Gate, activated gate, up, and their product, if what it goes through learns. With experts, of all that a token
    goes to: their input if they learn, and their output, which is weighted by the router. And all the router's
    probabilities.
    """
    if model.experts is None:
        return (3 + model.learns.product) * model.intermediate_size * itemsize // tp
    experts, learn = model.experts, model.learns.weights
    each = (3 + learn) * experts.width + (1 + learn) * model.hidden_size
    return experts.chosen * (each * itemsize + _ROUTED) + FLOAT32 * experts.number


def _scores_bytes(model: ModelShape, itemsize: int, tokens: Tokens, tp: int) -> int:
    """Of a token's attention to a row of the greatest length: the mask that is added, or what comes of its scores."""
    if tokens.attention == "sdpa":
        return itemsize * tokens.longest * tokens.cp  # it is of all time on each device
    if tokens.attention != "eager":
        return 0
    probabilities = FLOAT32 + (itemsize if itemsize < FLOAT32 else 0)  # before and after they are made smaller
    capped = itemsize if model.caps_scores else 0
    return (probabilities + capped) * model.num_heads * tokens.longest // tp


@dataclass(frozen=True)
class Activations:
    """What autograd keeps between forward and backward, of all micro-batches that are under way. Bytes."""

    model: ModelShape
    layers: int
    """Of this stage."""
    split: Split
    stage: int
    itemsize: int
    tokens: Tokens
    hybrid: HybridEngine
    virtual_stages: int

    def on_device(self, in_head: bool) -> int:
        """`in_head`: when the backward pass is there; else when it is in a layer, which activation checkpointing
        computes again in whole.
        """
        if self.hybrid.offload_activations:
            return 2 * self._kept + self._layer
        split, is_last = self.split, self.stage == self.split.pp - 1
        between_stages = self._under_way * self._inputs * ((self.stage > 0) + (not is_last))
        last = _last_bytes(self.model, self.itemsize, self.tokens, split.tp) if is_last else 0
        besides = self._layer if self.hybrid.activation_checkpointing and not in_head else last
        return self._of_layers + between_stages + besides

    def on_host(self) -> int:
        """In the node's memory."""
        return self._of_layers if self.hybrid.offload_activations else 0

    @property
    def _layer(self) -> int:
        """Of one layer and micro-batch."""
        return self.tokens.micro_batch * layer_bytes(self.model, self.itemsize, self.tokens, self.split.tp)

    @property
    def _inputs(self) -> int:
        """Hidden states that go into a layer or come out of it."""
        return self.tokens.micro_batch * self.model.hidden_size * self.itemsize // self.split.tp

    @property
    def _kept(self) -> int:
        return self._inputs if self.hybrid.activation_checkpointing else self._layer

    @property
    def _of_layers(self) -> int:
        return self._under_way * self.layers * self._kept // self.virtual_stages

    @property
    def _under_way(self) -> int:
        """Parts of the stage's layers."""
        if not self.tokens.accumulates:
            return self.virtual_stages
        return parts_under_way(self.stage, self.split.pp, self.virtual_stages)


def messages_bytes(model: ModelShape, itemsize: int, tokens: Tokens, split: Split) -> int:
    """Between stages: a sent one stays until later ones have been sent, as many as there are stages."""
    return split.pp * tokens.micro_batch * model.hidden_size * itemsize // split.tp if split.pp > 1 else 0


def passing_bytes(model: ModelShape, itemsize: int, tokens: Tokens, tp: int) -> int:
    """On the way through a layer, forward or backward, when it is most: in its MLP, or in eager attention's softmax."""
    states = model.hidden_size * itemsize
    mlp = states // tp + states + 3 * model.intermediate_size * itemsize // tp
    if model.experts is not None:
        # of each expert: its input, and three times its output or all that is in between
        passing = model.hidden_size + max(3 * model.hidden_size, 4 * model.experts.width)
        mlp = 2 * states + model.experts.chosen * passing * itemsize
    if tokens.attention != "eager":
        return tokens.micro_batch * mlp
    scores = model.num_heads * tokens.longest * (2 * FLOAT32 + itemsize) // tp
    heads = 4 * model.num_heads * model.head_dim * itemsize // tp
    return tokens.micro_batch * max(mlp, states // tp + states + heads + scores)


def _last_bytes(model: ModelShape, itemsize: int, tokens: Tokens, tp: int) -> int:
    """The last norm, and the head's input: of a scalar head in float32."""
    norm = model.hidden_size * (FLOAT32 + (FLOAT32 if model.norms_in_float32 else itemsize)) // tp
    return tokens.micro_batch * (norm + model.hidden_size * (itemsize if model.has_lm_head else FLOAT32))


def parts_under_way(stage: int, pp: int, virtual_stages: int) -> int:
    """Parts of a stage's layers whose forward has run and whose backward has not, at most, by the run's schedule."""
    now = most = 0
    for action in schedule(stage, pp, 4 * pp, virtual_stages):
        now += 1 if action.kind is Kind.forward else -1
        most = max(most, now)
    return most


def logits_bytes(model: ModelShape, tokens: Tokens, tp: int, training: bool) -> int:
    """A chunk's in float32, and as much again: their exponentials, or the gradient that becomes of them.

    `training`: with a cap on logits, its slope, too.
    """
    if not model.has_lm_head:
        return 0
    most = 2 + (training and model.caps_logits)
    return most * FLOAT32 * min(tokens.chunk, tokens.micro_batch) * model.vocabulary // tp
