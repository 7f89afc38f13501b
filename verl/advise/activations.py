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
    entropy: bool = False
    """The loss has an entropy bonus."""


def layer_bytes(model: ModelShape, itemsize: int, tokens: Tokens, tp: int = 1) -> int:
    """Bytes a token that one layer keeps for its backward pass on each of `tp` devices.

    Norms: the input in float32 and the result before its weight, of a part of the time (sequence parallelism,
    Korthikanti et al. 2022). In front of attention and MLP: their inputs, for which the time is gathered. Attention:
    queries, keys, values and output. MLP: gate, activated gate, up, and their product.
    """
    queries = model.num_heads * model.head_dim // tp
    keys = max(1, model.num_kv_heads // tp) * model.head_dim
    if tokens.attention in ("sdpa", "eager"):  # with a mask they repeat a key for each of its queries
        keys = queries
    norms = model.normed * (FLOAT32 + (FLOAT32 if model.norms_in_float32 else itemsize)) // tp
    inputs = 2 * model.hidden_size * itemsize
    attention = (2 * queries + 2 * keys) * itemsize + FLOAT32 * model.num_heads // tp
    mlp = 4 * model.intermediate_size * itemsize // tp
    return norms + inputs + attention + mlp + _scores_bytes(model, itemsize, tokens, tp)


def _scores_bytes(model: ModelShape, itemsize: int, tokens: Tokens, tp: int) -> int:
    """Of a token's attention to a row of the greatest length: the mask that is added, or what comes of its scores."""
    if tokens.attention == "sdpa":
        return itemsize * tokens.longest
    if tokens.attention != "eager":
        return 0
    probabilities = FLOAT32 + (itemsize if itemsize < FLOAT32 else 0)  # before and after they are made smaller
    capped = itemsize if model.caps_scores else 0
    return (probabilities + capped) * model.num_heads * tokens.longest // tp


def activations(
    model: ModelShape,
    layers: int,
    split: Split,
    stage: int,
    itemsize: int,
    tokens: Tokens,
    hybrid: HybridEngine,
    virtual_stages: int,
    in_head: bool,
) -> int:
    """What autograd keeps between forward and backward, of all micro-batches that are under way.

    `layers`: of this stage. `in_head`: when the backward pass is there; else when it is in a layer, which activation
    checkpointing computes again in whole.
    """
    under_way = parts_under_way(stage, split.pp, virtual_stages) if tokens.accumulates else virtual_stages
    layer = tokens.micro_batch * layer_bytes(model, itemsize, tokens, split.tp)
    inputs = tokens.micro_batch * model.hidden_size * itemsize // split.tp
    kept = inputs if hybrid.activation_checkpointing else layer
    if hybrid.offload_activations:
        return 2 * kept + layer
    between_stages = under_way * inputs * ((stage > 0) + (stage < split.pp - 1))
    last = _last_bytes(model, itemsize, tokens, split.tp) if stage == split.pp - 1 else 0
    besides = layer if hybrid.activation_checkpointing and not in_head else last
    return under_way * layers * kept // virtual_stages + between_stages + besides


def messages_bytes(model: ModelShape, itemsize: int, tokens: Tokens, split: Split) -> int:
    """Between stages: a sent one stays until later ones have been sent, as many as there are stages."""
    return split.pp * tokens.micro_batch * model.hidden_size * itemsize // split.tp if split.pp > 1 else 0


def passing_bytes(model: ModelShape, itemsize: int, tokens: Tokens, tp: int) -> int:
    """On the way through a layer, forward or backward, when it is most: in its MLP, or in eager attention's softmax."""
    states = model.hidden_size * itemsize
    mlp = states // tp + states + 3 * model.intermediate_size * itemsize // tp
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
    """A chunk's in float32, and as much again: their log-softmax, or the gradient that becomes of them.

    `training`: with a cap on logits, its slope, too; with an entropy bonus, all log-probs and their products with the
    probabilities, where the vocabulary is whole.
    """
    if not model.has_lm_head:
        return 0
    most = 2
    if training:
        most += model.caps_logits + 2 * (tokens.entropy and tp == 1)
    return most * FLOAT32 * min(tokens.chunk, tokens.micro_batch) * model.vocabulary // tp
