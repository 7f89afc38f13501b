"""The rollout's engines, the memory that they read weights from, and the sync that fills it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import torch
from transformers import PretrainedConfig

from verl.config import PPOConfig
from verl.errors import MeshError
from verl.flow.job import Job
from verl.flow.placement import Groups, Placement, make_world_group
from verl.flow.window import Address
from verl.generation.inprocess.engine import TorchEngine
from verl.generation.inprocess.peers import Peers
from verl.generation.replay import RecordingBackend, ReplayBackend
from verl.generation.residency import Sharing, sharing
from verl.generation.types import Backend
from verl.generation.vllm.delivery import Delivery, WeightTransfer
from verl.generation.vllm.engine import VllmEngine
from verl.generation.vllm.options import VllmOptions
from verl.generation.vllm.probe import Probe, probe
from verl.mesh.spec import RolloutSpec
from verl.model.load import parameter_shapes
from verl.reshard.boxes import generation_domains
from verl.reshard.buckets import Buckets, cut_buckets
from verl.reshard.execute import Reader, Target, WeightSync
from verl.reshard.layout import Box, Domain, Shapes, Shards
from verl.reshard.plan import plan
from verl.reshard.schedule import from_neighbours
from verl.roles.actor import Actor
from verl.roles.role import torch_dtype
from verl.roles.weight_paths import make_path

AnyBackend = TypeVar("AnyBackend", bound=Backend)


@dataclass
class Engines:
    """What this rank has of the rollout: the replica that it leads or is a part of, and the memory that it writes."""

    backend: Backend | None = None
    reader: Reader | None = None
    """What takes the buckets of this rank's memory."""
    sleeper: VllmEngine | None = None
    """The replica again, where it can leave its devices to others."""
    in_process: TorchEngine | None = None
    """The replica again, where its parameters are this rank's."""
    wait_ready: Callable[[], None] = lambda: None
    targets: dict[str, Target] = field(default_factory=dict)
    domains: list[Domain] = field(default_factory=list)
    buckets: Buckets = ()
    on_host: bool = True
    """The targets are in host memory."""
    node_memory: int = 0
    """Bytes of buckets that this rank has made, for its node or on its device."""
    dtype: torch.dtype = torch.bfloat16


def choose_backend(config: PPOConfig, spec: RolloutSpec, placement: Placement, job: Job) -> str:
    """`vllm`, `torch` or `replay`: the same on all ranks, by what the replicas' leaders have installed."""
    if config.debug.replay_rollouts:
        return "replay"
    found = job.everywhere(probe(job.device.type))
    return job.together(lambda: _choose(spec, {rank: found[rank] for rank in placement.leaders}))


def _choose(spec: RolloutSpec, found: Mapping[int, Probe]) -> str:
    lacking = [rank for rank, installed in found.items() if not installed.usable]
    if spec.backend == "vllm" and lacking:
        raise MeshError(f"rollout.backend is vllm, but rank {lacking[0]} cannot run it. {found[lacking[0]].message}")
    return ("torch" if lacking else "vllm") if spec.backend == "auto" else spec.backend


def start_engines(
    config: PPOConfig,
    spec: RolloutSpec,
    backend: str,
    placement: Placement,
    others: Sequence[Placement],
    folder: Path,
    model: PretrainedConfig,
    run_dir: Path,
    nodes: list[str],
    groups: Groups | None,
    job: Job,
) -> Engines:
    """Starts this rank's replica, or its part of one; vLLM's, which the leader starts, does so while the trainers load,
    or before, where they share a GPU.

    `others`: the roles that have a model. `nodes`: of each rank. `groups`: the rollout's, on its ranks.
    """
    recorded = config.debug.replay_rollouts
    if recorded is not None:
        replay = _on(placement.leaders, job, lambda: ReplayBackend(Path(recorded)))
        return Engines(backend=replay, reader=replay)
    shapes = parameter_shapes(folder, model)
    buckets = cut_buckets(shapes, torch_dtype(spec.dtype).itemsize, config.rollout.reshard_bucket_mib << 20)
    if backend == "vllm":
        engines = _start_vllm(config, spec, placement, others, folder, shapes, buckets, run_dir, nodes, groups, job)
    else:
        engines = _start_torch(config, spec, placement, folder, model, shapes, groups, job)
    engines.buckets, engines.dtype = buckets, torch_dtype(spec.dtype)
    if config.debug.record_rollouts and engines.backend is not None and job.rank in placement.leaders:
        engines.backend = RecordingBackend(engines.backend, Path(config.debug.record_rollouts), job.rank)
    return engines


def _on(ranks: Sequence[int], job: Job, start: Callable[[], AnyBackend]) -> AnyBackend | None:
    """`start()` on these ranks; what one of them refuses ends all ranks alike."""
    return job.together(lambda: start() if job.rank in ranks else None)


def _start_torch(
    config: PPOConfig,
    spec: RolloutSpec,
    placement: Placement,
    folder: Path,
    model: PretrainedConfig,
    shapes: Shapes,
    groups: Groups | None,
    job: Job,
) -> Engines:
    """In the ranks' own processes; a domain is a rank's own parameters, whole or its tensor-parallel part of them."""

    def start() -> TorchEngine:
        if config.rollout.cpu_threads is not None:
            torch.set_num_threads(config.rollout.cpu_threads)
        trust = config.model.trust_remote_code
        peers = None
        if placement.tp > 1:
            assert groups is not None
            peers = Peers(groups.mesh.get_group("tp"))
        return TorchEngine(
            str(folder), torch_dtype(spec.dtype), job.device, spec.max_num_seqs, trust, job.board.beat, peers
        )

    engine = _on(placement.ranks, job, start)
    domains = generation_domains(shapes, model, placement)
    return Engines(engine, reader=engine, in_process=engine, domains=domains, on_host=job.device.type == "cpu")


def _start_vllm(
    config: PPOConfig,
    spec: RolloutSpec,
    placement: Placement,
    others: Sequence[Placement],
    folder: Path,
    shapes: Shapes,
    buckets: Buckets,
    run_dir: Path,
    nodes: list[str],
    groups: Groups | None,
    job: Job,
) -> Engines:
    """In a child process, to which weights go by one of three ways."""
    layouts = [[(name, shapes[name], torch_dtype(spec.dtype)) for name in bucket] for bucket in buckets]
    path = make_path(
        WeightTransfer(config.rollout.weight_transfer), shapes, layouts, placement, others, nodes, groups, job
    )
    shares = takes_turns(placement, others, job) is not None
    replicas_here = sum(nodes[leader] == nodes[job.rank] for leader in placement.leaders)

    def start() -> VllmEngine:
        assert path.delivery is not None
        engine = _vllm_engine(config, spec, placement, folder, path.delivery, run_dir, replicas_here, shares, job)
        if shares:  # it takes its devices while they are empty, and leaves them to the trainers
            engine.wait_ready()
            engine.sleep()
        return engine

    engine = _on(placement.leaders, job, start)

    def wait_ready() -> None:
        if engine is not None:
            engine.wait_ready()
        path.meet(engine)

    return Engines(
        engine, path.reader(engine), engine, wait_ready=wait_ready, targets=dict(path.targets), domains=path.domains,
        on_host=path.on_host, node_memory=path.memory,
    )  # fmt: skip


def _vllm_engine(
    config: PPOConfig,
    spec: RolloutSpec,
    placement: Placement,
    folder: Path,
    weights: Delivery,
    run_dir: Path,
    replicas_here: int,
    shares: bool,
    job: Job,
) -> VllmEngine:
    replica = placement.leaders.index(job.rank)
    options = VllmOptions(
        model_path=str(folder),
        dtype=str(torch_dtype(spec.dtype)).removeprefix("torch."),
        max_model_len=config.data.max_prompt_length + config.data.max_response_length,
        max_num_seqs=spec.max_num_seqs,
        tensor_parallel_size=placement.tp,
        enable_prefix_caching=spec.enable_prefix_caching,
        engine_kwargs=spec.engine_kwargs,
        # the replica's ranks are neighbours on one node, each on the device of its local rank
        devices=tuple(job.local_rank + peer - job.rank for peer in placement.replica(job.rank))
        if job.device.type == "cuda"
        else (),
        shares_devices=shares,
        threads=config.rollout.cpu_threads or max(1, len(os.sched_getaffinity(0)) // (replicas_here * placement.tp)),
        seed=config.trainer.seed,
        trust_remote_code=config.model.trust_remote_code,
    )
    return VllmEngine(
        options,
        weights,
        name=f"rollout replica {replica} of rank {job.rank}",
        log_path=run_dir / "logs" / f"vllm_{replica}.log",
        start_timeout=config.rollout.start_timeout,
        stage_timeout=config.trainer.stage_timeout,
        on_progress=job.board.beat,
    )


def takes_turns(placement: Placement, others: Sequence[Placement], job: Job) -> Sharing | None:
    """The replica on this rank, where its devices have memory of their own and other roles need it too."""
    return sharing(placement, others, job.rank) if job.device.type == "cuda" else None


def generating_peers(engines: Engines, placement: Placement, job: Job) -> list[int]:
    """The other ranks of this rank's replica where they generate in their own processes, all at once."""
    if engines.in_process is None:
        return []
    return [rank for rank in placement.replica(job.rank) if rank != job.rank]


def share_weights(engines: Engines, actor: Actor, boxes_here: Mapping[str, Box], job: Job) -> None:
    """An engine in this process computes with the actor's own tensors where those are what it would get a copy of: the
    same part of a parameter, of its dtype and on its device.

    `boxes_here`: of the actor's shards on this rank.
    """
    if (engine := engines.in_process) is not None:
        (wanted,) = (domain.boxes for domain in engines.domains if job.rank in domain.readers)
        shards = actor.lasting_shards().items()
        engine.adopt({name: tensor for name, tensor in shards if boxes_here[name] == wanted.get(name)})


def make_sync(engines: Engines, actor: Actor, boxes_here: Mapping[str, Box], nodes: list[str], job: Job) -> WeightSync:
    """All ranks learn which box each of the actor's ranks holds, once. An engine in this process then has those of its
    parameters that other ranks of the node have something of in memory which these can write.
    """
    boxes = job.everywhere(dict(boxes_here))
    shards = Shards({rank: boxes[rank] for rank in actor.placement.ranks}, dict(enumerate(nodes)))
    addresses: dict[str, Address] = {}
    if (engine := engines.in_process) is not None:
        here = f"rank {job.rank}"
        transfers = plan(shards, engines.domains, engines.dtype.itemsize)
        names = from_neighbours(transfers, shards.node_of, here) if engines.on_host else set()
        if address := engine.share(names):
            addresses[here] = address
        weights = engine.weights()
        engines.targets = {here: lambda _: weights}
    group = make_world_group("weights", job.timeout)
    return WeightSync(
        job.rank, shards, engines.domains, engines.buckets, engines.dtype, group, job.board, engines.on_host, addresses
    )
