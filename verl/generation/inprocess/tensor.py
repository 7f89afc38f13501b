"""Tensor parallelism of a model that generates: every rank has its heads, its part of each MLP and of the vocabulary.

The cut is that of training (`verl.parallel.tensor`, which names the source), so that shards of both coincide where the
ranks do. Generation has no gradients and a token a sequence: states are whole on every rank, and a layer sends two
messages, the sums behind attention and MLP.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from verl.generation.inprocess.peers import Peers
from verl.parallel.tensor import COLUMN, ROW, style_of, tp_plan


def cut_model(model: PreTrainedModel, peers: Peers) -> None:
    """Leaves this rank's part of every weight. The model is on the meta device, and one that
    `verl.parallel.support.unsupported` has nothing against; its logits are then this rank's part of the vocabulary.
    """
    decoder, config = model.base_model, model.config.get_text_config()
    plan = tp_plan(config)
    shares_heads = config.num_key_value_heads < peers.size
    for name, module in decoder.named_modules():
        style = style_of(name, plan)
        if style not in (COLUMN, ROW):
            continue  # norms are whole on every rank
        assert isinstance(module, nn.Linear), f"a plan cuts {type(module).__name__}, which is no linear layer"
        if style == ROW:
            _cut_inputs(module, peers)
        elif shares_heads and name.endswith((".k_proj", ".v_proj")):
            _use_one_head(module, peers, config.num_key_value_heads)
        else:
            _cut_outputs(module, peers)
    embeddings, head = model.get_input_embeddings(), model.get_output_embeddings()
    assert isinstance(embeddings, nn.Embedding) and isinstance(head, nn.Linear)
    _cut_vocabulary(embeddings, peers)
    if config.tie_word_embeddings:
        head.weight = embeddings.weight
    else:
        _cut_outputs(head, peers)


def _narrow(module: nn.Module, name: str, dim: int, peers: Peers) -> None:
    whole = module.get_parameter(name)
    assert whole.is_meta, "values are loaded after the model is cut"
    part = whole.detach().chunk(peers.size, dim)[peers.number]
    module.register_parameter(name, nn.Parameter(part, requires_grad=False))


def _cut_outputs(module: nn.Linear, peers: Peers) -> None:
    for name, _ in list(module.named_parameters()):
        _narrow(module, name, 0, peers)


def _cut_inputs(module: nn.Linear, peers: Peers) -> None:
    """The outputs are parts of a sum. A bias is added to the sum."""
    _narrow(module, "weight", 1, peers)

    def forward(x: Tensor) -> Tensor:
        out = peers.sum(F.linear(x, module.weight))
        return out if module.bias is None else out + module.bias

    module.forward = forward  # type: ignore[method-assign]


def _use_one_head(module: nn.Linear, peers: Peers, num_heads: int) -> None:
    """Fewer key or value heads than ranks: the weight is whole on every rank, and neighbours use one head of it."""
    dim, head = module.out_features // num_heads, peers.number * num_heads // peers.size
    own = slice(head * dim, (head + 1) * dim)

    def forward(x: Tensor) -> Tensor:
        return F.linear(x, module.weight[own], None if module.bias is None else module.bias[own])

    module.forward = forward  # type: ignore[method-assign]


def _cut_vocabulary(module: nn.Embedding, peers: Peers) -> None:
    """Rows of other ranks' tokens are zero here, so that the ranks' sum is the embedding."""
    size = module.num_embeddings // peers.size
    first = peers.number * size
    _narrow(module, "weight", 0, peers)
    module.padding_idx = None  # it is about gradients, and is beyond most ranks' rows
    look_up = module.forward

    def forward(ids: Tensor) -> Tensor:
        places = ids - first
        elsewhere = (places < 0) | (places >= size)
        rows = look_up(places.masked_fill(elsewhere, 0))
        return peers.sum(rows.masked_fill(elsewhere[..., None], 0.0))

    module.forward = forward  # type: ignore[method-assign]
