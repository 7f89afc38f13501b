"""What an engine keeps on its device, in host memory for as long as the device is somebody else's."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, UntypedStorage

from verl.errors import UserError

ALIGNMENT = 512
"""Bytes: every tensor begins where a copy of any dtype may."""
ROOM_BYTES = 256 << 20
"""Of host memory that is taken at a time. torch rounds what is pinned up to a power of two."""


@dataclass(frozen=True)
class Lasting:
    """A tensor that an engine has between its calls."""

    tensor: Tensor
    """This rank's part of it."""
    changes: bool
    """Training writes it; what is frozen is copied to the host once."""


@dataclass(frozen=True)
class _Place:
    storage: UntypedStorage
    host: Tensor
    """As many bytes."""

    @property
    def bytes(self) -> Tensor:
        """Of the storage."""
        return torch.empty(0, dtype=torch.uint8, device=self.storage.device).set_(self.storage)


class Parked:
    """Moves an engine's lasting tensors to host memory and back, storage by storage.

    A storage that has left has size 0, and gets its bytes back later. Whoever has a view of it goes on having it:
    FSDP's shards, DTensors, tied weights, optimizer state. While they are away nothing may be computed with them; `now`
    says where their bytes are. The host memory is pinned, taken once, and kept.

    Memory that cannot be resized stays where it is, and so does what `stay` names and what is in host memory already.
    """

    def __init__(
        self, lasting: Callable[[], Iterable[Lasting]], device: torch.device, beat: Callable[[], None]
    ) -> None:
        """`lasting`: the tensors, as they are when they leave. `beat`: called for each storage; a sign of life."""
        self._lasting, self._device, self._beat = lasting, device, beat
        self._room = _Room(pinned=device.type == "cuda")
        self._places: dict[int, _Place] = {}
        self._staying: dict[int, UntypedStorage] = {}
        self.away = False

    @property
    def host_bytes(self) -> int:
        """Host memory that is kept."""
        return self._room.num_bytes

    def stay(self, tensors: Iterable[Tensor]) -> None:
        """The memory of these does not move: somebody else computes with it meanwhile."""
        self._staying |= {_key(storage): storage for storage in (tensor.untyped_storage() for tensor in tensors)}

    @torch.no_grad()
    def leave(self) -> None:
        """Frees the device memory. Raises UserError where the host has no room for it."""
        if self.away:
            return
        moving = self._moving()
        if self._places.keys() - moving.keys():  # the engine has new tensors, whose old ones' room is of no use
            self._places, self._room = {}, _Room(self._room.pinned)
        for key, (storage, changes) in moving.items():
            known = self._places.get(key)
            place = self._places[key] = known or _Place(storage, self._room.take(storage.nbytes()))
            if changes or known is None:
                place.host.copy_(place.bytes, non_blocking=True)
            self._beat()
        self._wait()
        for place in self._places.values():
            place.storage.resize_(0)
        self.away = True

    @torch.no_grad()
    def come_back(self) -> None:
        """Everything is where it was."""
        if not self.away:
            return
        for place in self._places.values():
            place.storage.resize_(place.host.nbytes)
            place.bytes.copy_(place.host, non_blocking=True)
            self._beat()
        self._wait()
        self.away = False

    def now(self, tensor: Tensor) -> Tensor:
        """A tensor as it can be read now: itself, or, where its memory has left, a view of the host's."""
        place = self._places.get(_key(tensor.untyped_storage())) if self.away else None
        if place is None:
            return tensor
        whole = place.host[: place.host.nbytes // tensor.itemsize * tensor.itemsize].view(tensor.dtype)
        return whole.as_strided(tensor.size(), tensor.stride(), whole.storage_offset() + tensor.storage_offset())

    def _moving(self) -> dict[int, tuple[UntypedStorage, bool]]:
        """Every storage that is to leave, and whether it has changed."""
        found: dict[int, tuple[UntypedStorage, bool]] = {}
        for lasting in self._lasting():
            storage = lasting.tensor.untyped_storage()
            here = storage.device.type == self._device.type and storage.nbytes() > 0 and storage.resizable()
            if here and _key(storage) not in self._staying:
                _, changes = found.get(_key(storage), (storage, False))
                found[_key(storage)] = storage, changes or lasting.changes
        return found

    def _wait(self) -> None:
        """Copies are over, and so is all else that any stream does with the memory."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            self._beat()


class _Room:
    """Host memory that is handed out in pieces."""

    def __init__(self, pinned: bool) -> None:
        self.pinned, self.num_bytes = pinned, 0
        self._left = torch.empty(0, dtype=torch.uint8)

    def take(self, size: int) -> Tensor:
        """So many bytes, which nobody else gets."""
        whole = -(-size // ALIGNMENT) * ALIGNMENT
        if whole > self._left.nbytes:
            self._left = self._more(max(whole, ROOM_BYTES))
        taken, self._left = self._left[:size], self._left[whole:]
        return taken

    def _more(self, size: int) -> Tensor:
        try:
            room = torch.empty(size, dtype=torch.uint8, pin_memory=self.pinned)
        except RuntimeError as error:  # of CUDA or of the allocator: there is no narrower type
            raise UserError(
                f"rollout.offload_trainers=true: the host has no {size >> 20} MiB more for what leaves the device "
                f"({self.num_bytes >> 20} MiB have been taken): {str(error).splitlines()[0]}. Give the job more "
                "memory, or set rollout.offload_trainers=false."
            ) from error
        self.num_bytes += size
        return room


def _key(storage: UntypedStorage) -> int:
    """Of the memory itself, not of the Python object that stands for it."""
    return storage._cdata
