"""How a worker puts new weights into vLLM's model. Imported by vLLM's workers only."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import Module, Parameter


class Loader(Protocol):
    """New weights for a model: `begin`, `take` for each bucket, `finish`."""

    def begin(self) -> None: ...

    def take(self, tensors: Mapping[str, Tensor]) -> set[str]:
        """Whole tensors by Hugging Face name, which are not read any more afterwards. Names of the model's own
        parameters that they went into."""
        ...

    def finish(self) -> None: ...


def make_loader(model: Module, device: torch.device, model_config: Any) -> Loader:
    return PackedLoader(model) if device.type == "cpu" and PackedLoader.serves(model) else Reload(model, model_config)


class Reload:
    """vLLM's own layer by layer reload, which serves all models, quantised ones too."""

    def __init__(self, model: Module, model_config: Any) -> None:
        self._model: Any = model
        self._model_config = model_config

    def begin(self) -> None:
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        initialize_layerwise_reload(self._model)

    def take(self, tensors: Mapping[str, Tensor]) -> set[str]:
        loaded = self._model.load_weights(iter(tensors.items()))
        _keep_what_waits(next(iter(tensors.values())))
        return loaded

    def finish(self) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self._model, self._model_config)
        for head in _heads(self._model):
            if next(head.parameters()).device.type == "cpu":
                # it has a packed copy of an embedding that it shares, which a reload does not renew
                head.quant_method.process_weights_after_loading(head)


def _keep_what_waits(taken: Tensor) -> None:
    """vLLM keeps what it was given until a layer is complete, or until the end (a padded vocabulary): it gets copies,
    since the next bucket takes this one's place. `taken`: any tensor in the same memory.
    """
    from vllm.model_executor.model_loader.reload.layerwise import LAYERWISE_INFO

    memory = taken.untyped_storage().data_ptr()
    for waiting in LAYERWISE_INFO.values():
        for _, call in waiting.loaded_weights:
            for name, value in call.arguments.items():
                if isinstance(value, Tensor) and value.untyped_storage().data_ptr() == memory:
                    call.arguments[name] = value.clone()


class PackedLoader:
    """For unquantised models on the CPU, where a linear layer's weight exists only packed for its kernel.

    vLLM's reload calls every weight loader twice and makes every layer's tensors anew. Here a layer has a parameter for
    the time of a load, in memory that the layers of the next bucket use again. The loaders fill it as in vLLM's first
    load, tensor-parallel parts and fused ones (qkv, gate and up) included, and it is packed at the end of its bucket,
    in which all that is fused with it is.
    """

    def __init__(self, model: Module) -> None:
        self._model: Any = model
        self._memory: dict[tuple[torch.Size, torch.dtype], list[Tensor]] = {}
        self._filled: dict[Module, Parameter] = {}
        self._parameters = {layer: self._loadable(layer) for layer in model.modules() if _is_packed(layer)}

    @staticmethod
    def serves(model: Module) -> bool:
        """Whether all that vLLM has worked on after its first load are plain linear layers and embeddings."""
        from vllm.model_executor.layers.linear import UnquantizedLinearMethod
        from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
        from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

        # some methods are modules themselves (experts'), which torch keeps apart from other attributes
        methods = [(vars(module) | module._modules).get("quant_method") for module in model.modules()]
        known = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)
        return all(type(method) in known for method in methods if isinstance(method, QuantizeMethodBase))

    def begin(self) -> None:
        for layer, parameter in self._parameters.items():
            layer.weight = parameter

    def take(self, tensors: Mapping[str, Tensor]) -> set[str]:
        loaded = self._model.load_weights(iter(tensors.items()))
        for layer, parameter in self._filled.items():
            layer.quant_method.process_weights_after_loading(layer)  # type: ignore[union-attr, operator]
            self._memory[parameter.shape, parameter.dtype].append(parameter.data)
            parameter.data = _placeholder(parameter.shape, parameter.dtype)
        self._filled.clear()
        return loaded

    def finish(self) -> None:
        for head in _heads(self._model):
            head.quant_method.process_weights_after_loading(head)

    def _loadable(self, layer: Module) -> Parameter:
        """The layer's weight as it was before vLLM packed it, with its weight loader and without memory."""
        from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
        from vllm.model_executor.model_loader.reload.sanitize import restore_layer_refs

        as_it_was = get_layerwise_info(layer).restore_metadata[0]["weight"]
        weight: Any = _placeholder(as_it_was.shape, as_it_was.dtype)
        weight.__class__ = as_it_was.__class__
        weight.__dict__ = as_it_was.__dict__.copy()
        restore_layer_refs(weight, layer)
        fill: Callable[..., Any] = weight.weight_loader

        def load(parameter: Parameter, *args: Any, **kwargs: Any) -> Any:
            if layer not in self._filled:
                free = self._memory.setdefault((parameter.shape, parameter.dtype), [])
                parameter.data = free.pop() if free else torch.empty(parameter.shape, dtype=parameter.dtype)
                self._filled[layer] = parameter
            return fill(parameter, *args, **kwargs)

        weight.weight_loader = load
        return weight


def _placeholder(shape: torch.Size, dtype: torch.dtype) -> Tensor:
    return torch.empty(1, dtype=dtype).expand(shape)


def _is_packed(module: Module) -> bool:
    from vllm.model_executor.layers.linear import LinearBase

    weight = module._parameters.get("weight")
    return isinstance(module, LinearBase) and weight is not None and not weight.numel()


def _heads(model: Module) -> list[Any]:
    """The modules that compute logits. An embedding beside them, tied or not, is looked up and needs no packed copy."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

    embeddings = [module for module in model.modules() if isinstance(module, VocabParallelEmbedding)]
    heads = [module for module in embeddings if isinstance(module, ParallelLMHead)]
    return heads or embeddings
