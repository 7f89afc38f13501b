"""The memory of every device of a job: what each of its roles takes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache

from verl.advise import memory
from verl.advise.adapters import held_adapters, with_adapters
from verl.advise.job import Job
from verl.advise.memory import PROCESS_BYTES, Need, Tokens
from verl.advise.model import ModelShape
from verl.checks import mini_batches
from verl.config import PPOConfig
from verl.flow.place import reference_is_actor
from verl.generation.residency import sharing
from verl.generation.vllm.delivery import WeightTransfer
from verl.mesh.spec import RolloutSpec
from verl.reshard.boxes import sender_of
from verl.reshard.buckets import SLOTS, cut_buckets, largest_bucket

TRAINED = ("actor", "critic")
ITEMSIZE = {None: 2, "bfloat16": 2, "float16": 2, "float32": 4}
"""Bytes of a mesh's dtype."""


@dataclass(frozen=True)
class Budget:
    """Devices that hold the same. Bytes."""

    ranks: tuple[int, ...]
    needs: Mapping[str, Need]
    """By role."""
    processes: int
    """On each device: the rank's own, and a vLLM worker."""
    shares: bool
    """A vLLM engine takes turns with other roles on the device, or on another one of its replica."""
    leave: bool = False
    """The others are in host memory while the rollout has its turn (rollout.offload_trainers)."""

    @property
    def worker(self) -> str:
        """The role in whose turn most is there."""
        return max(self.needs, key=lambda role: self.beside(role) + sum(self.needs[role].at_work.values()))

    def beside(self, worker: str) -> int:
        """What is there all the time that this role works."""
        return self.overhead + sum(sum(self.needs[role].stays.values()) for role in self._there(worker))

    @property
    def overhead(self) -> int:
        return self.processes * PROCESS_BYTES

    @property
    def stays(self) -> int:
        """What is there between the turns, when that is most."""
        return max(self.beside(role) for role in self.needs)

    @property
    def peak(self) -> int:
        return self.beside(self.worker) + sum(self.needs[self.worker].at_work.values())

    def terms(self) -> Iterator[tuple[str, int]]:
        """What the peak is made of, "role term" and bytes."""
        for role in self._there(self.worker):
            need = self.needs[role]
            yield from ((f"{role} {name}", size) for name, size in need.stays.items() if size)
            if role == self.worker:
                yield from ((f"{role} {name}", size) for name, size in need.at_work.items() if size)
        yield "CUDA and NCCL", self.overhead

    def _there(self, worker: str) -> Iterator[str]:
        """The roles that are on the device while this one works."""
        return (role for role in self.needs if role == "rollout" or not (self.leave and worker == "rollout"))


def budgets(job: Job, models: Mapping[str, ModelShape], config: PPOConfig, device_memory: int | None) -> list[Budget]:
    """What each device of the job holds, alike ones together; those without a model are left out.

    Args:
        job: the mesh with its ranks, in which every role can be split as it says.
        models: by role; a role without a model needs nothing.
        config: batch sizes and token budgets.
        device_memory: bytes of a device; None where it is not known.
    """
    if reference_is_actor(config, job.mesh, job.placements):
        models = {role: model for role, model in models.items() if role != "reference"}
    modelled = [place for role, place in job.placements.items() if role != "rollout" and role in models]

    @cache
    def need(role: str, stage: int, shares: bool, leave: bool, sends: bool) -> Need:
        if role == "rollout":
            return _with_buckets(_engine(job, models[role], config, device_memory, shares), job, models[role], config)
        found = trainer(job, role, stage, models[role], config)
        if role == "actor" and sends:
            slots = {"buckets of weights to send": SLOTS * _bucket_bytes(job, models[role], config)}
            found = replace(found, stays={**found.stays, **slots})
        if not leave:
            return found
        return replace(found, on_host={**found.on_host, "all else while the rollout works": sum(found.stays.values())})

    alike: dict[tuple[bool, bool, bool, tuple[tuple[str, int], ...]], list[int]] = {}
    for process in job.processes:
        places = tuple(
            (role, job.placements[role].coordinate(process.rank).pp)
            for role in job.roles_on(process.rank)
            if role in models
        )
        if places:
            turns = sharing(job.placements["rollout"], modelled, process.rank) is not None
            sends = process.rank == _sender(job, config)
            kind = turns and runs_vllm(job), turns and config.rollout.offload_trainers, sends, places
            alike.setdefault(kind, []).append(process.rank)
    return [
        Budget(
            tuple(ranks),
            {role: need(role, stage, shares, leave, sends) for role, stage in places},
            processes=2 if runs_vllm(job) and "rollout" in dict(places) else 1,
            shares=shares,
            leave=leave,
        )
        for (shares, leave, sends, places), ranks in alike.items()
    ]


def _with_buckets(engine: Need, job: Job, model: ModelShape, config: PPOConfig) -> Need:
    """With what of a load is on the engine's device; of weights that come from the node's memory that is nothing."""
    transfer = WeightTransfer(config.rollout.weight_transfer)
    if not runs_vllm(job) or transfer is WeightTransfer.node_memory:
        return engine
    bucket = _bucket_bytes(job, model, config)
    # the rank's own memory, which vLLM's sleep does not touch, and what the engine copies to or receives into
    slots = {"buckets of weights": SLOTS * bucket} if transfer is WeightTransfer.ipc else {}
    taken_in = {"a bucket taken in": bucket}
    return replace(engine, stays={**engine.stays, **slots}, at_work={**engine.at_work, **taken_in})


def _bucket_bytes(job: Job, model: ModelShape, config: PPOConfig) -> int:
    itemsize = ITEMSIZE[job.spec("rollout").dtype]
    return largest_bucket(
        cut_buckets(model.shapes, itemsize, config.rollout.reshard_bucket_mib << 20), model.shapes, itemsize
    )


def _sender(job: Job, config: PPOConfig) -> int | None:
    """The rank whose device sends weights to all engines."""
    if not runs_vllm(job) or config.rollout.weight_transfer != WeightTransfer.nccl:
        return None
    return sender_of(job.placements["rollout"], job.placements["actor"])


def runs_vllm(job: Job) -> bool:
    """`auto` is vLLM wherever there is a GPU to reckon with."""
    spec = job.spec("rollout")
    return isinstance(spec, RolloutSpec) and spec.backend != "torch"


def longest(config: PPOConfig) -> int:
    """Tokens of the longest sequence."""
    return config.data.max_prompt_length + config.data.max_response_length


def tokens_of(role: str, config: PPOConfig, dp: int, cp: int = 1) -> Tokens:
    """What a device of a role with `dp` data-parallel ranks is given at a time; `cp` devices share it out."""
    budget = {
        "actor": config.actor.max_tokens_per_micro_batch,
        "critic": config.critic.max_tokens_per_micro_batch,
        "reference": config.reference.max_tokens_per_micro_batch,
        "reward": config.reward.model.max_tokens_per_micro_batch,
    }[role]
    prompts = mini_batches(config).get(role, config.data.train_batch_size)
    tokens = max(1, -(-prompts // dp)) * config.rollout.n * longest(config)
    micro_batch = min(max(budget, longest(config)), tokens)
    attention = config.model.attn_implementation
    return Tokens(
        micro_batch=-(-micro_batch // cp),
        longest=longest(config),
        chunk=config.model.logprob_chunk_tokens,
        accumulates=tokens > micro_batch,
        attention="flash_attention_2" if attention == "auto" else attention,
        cp=cp,
    )


def trainer(job: Job, role: str, stage: int, model: ModelShape, config: PPOConfig) -> Need:
    """A role other than the rollout on a device of its pipeline's `stage`."""
    spec, place = job.spec(role), job.placements[role]
    split, tokens = model.split(spec, place.spread), tokens_of(role, config, place.dp, place.cp)
    said = config.model.reshard_after_forward
    reshards = split.pp == 1 if said is None else said  # a pipeline would gather a layer again for each micro-batch
    if role in TRAINED:
        lora = (config.actor if role == "actor" else config.critic).lora
        adapters, model = held_adapters(model, split, stage, lora), with_adapters(model, lora)
        itemsize, copied = ITEMSIZE[spec.dtype], config.trainer.async_save
        return memory.trained(model, split, stage, itemsize, tokens, spec, reshards, adapters, copied)
    return memory.frozen(model, split, stage, ITEMSIZE[spec.dtype], tokens, spec, reshards)


def _engine(job: Job, model: ModelShape, config: PPOConfig, device_memory: int | None, shares: bool) -> Need:
    spec = job.spec("rollout")
    assert isinstance(spec, RolloutSpec)
    if runs_vllm(job):
        return memory.vllm(model, spec, ITEMSIZE[spec.dtype], longest(config), device_memory, shares)
    return memory.in_process(model, spec, ITEMSIZE[spec.dtype], longest(config))
