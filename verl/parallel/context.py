"""Context parallelism: each rank has a part of every row's time through the whole model; in attention, some heads."""

from __future__ import annotations

import copy

import torch.distributed as dist

from verl.model.context import CONTEXT_ATTENTION, Context
from verl.model.heads import HeadedModel


def apply_context_parallelism(model: HeadedModel, group: dist.ProcessGroup) -> None:
    """Lets the ranks of `group` share out the time of all rows. They give the model the same ones, and get all outputs.

    Tensor parallelism, if there is any, shares each rank's part of the time out once more.
    """
    model.context = Context(group)
    of_attention = copy.copy(model.hf.config.get_text_config())
    of_attention._attn_implementation = CONTEXT_ATTENTION
    for module in model.hf.base_model.modules():
        if "num_key_value_groups" in vars(module):  # an attention layer
            vars(module)["config"] = of_attention
