"""What a role takes of a device's memory, term by term. Pure: shapes, degrees and tokens in, bytes out.

Parameters, gradients and optimizer state are exact; the rest is within 15 % of what `scripts/bench/memory.py`
measures on a CPU, where it is large enough to matter. What stays of each role adds up, and what a role takes while it
computes is needed by one at a time. An engine of vLLM's that shares its devices sleeps while others compute, and with
`rollout.offload_trainers` the others are not there while it is awake (`verl.generation.residency`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod

from verl.advise.activations import FLOAT32, Activations, Tokens, logits_bytes, messages_bytes, passing_bytes
from verl.advise.model import ModelShape
from verl.mesh.spec import RoleSpec, RolloutSpec
from verl.reshard.boxes import Split

PROCESS_BYTES = 1 << 30
"""Of each process on a GPU beside its tensors: the CUDA context and NCCL's buffers. A rule of thumb."""
ENGINE_SHARE = 0.92
"""Of a device that vLLM has for itself: the default of its gpu_memory_utilization."""
ENGINE_TOKENS = 8192
"""Tokens of one forward of vLLM: the default of its max_num_batched_tokens."""
GATHERED_LAYERS = 2
"""That are there at once: FSDP gathers the next layer while one is computed."""


@dataclass(frozen=True)
class Need:
    """Bytes of one role on one device, each term by its name."""

    stays: Mapping[str, int] = field(default_factory=dict)
    """Held from the start to the end of a run."""
    at_work: Mapping[str, int] = field(default_factory=dict)
    """Held besides while the role computes, at the moment when it is most."""
    moments: tuple[Mapping[str, int], ...] = ()
    """The moments of which that is one, where there are several."""
    on_host: Mapping[str, int] = field(default_factory=dict)
    """In the node's memory besides, on account of this device."""

    def term(self, name: str) -> int:
        return self.stays.get(name, 0) + self.at_work.get(name, 0)

    @property
    def total(self) -> int:
        return sum(self.stays.values()) + sum(self.at_work.values())


@dataclass(frozen=True)
class Held:
    """Numbers of elements at one place (stage, tensor-parallel index) of a split model."""

    sharded: int
    """Of this rank's shards, with FSDP's padding."""
    whole: int
    """Of the place: what its data-parallel ranks share out."""
    largest_layer: int
    root: int
    """Of `whole` outside the layers, which FSDP gathers as one."""
    layers: int
    """Number of layers."""
    ends: bool
    """Whether the head is here."""


def held(model: ModelShape, split: Split, stage: int) -> Held:
    sharded = 0
    by_unit: dict[int, int] = {}
    for name, shape in model.shapes.items():
        if stage not in split.stages.get(name, range(split.pp)):
            continue
        local = list(shape)
        if name in split.tp_dims:
            local[split.tp_dims[name]] = -(-local[split.tp_dims[name]] // split.tp)
        sharded += -(-local[0] // split.shards) * prod(local[1:])
        unit = model.units[name][0]
        by_unit[unit] = by_unit.get(unit, 0) + prod(local)
    in_layers = {unit: size for unit, size in by_unit.items() if 1 <= unit <= model.num_layers}
    whole = sum(by_unit.values())
    return Held(
        sharded,
        whole,
        max(in_layers.values(), default=0),
        whole - sum(in_layers.values()),
        len(in_layers),
        ends=stage == split.pp - 1,
    )


def trained(
    model: ModelShape,
    split: Split,
    stage: int,
    itemsize: int,
    tokens: Tokens,
    spec: RoleSpec,
    reshards: bool,
    adapters: Held | None = None,
    copied: bool = False,
) -> Need:
    """Actor or critic on a device of `stage`. `itemsize`: bytes of the compute dtype; what is trained is float32.

    `adapters`: all that is trained, where there are any; the model is then stored in the compute dtype. `reshards`:
    gathered layers are freed after use (FSDP's reshard_after_forward); else the whole model stays gathered. `copied`:
    checkpoints are written in the background, from a copy of what is learnt. It is most in the last micro-batch's
    backward: in the head, or in the last layer, both with all activations, or when it ends, with all gradients.
    """
    part = held(model, split, stage)
    learnt = part if adapters is None else adapters
    stored = 0 if adapters is None else itemsize * part.sharded
    stays = {"parameters": stored + FLOAT32 * learnt.sharded, "optimizer": 2 * FLOAT32 * learnt.sharded}
    on_host = {"checkpoint copy": 3 * FLOAT32 * learnt.sharded} if copied else {}
    reduced = FLOAT32 * learnt.sharded
    if spec.hybrid_engine.offload_parameters:
        on_host |= stays | {"gradients": reduced}  # which follow them to the host as soon as they are reduced
        stays, reduced = {}, 0
    elif spec.hybrid_engine.offload_optimizer:
        # a step takes less of it at a time than the passes before have taken
        on_host["optimizer"] = stays.pop("optimizer")
    beside = 0 if adapters is None else _gathered(adapters, itemsize, split, reshards)
    always = {
        "gathered layers": _gathered(part, itemsize, split, reshards) + beside,
        "messages": messages_bytes(model, itemsize, tokens, split),
    }
    accumulated = FLOAT32 * learnt.whole if tokens.accumulates else 0
    has_head = part.ends and model.has_lm_head and adapters is None
    head = model.vocabulary * model.hidden_size // split.tp if has_head else 0

    kept = Activations(
        model, part.layers, split, stage, itemsize, tokens, spec.hybrid_engine, spec.parallelism.virtual_stages
    )
    on_host |= {"activations": kept.on_host()} if spec.hybrid_engine.offload_activations else {}
    in_head = always | {
        "gradients": accumulated,
        "activations": kept.on_device(in_head=True),
        # of the head's weight: a sum in float32 and a chunk's part of it
        "gradients in transit": (FLOAT32 + itemsize) * head,
        "logits": logits_bytes(model, tokens, split.tp, training=True) if part.ends else 0,
    }
    in_layer = always | {
        "gradients": accumulated,
        "activations": kept.on_device(in_head=False),
        "gradients in transit": itemsize * head + (FLOAT32 + itemsize) * learnt.largest_layer,
        "backward pass": passing_bytes(model, itemsize, tokens, split.tp),
    }
    ends = always | {
        "gradients": max(accumulated, reduced),
        "gradients in transit": (itemsize + FLOAT32) * max(learnt.largest_layer, learnt.root),
    }
    return _worst(stays, on_host, in_head, in_layer, ends)


def frozen(
    model: ModelShape, split: Split, stage: int, itemsize: int, tokens: Tokens, spec: RoleSpec, reshards: bool
) -> Need:
    """Reference or reward model: forward only, stored in the compute dtype.

    It is most either within a layer, or in the head.
    """
    part = held(model, split, stage)
    parameters = {"parameters": itemsize * part.sharded}
    stays, on_host = ({}, parameters) if spec.hybrid_engine.offload_parameters else (parameters, {})
    always = {
        "gathered layers": _gathered(part, itemsize, split, reshards),
        "messages": messages_bytes(model, itemsize, tokens, split),
    }
    states = tokens.micro_batch * model.hidden_size * itemsize
    logits = logits_bytes(model, tokens, split.tp, training=False) if part.ends else 0
    return _worst(
        stays,
        on_host,
        always | {"activations": passing_bytes(model, itemsize, tokens, split.tp)},
        always | {"activations": states, "logits": logits},
    )


def vllm(
    model: ModelShape, spec: RolloutSpec, itemsize: int, longest: int, device_memory: int | None, shares: bool
) -> Need:
    """A vLLM worker on one device of a replica. `shares`: other roles use the replica's devices, and it sleeps.

    Its key-value cache is what engine_kwargs.kv_cache_memory_bytes says; without that, what is left of vLLM's share of
    `device_memory`; and where nothing is known, room for `max_num_seqs` sequences of `longest` tokens.
    """
    weights = engine_weights(model, spec.tensor_parallel_size, itemsize)
    forward = ENGINE_TOKENS * (4 * model.hidden_size + 3 * model.intermediate_size // spec.tensor_parallel_size)
    scratch = forward * itemsize + 2 * FLOAT32 * spec.max_num_seqs * model.vocabulary
    said = spec.engine_kwargs.get("kv_cache_memory_bytes")
    if isinstance(said, int):
        cache = said
    elif device_memory is not None and not shares:
        cache = max(0, int(device_memory * engine_share(spec)) - weights - scratch - PROCESS_BYTES)
    else:
        cache = spec.max_num_seqs * longest * cache_bytes(model, spec.tensor_parallel_size, itemsize)
    terms = {"weights": weights, "KV cache": cache, "forward pass": scratch}
    return Need({}, terms) if shares else Need(terms, {})


def in_process(model: ModelShape, spec: RolloutSpec, itemsize: int, longest: int) -> Need:
    """The torch backend: weights of its own, and a cache that lives while it generates."""
    cache = spec.max_num_seqs * longest * cache_bytes(model, spec.tensor_parallel_size, itemsize)
    logits = 2 * FLOAT32 * spec.max_num_seqs * model.vocabulary
    weights = engine_weights(model, spec.tensor_parallel_size, itemsize)
    return Need({"weights": weights}, {"KV cache": cache, "logits": logits})


def engine_share(spec: RoleSpec) -> float:
    """The part of a device that a rollout's vLLM takes where no size of its cache is given."""
    assert isinstance(spec, RolloutSpec)
    said = spec.engine_kwargs.get("gpu_memory_utilization")
    return float(said) if isinstance(said, int | float) and 0 < said <= 1 else ENGINE_SHARE


def engine_weights(model: ModelShape, tp: int, itemsize: int) -> int:
    """Bytes of a replica's weights on one of its `tp` devices."""
    return itemsize * held(model, Split(tp=tp, tp_dims=model.tp_dims(tp)), 0).whole


def cache_bytes(model: ModelShape, tp: int, itemsize: int) -> int:
    """Keys and values of one token on one of `tp` devices."""
    return 2 * model.num_layers * max(1, model.num_kv_heads // tp) * model.head_dim * itemsize


def _worst(stays: Mapping[str, int], on_host: Mapping[str, int], *moments: Mapping[str, int]) -> Need:
    worst = max(moments, key=lambda terms: sum(terms.values()))
    return Need(stays, {name: size for name, size in worst.items() if size}, moments, on_host)


def _gathered(part: Held, itemsize: int, split: Split, reshards: bool) -> int:
    """Whole parameters, and the message that the last of them came in."""
    if not reshards:
        return itemsize * (part.whole + (part.largest_layer if split.shards > 1 else 0))
    return itemsize * (part.root + min(GATHERED_LAYERS, part.layers) * part.largest_layer)
