"""The memory that weights take on their way to vLLM's engines, and who does what for them there: one way of three."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

from verl.errors import ConfigError
from verl.flow.job import Job
from verl.flow.placement import Groups, Placement
from verl.generation.vllm.buffer import Layout, WeightBuffer
from verl.generation.vllm.delivery import Delivery, WeightTransfer
from verl.generation.vllm.device import Cuda, Device
from verl.generation.vllm.engine import VllmEngine
from verl.generation.vllm.readers import Sender, Sent, Shown
from verl.generation.vllm.slots import DeviceSlots
from verl.reshard.boxes import device_domains, node_domains, sender_of
from verl.reshard.buckets import SLOTS
from verl.reshard.execute import Reader, Target
from verl.reshard.layout import Domain, Shapes


@dataclass(frozen=True)
class WeightPath:
    """This rank's part of the way."""

    domains: list[Domain]
    targets: Mapping[str, Target]
    delivery: Delivery | None
    """What this rank's engine is told, if it leads one."""
    memory: int
    """Bytes that this rank has made for it, on the host or on its device."""
    on_host: bool = True
    """The targets are in host memory."""
    reader: Callable[[VllmEngine | None], Reader | None] = lambda engine: engine
    """Of this rank, which has started that engine, or none."""
    meet: Callable[[VllmEngine | None], None] = lambda engine: None
    """On every rank, once all engines are ready: whoever has to meet before the first load."""


def make_path(
    transfer: WeightTransfer,
    shapes: Shapes,
    layouts: Sequence[Layout],
    rollout: Placement,
    others: Sequence[Placement],
    nodes: Sequence[str],
    groups: Groups | None,
    job: Job,
) -> WeightPath:
    """Collective. `layouts`: of the buckets. `others`: the roles that have a model. `groups`: the rollout's."""
    if transfer is WeightTransfer.ipc:
        device = Cuda(job.device) if job.rank in rollout.ranks else None
        return on_own_devices(shapes, layouts, rollout, device, partial(_await_replica, rollout, groups, job), job)
    if transfer is WeightTransfer.nccl:
        actor = next(other for other in others if other.role == "actor")
        device = Cuda(job.device) if job.rank == sender_of(rollout, actor) else None
        return from_one_sender(shapes, layouts, rollout, actor, device, job)
    return through_node_memory(shapes, layouts, rollout, nodes, job)


def _await_replica(rollout: Placement, groups: Groups | None, job: Job) -> None:
    """A barrier of the ranks of one replica."""
    assert groups is not None, "it is one of them"
    peers = [rank for rank in rollout.replica(job.rank) if rank != job.rank]
    with job.board.waiting(peers, "its replica's buckets"):
        dist.all_reduce(torch.zeros(1), group=groups.mesh["tp"].get_group())  # on the CPU, so by gloo


def refuse_transfer(
    transfer: WeightTransfer, backend: str, device_type: str, rollout: Placement, actor: Placement
) -> None:
    """Raises ConfigError where weights cannot go this way. `backend`: vllm, torch, or replay, which takes none."""
    if transfer is WeightTransfer.node_memory or backend == "replay":
        return
    what, remedy = f"rollout.weight_transfer={transfer}", f"set rollout.weight_transfer={WeightTransfer.node_memory}"
    if backend != "vllm":
        raise ConfigError(f"{what}: it is a way into vLLM's engines, and rollout.backend is {backend} here; {remedy}")
    if device_type != "cuda":
        raise ConfigError(f"{what}: it goes from GPU to GPU, and this job runs on the {device_type}; {remedy}")
    if transfer is WeightTransfer.nccl and sender_of(rollout, actor) is None:
        raise ConfigError(
            f"{what}: NCCL takes a GPU once, so that one of the actor has to send which no engine uses, and "
            f"actor.devices are all in rollout.devices (ranks {', '.join(map(str, actor.ranks))}); "
            f"set rollout.weight_transfer={WeightTransfer.ipc}"
        )


def through_node_memory(
    shapes: Shapes, layouts: Sequence[Layout], rollout: Placement, nodes: Sequence[str], job: Job
) -> WeightPath:
    """A domain is a node's shared memory, which its replicas read and its ranks write. Collective."""
    domains = node_domains(shapes, rollout.leaders, dict(enumerate(nodes)), SLOTS)
    here = next((domain for domain in domains if job.rank in domain.members), None)
    makes = here is not None and here.readers[0] == job.rank
    buffer = WeightBuffer(layouts, SLOTS) if makes else None
    paths = job.everywhere(buffer.path if buffer else None)
    if here is None:
        return WeightPath(domains, {}, None, 0)
    buffer = buffer or WeightBuffer.open(paths[here.readers[0]], layouts, SLOTS)
    delivery = Delivery.in_node_memory(buffer) if job.rank in rollout.leaders else None
    return WeightPath(domains, {here.name: buffer.tensors}, delivery, buffer.num_bytes if makes else 0)


def on_own_devices(
    shapes: Shapes,
    layouts: Sequence[Layout],
    rollout: Placement,
    device: Device | None,
    barrier: Callable[[], None],
    job: Job,
) -> WeightPath:
    """A domain is the device of one rank of a replica, whose worker there reads it by CUDA IPC. Collective.

    `device`: on the rollout's ranks. `barrier`: of this rank's replica.
    """
    domains = device_domains(shapes, rollout.ranks, SLOTS)
    slots = DeviceSlots(layouts, SLOTS, device.allocate) if device is not None else None
    exported = None
    if device is not None and slots is not None:
        exported = device.uuid, [device.export(memory) for memory in slots.memory]
    everywhere = job.everywhere(exported)
    if device is None or slots is None:
        return WeightPath(domains, {}, None, 0, on_host=False)
    delivery = None
    if job.rank in rollout.leaders:
        delivery = Delivery.on_devices(layouts, dict(everywhere[rank] for rank in rollout.replica(job.rank)))
    (here,) = (domain for domain in domains if job.rank in domain.members)
    targets = {here.name: slots.tensors}
    return WeightPath(
        domains, targets, delivery, slots.num_bytes, on_host=False, reader=lambda engine: Shown(engine, device, barrier)
    )


def from_one_sender(
    shapes: Shapes, layouts: Sequence[Layout], rollout: Placement, actor: Placement, device: Device | None, job: Job
) -> WeightPath:
    """The only domain is the device of one of the actor's ranks, which sends to every engine's workers by NCCL.

    Collective. `device`: on that rank.
    """
    rank, size = sender_of(rollout, actor), 1 + len(rollout.ranks)
    assert rank is not None, "refused before"
    domains = device_domains(shapes, [rank], SLOTS)
    group = job.everywhere(device.group_id() if device is not None else None)[rank]
    slots = DeviceSlots(layouts, SLOTS, device.allocate) if device is not None else None
    delivery, sender, targets = None, None, {}
    if job.rank in rollout.leaders:
        delivery = Delivery.sent(layouts, rank, group, size, first=1 + rollout.ranks.index(job.rank))
    if device is not None and slots is not None:
        targets = {domains[0].name: slots.tensors}
        sender = Sender(
            slots, device, group, size, lambda: job.board.waiting(rollout.leaders, "the engines to take weights")
        )

    def reader(engine: VllmEngine | None) -> Reader | None:
        return sender or (Sent(engine) if engine is not None else None)

    def meet(engine: VllmEngine | None) -> None:
        job.everywhere(None)  # a group has no time limit of its own, so nobody enters it before all engines are there
        if sender is not None:
            sender.join()
        elif engine is not None:
            engine.join()

    memory = slots.num_bytes if slots is not None else 0
    return WeightPath(domains, targets, delivery, memory, on_host=False, reader=reader, meet=meet)
