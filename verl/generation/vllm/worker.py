"""What every worker of an engine gains: weights read from the node's shared memory. Imported by vLLM's workers only."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from verl.generation.vllm.buffer import WeightBuffer, layout_from_json


class WeightLoader:
    """Mixed into vLLM's worker class by name (`worker_extension_cls`); its methods are called with `collective_rpc`."""

    # vLLM's worker brings these.
    get_model: Callable[[], Module]
    device: torch.device
    vllm_config: Any

    verl_weights: dict[str, Tensor]

    def verl_open_weights(self, path: str, layout: list[list[Any]]) -> None:
        buffer = WeightBuffer.open(path, layout_from_json(layout))
        self.verl_weights = buffer.tensors()
        buffer.close()
        # It warns of every tied head and rotary embedding; what is truly missing is found in verl_load_weights.
        logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").setLevel(logging.ERROR)

    def verl_load_weights(self) -> None:
        """Put this worker's part of the shared weights into its model.

        vLLM's own layer by layer reload is used, since on the CPU a linear layer's weight exists only packed for
        oneDNN. Raises ValueError where the shared weights leave a parameter of the model as it was.
        """
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

        model: Any = self.get_model()
        wanted = {name for name, _ in model.named_parameters()}
        with set_current_vllm_config(self.vllm_config):
            initialize_layerwise_reload(model)
            loaded = model.load_weights(iter(self.verl_weights.items()))
            finalize_layerwise_reload(model, self.vllm_config.model_config)
            if self.device.type == "cpu":
                _refresh_tied_heads(model)
        if missing := sorted(wanted - loaded):
            raise ValueError(f"the trainer's weights hold nothing for {', '.join(missing)} of {type(model).__name__}")


def _refresh_tied_heads(model: Module) -> None:
    """On the CPU an output layer keeps a packed copy of the embedding that it shares, which a reload does not renew."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

    embeddings = [module for module in model.modules() if isinstance(module, VocabParallelEmbedding)]
    for head in embeddings:
        if isinstance(head, ParallelLMHead) and any(
            other is not head and other.weight is head.weight for other in embeddings
        ):
            head.quant_method.process_weights_after_loading(head)
