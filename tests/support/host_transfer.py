"""Stands in for CUDA and NCCL where there is no GPU: host memory for a device's, gloo for NCCL.

`HostDevice` is what a rank has in place of `verl.generation.vllm.device.Cuda`. Run as a module it is the engine
process, with vLLM's own weight transfer in it, in which the calls into CUDA are replaced and nothing else:

    python -m tests.support.host_transfer FD PARENT_PID
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

from verl.processes import die_with

if __name__ == "__main__":
    die_with(int(sys.argv[2]), signal.SIGKILL)
    faulthandler.register(signal.SIGUSR1)
elif __name__ == "__mp_main__":
    die_with(os.getsid(0), signal.SIGKILL)

import torch
import torch.distributed as dist
from torch import Tensor

from verl.flow.node_memory import NodeMemory

GROUP_BYTES = 128
"""Of NCCL's unique id."""
GROUP_SECONDS = 120


class HostDevice:
    """A `Device` whose memory is its node's. Worker i of an engine is on the one with number i."""

    def __init__(self, number: int = 0) -> None:
        self.uuid = f"GPU-{number}"
        self._paths: dict[int, NodeMemory] = {}

    def allocate(self, num_bytes: int) -> Tensor:
        memory = NodeMemory(num_bytes)
        self._paths[memory.bytes.data_ptr()] = memory
        return memory.bytes

    def export(self, memory: Tensor) -> tuple[Any, ...]:
        """In the places where `reduce_tensor` has them for CUDA."""
        path = self._paths[memory.data_ptr()].path.encode()
        kinds = torch.Tensor, memory.size(), memory.stride(), 0, torch.storage.TypedStorage, torch.uint8
        return (*kinds, 0, path, memory.nbytes, 0, False, b"", 0, b"", False)

    def finish_writes(self) -> None:
        """Host memory is written when it is written."""

    def group_id(self) -> bytes:
        """The path of an anonymous file, in which the members find each other."""
        path = f"/proc/{os.getpid()}/fd/{os.memfd_create('group')}"
        return path.encode().ljust(GROUP_BYTES, b"\0")

    def join(self, group: bytes, size: int) -> GlooGroup:
        return GlooGroup(group, 0, size)


class GlooGroup:
    """One end of a group, of which rank 0 sends. On the other end it is what vLLM has in place of its communicator."""

    def __init__(self, group: bytes, rank: int, size: int) -> None:
        store = dist.FileStore(group.rstrip(b"\0").decode(), size)
        self._group = dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=GROUP_SECONDS))
        self._sends: list[dist.Work] = []
        self.destroyed = False
        count = torch.ones(1)
        self._group.allreduce([count]).wait()
        assert count == size, "a sum of one number each, with which vLLM's workers begin"

    def send(self, memory: Tensor) -> None:
        self._sends.append(self._group.broadcast([memory], self._options()))

    def wait(self) -> None:
        for work in self._sends:
            work.wait()
        self._sends.clear()

    def broadcast(self, tensor: Tensor, src: int, stream: object = None) -> None:
        assert src == 0
        self._group.broadcast([tensor], self._options()).wait()

    def destroy(self) -> None:
        self.destroyed = True

    @staticmethod
    def _options() -> Any:
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        return options


def open_exported(*arguments: Any) -> Tensor:
    """In place of torch's `rebuild_cuda_tensor`."""
    _, size, stride, offset, _, dtype, _, path, num_bytes, *_ = arguments
    memory = NodeMemory.open(path.decode(), num_bytes)
    memory.close()
    return memory.bytes.view(dtype).as_strided(size, stride, offset)


def replace_cuda() -> None:
    """In the engine process and in its workers, before vLLM makes its weight transfer."""
    from torch.multiprocessing import reductions
    from vllm.distributed.weight_transfer import ipc_engine, nccl_common, nccl_engine, packed_tensor

    reductions.rebuild_cuda_tensor = open_exported
    torch.cuda.get_device_properties = lambda _: SimpleNamespace(uuid=f"GPU-{dist.get_rank()}")  # type: ignore[assignment]
    torch.accelerator.current_device_index = lambda: 0  # type: ignore[assignment]
    torch.cuda.stream = lambda _: contextlib.nullcontext()  # type: ignore[assignment]
    packed_tensor._get_streams = lambda _, count: [SimpleNamespace(synchronize=lambda: None)] * count
    nccl_common.uid_init_process_group = lambda group, rank, world_size, device: GlooGroup(group, rank, world_size)
    for engine in (ipc_engine.IPCWeightTransferEngine, nccl_engine.NCCLWeightTransferEngine):
        engine.finish_weight_update = _then_pack_heads(engine.finish_weight_update)


def _then_pack_heads(finish: Callable[[Any], None]) -> Callable[[Any], None]:
    """On a CPU vLLM's reload leaves the packed copy of a tied head as it was."""

    def finish_and_pack(engine: Any) -> None:
        from verl.generation.vllm.loaders import _heads

        finish(engine)
        for head in _heads(engine.model):
            head.quant_method.process_weights_after_loading(head)

    return finish_and_pack


if __name__ == "__mp_main__":
    replace_cuda()
elif __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    from verl.generation.vllm.server import serve

    replace_cuda()
    serve(descriptor=int(sys.argv[1]))
