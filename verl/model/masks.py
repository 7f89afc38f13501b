"""Attention masks made before the model runs, for models that see only a part of the time or of the layers."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PretrainedConfig
from transformers.masking_utils import create_masks_for_generate

from verl.model.packing import MicroBatch


def attention_masks(config: PretrainedConfig, batch: MicroBatch) -> Tensor | dict[str, Tensor | None] | None:
    """What transformers' models make of `position_ids` themselves: a packed row's sequences do not see each other.

    [batch, 1, time, time], by layer type where the model has several; None where the kernel needs no mask. A model
    takes its own sizes from its hidden states, which are not the whole rows where the time is split.
    """
    # transformers reads the batch, the time and the dtype of a mask that is added; float32 holds what any dtype does
    like = torch.empty((*batch.position_ids.shape, 0), dtype=torch.float32, device=batch.position_ids.device)
    return create_masks_for_generate(config, like, None, None, batch.position_ids)
