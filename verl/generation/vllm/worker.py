"""What every worker of an engine gains: weights from the node's shared memory, and the check that a load was complete.

Imported by vLLM's workers only.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from verl.generation.vllm.buffer import WeightBuffer, layout_from_json
from verl.generation.vllm.loaders import Loader, make_loader


class WeightLoader:
    """Mixed into vLLM's worker class by name (`worker_extension_cls`); its methods are called with `collective_rpc`."""

    # vLLM's worker brings these.
    get_model: Callable[[], Module]
    device: torch.device
    vllm_config: Any

    verl_weights: WeightBuffer
    verl_loader: Loader
    verl_wanted: set[str]
    """Parameters of the model that the load under way has not brought yet."""

    def verl_open_weights(self, path: str, buckets: list[list[list[Any]]], slots: int) -> None:
        self.verl_weights = WeightBuffer.open(path, [layout_from_json(bucket) for bucket in buckets], slots)
        self.verl_weights.close()
        _quieten_reload()
        self.verl_loader = make_loader(self.get_model(), self.device, self.vllm_config.model_config)

    def verl_watch_loads(self) -> None:
        """vLLM's own weight transfer drops what a model says it has loaded: it is noted on its way there."""
        model: Any = self.get_model()
        load = model.load_weights

        def load_and_note(weights: Iterable[tuple[str, Tensor]]) -> set[str]:
            loaded = load(weights)
            self.verl_wanted -= loaded
            return loaded

        model.load_weights = load_and_note
        _quieten_reload()

    def verl_expect_all(self) -> None:
        """A load begins."""
        self.verl_wanted = {name for name, _ in self.get_model().named_parameters()}

    def verl_begin_load(self) -> None:
        self.verl_expect_all()
        self._verl_in_vllm(self.verl_loader.begin)

    def verl_take_bucket(self, number: int) -> None:
        """Put this worker's part of a bucket into its model. The bucket is not read any more afterwards."""
        tensors = self.verl_weights.tensors(number)
        self.verl_wanted -= self._verl_in_vllm(lambda: self.verl_loader.take(tensors))

    def verl_finish_load(self) -> None:
        """Raises ValueError as `verl_check_all` does."""
        self._verl_in_vllm(self.verl_loader.finish)
        self.verl_check_all()

    def verl_check_all(self) -> None:
        """Raises ValueError where the load has left a parameter of the model as it was."""
        if self.verl_wanted:
            missing = ", ".join(sorted(self.verl_wanted))
            model = type(self.get_model()).__name__
            raise ValueError(f"the trainer's weights hold nothing for {missing} of {model}")

    def _verl_in_vllm(self, do: Callable[[], Any]) -> Any:
        """In the surroundings in which vLLM loads weights."""
        from vllm.config import set_current_vllm_config

        with torch.no_grad(), set_current_vllm_config(self.vllm_config):
            return do()


def _quieten_reload() -> None:
    """It warns of every tied head and rotary embedding; what is truly missing is found in `verl_check_all`."""
    logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").setLevel(logging.ERROR)
