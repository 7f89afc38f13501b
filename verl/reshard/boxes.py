"""The boxes of every rank of a role, from its split alone: nothing is loaded, and no process group is made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from transformers import PretrainedConfig

from verl.flow.placement import Coordinate, Placement
from verl.parallel.tensor import COLUMN, ROW, style_of, tp_plan
from verl.reshard.layout import Box, Domain, Shapes, chunk, whole


@dataclass(frozen=True)
class Split:
    """How a model is cut over (pp, dp, tp)."""

    pp: int = 1
    dp: int = 1
    tp: int = 1
    tp_dims: Mapping[str, int] = field(default_factory=dict)
    """The dimension that tensor parallelism cuts, by parameter; one that is missing is alike on all tp ranks."""
    stages: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """The pipeline stages that hold a parameter (a tied embedding is on the first and the last); missing: all."""
    fsdp: bool = True
    """Data-parallel ranks share each parameter's rows out, on top of tensor parallelism; else each holds all of it."""
    copies: int = 1
    """Of the model: the data-parallel ranks of each share it out, and are neighbours."""

    @property
    def shards(self) -> int:
        """Data-parallel ranks that share a parameter out."""
        return self.dp // self.copies if self.fsdp else 1


def boxes_at(shapes: Shapes, split: Split, at: Coordinate) -> dict[str, Box]:
    """What the rank at this coordinate holds. Tensor parallelism cuts first, then FSDP the first dimension of that."""
    boxes: dict[str, Box] = {}
    for name, shape in shapes.items():
        if at.pp not in split.stages.get(name, range(split.pp)):
            continue
        box = whole(shape)
        if name in split.tp_dims:
            box = chunk(box, split.tp_dims[name], split.tp, at.tp)
        if box:
            box = chunk(box, 0, split.shards, at.dp % split.shards)
        boxes[name] = box
    return boxes


def coordinate(split: Split, index: int) -> Coordinate:
    """Of the rank at this place in a role's list; the same as `Placement.coordinate`."""
    return Coordinate(index // (split.dp * split.tp), index // split.tp % split.dp, index % split.tp)


def training_boxes(shapes: Shapes, split: Split, ranks: Sequence[int]) -> dict[int, dict[str, Box]]:
    """Of every rank of a role, in its listed order."""
    assert len(ranks) == split.pp * split.dp * split.tp, (ranks, split)
    return {rank: boxes_at(shapes, split, coordinate(split, i)) for i, rank in enumerate(ranks)}


def tensor_parallel_dims(shapes: Shapes, config: PretrainedConfig, tp: int) -> dict[str, int]:
    """`Split.tp_dims` of a decoder as `verl.parallel.tensor` cuts it over `tp` ranks."""
    text = config.get_text_config()
    shares_heads = text.num_key_value_heads < tp  # then keys and values are whole on every rank
    dims: dict[str, int] = {}
    for name in shapes:
        module, _, kind = name.removeprefix("model.").rpartition(".")
        style = style_of(module, tp_plan(text))
        if module in ("embed_tokens", "lm_head") or (
            style == COLUMN and not (shares_heads and module.endswith((".k_proj", ".v_proj")))
        ):
            dims[name] = 0
        elif style == ROW and kind == "weight":
            dims[name] = 1
    return dims


def own_domains(boxes: Mapping[int, Mapping[str, Box]]) -> list[Domain]:
    """Each rank's own parameters: generation in the ranks' processes, of what `boxes` says."""
    return [Domain(f"rank {rank}", (rank,), (rank,), mine) for rank, mine in boxes.items()]


def generation_domains(shapes: Shapes, config: PretrainedConfig, rollout: Placement) -> list[Domain]:
    """Of a rollout in its ranks' own processes: each has its tensor-parallel part of the model."""
    dims = tensor_parallel_dims(shapes, config, rollout.tp) if rollout.tp > 1 else {}
    split = Split(dp=rollout.dp, tp=rollout.tp, tp_dims=dims, fsdp=False)
    return own_domains(training_boxes(shapes, split, rollout.ranks))


def node_domains(shapes: Shapes, leaders: Sequence[int], node_of: Mapping[int, str], slots: int) -> list[Domain]:
    """The shared memory of every node that has a replica's leader: all of its replicas read there, and every rank of
    the node writes what it holds.
    """
    boxes = {name: whole(shape) for name, shape in shapes.items()}
    readers: dict[str, list[int]] = {}
    for rank in leaders:
        readers.setdefault(node_of[rank], []).append(rank)
    members = {node: tuple(rank for rank in sorted(node_of) if node_of[rank] == node) for node in readers}
    return [Domain(f"node {node}", members[node], tuple(ranks), boxes, slots) for node, ranks in readers.items()]


def device_domains(shapes: Shapes, ranks: Sequence[int], slots: int) -> list[Domain]:
    """Memory on the device of each of these ranks, which takes buckets whole and which it alone writes."""
    boxes = {name: whole(shape) for name, shape in shapes.items()}
    return [Domain(f"device of rank {rank}", (rank,), (rank,), boxes, slots) for rank in ranks]


def sender_of(rollout: Placement, actor: Placement) -> int | None:
    """The rank that sends weights by NCCL: the actor's first on whose GPU no engine runs; None: there is none."""
    return next((rank for rank in actor.ranks if rank not in rollout.ranks), None)
