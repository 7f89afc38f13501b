"""Attention over a batch of sequences of different lengths, in place of Hugging Face's own.

A model built with `attn_implementation=NAME` calls `attention` in every layer, once it has projected and rotated its
queries, keys and values. Hugging Face builds no mask for it and keeps no cache: the `kv` argument, which the caller
gives to the model's forward and which the model hands down unread, does both. There are two of them, one for packed
prompts and one for a token each of many sequences.

Shapes: B sequences, T tokens of all prompts, H query heads, K key-value heads, L cached positions, D head size.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from verl.errors import UserError
from verl.generation.inprocess.cache import KVCache

NAME = "verl_ragged"


class KV(Protocol):
    """What a forward pass knows of its sequences."""

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None, window: int | None
    ) -> Tensor:
        """[batch, tokens, H, D] from [batch, H, tokens, D] and [batch, K, tokens, D]; keeps the keys and values.

        `window` counts the positions that a token sees, itself among them; None: all before it.
        """
        ...


class PromptKV:
    """Whole prompts, packed one behind the other into one row. Each is kept in every slot that starts with it."""

    def __init__(self, cache: KVCache, lengths: list[int], slots: list[list[int]]) -> None:
        assert len(lengths) == len(slots)
        self._cache = cache
        self._lengths = lengths
        self._slots = slots

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None, window: int | None
    ) -> Tensor:
        outputs = []
        prompts = (states.split(self._lengths, dim=2) for states in (query, key, value))
        for q, k, v, slots in zip(*prompts, self._slots, strict=True):
            for slot in slots:
                self._cache.write(layer, slot, k, v)
            mask = None
            if window is not None and window < q.shape[2]:
                mask = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).tril().triu(1 - window)
            outputs.append(
                F.scaled_dot_product_attention(
                    q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
                )
            )
        return torch.cat(outputs, dim=2).transpose(1, 2)


class DecodeKV:
    """The newest token of the sequences in slots 0 to B - 1.

    Args:
        positions: [B], the token's place in its sequence; all before it is in the cache.
        longest: the largest position, plus one.
    """

    def __init__(self, cache: KVCache, positions: Tensor, longest: int) -> None:
        self._cache = cache
        self._positions = positions
        self._slots = torch.arange(len(positions), device=positions.device)
        self._longest = longest
        self._masks: dict[int | None, Tensor] = {}

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None, window: int | None
    ) -> Tensor:
        self._cache.append(layer, self._slots, self._positions, key, value)
        keys, values = self._cache.read(layer, len(self._slots), self._longest)
        num_sequences, num_heads, _, head_dim = query.shape
        # The query heads that share a key-value head stand where query positions stand: they all see the same keys, so
        # one product serves the group and no key is repeated.
        query = query.reshape(num_sequences, keys.shape[1], num_heads // keys.shape[1], head_dim)
        output = F.scaled_dot_product_attention(
            query, keys, values, attn_mask=self._mask(window, query.dtype), scale=scale
        )
        return output.reshape(num_sequences, 1, num_heads, output.shape[-1])

    def _mask(self, window: int | None, dtype: torch.dtype) -> Tensor:
        """[B, 1, 1, L], added to the scores. Made once a forward pass for each window, not once a layer."""
        if window not in self._masks:
            places = torch.arange(self._longest, device=self._positions.device)
            newest = self._positions[:, None]
            hidden = places > newest
            if window is not None:
                hidden |= places <= newest - window
            zeros = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
            self._masks[window] = zeros.masked_fill_(hidden, float("-inf"))[:, None, None]
        return self._masks[window]


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    kv: KV,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **unused: Any,
) -> tuple[Tensor, None]:
    """Hugging Face's attention interface. Left unused: dropout and what only other kernels read.

    Raises:
        UserError: for a variant of attention that would be computed wrongly here.
    """
    variants = {"softcap": softcap, "s_aux (attention sinks)": s_aux, "position_bias": position_bias}
    for name, value_given in variants.items():
        if value_given is not None:
            raise UserError(
                f"{type(module).__name__} uses {name}, which backend torch does not compute: "
                "use backend vllm for this model"
            )
    assert attention_mask is None, "a mask was made for an attention that takes none"
    layer = module.layer_idx
    assert isinstance(layer, int)
    return kv.attend(layer, query, key, value, scaling, sliding_window), None


AttentionInterface.register(NAME, attention)
