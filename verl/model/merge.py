"""This rank's weights with the adapters in them, made one at a time: there is no second model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor, nn

from verl.model.load import hf_parameters, local_box, local_tensor, shards_by_file, whole_tensor
from verl.model.lora import Adapter, adapters


def own_shards(model: nn.Module) -> dict[str, Tensor]:
    """Those of this rank's shards that have no adapter: the model's own memory, as `shards_by_file` names it."""
    adapted = adapters(model)
    return {name: part for name, (_, part) in shards_by_file(model).items() if name not in adapted}


class MergedShards(Mapping[str, Tensor]):
    """This rank's shards by the names of the folder's files, as `shards_by_file` cuts them.

    One with an adapter is W + s B A, in float32, as the adapter was when this was made; it is computed when it is asked
    for, and the last one is kept. The others are the model's own memory.
    """

    @torch.no_grad()
    def __init__(self, model: nn.Module, device: torch.device, now: Callable[[Tensor], Tensor]) -> None:
        """Collective over the model's ranks: of an adapter's A each has a part of the r rows, and needs all.

        `device`: where the ranks exchange them, wherever their shards are. `now`: a tensor of the model's as it can be
        read when a shard is asked for: itself, or its bytes in host memory.
        """
        self._device, self._now = device, now
        shards, named = shards_by_file(model), dict(hf_parameters(model))
        self._weights = {name: part for name, (_, part) in shards.items()}
        self._adapters: dict[str, Adapter] = {}
        for name, adapter in adapters(model).items():
            rows, columns = local_box(named[name])
            assert local_box(adapter.up)[0] == rows, f"B of {name} is not cut as its weight is"
            up = local_tensor(adapter.up.detach())
            down = whole_tensor(adapter.down.detach().to(device))[:, columns].to(up.device)
            self._adapters[name] = Adapter(down, up, adapter.scale)
        self._last: tuple[str, Tensor] | None = None

    @torch.no_grad()
    def __getitem__(self, name: str) -> Tensor:
        weight, adapter = self._weights[name], self._adapters.get(name)
        if adapter is None:
            return self._now(weight)
        if self._last is None or self._last[0] != name:
            down, up = self._to_compute_with(adapter.down), self._to_compute_with(adapter.up)
            self._last = name, Adapter(down, up, adapter.scale).merged(self._to_compute_with(weight))
        return self._last[1]

    def _to_compute_with(self, tensor: Tensor) -> Tensor:
        """Of what has left its device a copy there."""
        now = self._now(tensor)
        return now if now is tensor else now.to(self._device)

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)
