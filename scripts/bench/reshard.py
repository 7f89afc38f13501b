"""Weights from training to generation: bytes, memory and time.

    python -m scripts.bench.reshard [--bucket 16] [--model FOLDER]

Eight layouts: a model trained as 2 x 2 x 2 (pp x dp x tp) on ranks 0 to 7 goes to generation layouts on the same,
overlapping or other ranks of one node, from float32 shards to bfloat16 parameters as the torch backend has them. Held
against the fewest bytes that could do it, a bare transfer of the same bytes by gloo (one message, packed before, for
each pair of ranks), and what a gather does, after which every rank has held all of the model.

Then vLLM's whole weight sync, from the trainer's tensors to the committed version, against a plain copy of its bytes.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from scripts.bench.common import OtherPrograms, Table, at_least, figure, model_folder, parser, seconds, show
from scripts.bench.engines import DTYPE, load, start_vllm
from scripts.bench.ranks import on_ranks
from verl.flow.job import Job, start_job
from verl.flow.placement import make_world_group
from verl.flow.window import Address, Window
from verl.generation.vllm.options import VllmOptions
from verl.generation.vllm.probe import probe
from verl.reshard.boxes import Split, own_domains, training_boxes
from verl.reshard.buckets import cut_buckets, largest_bucket
from verl.reshard.execute import WeightSync
from verl.reshard.layout import Box, Domain, Shards, intersect, volume, within
from verl.reshard.plan import plan
from verl.reshard.schedule import from_neighbours

TARGET = 1.5
"""Times a bare transfer of the same bytes."""
WORLD = 12
TIMEOUT = 300.0
MIB = 2**20


@dataclass(frozen=True)
class Model:
    """A Llama's tensors."""

    layers: int = 12
    hidden: int = 512
    vocabulary: int = 16384

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: shape for name, (shape, _) in self._tensors().items()}

    def tp_dims(self) -> dict[str, int]:
        return {name: dim for name, (_, dim) in self._tensors().items() if dim is not None}

    def stages(self, count: int) -> dict[str, tuple[int, ...]]:
        """Of as many pipeline stages."""
        held = {
            name: (int(name.split(".")[2]) * count // self.layers,) for name in self._tensors() if ".layers." in name
        }
        return held | {
            "model.embed_tokens.weight": (0,),
            "model.norm.weight": (count - 1,),
            "lm_head.weight": (count - 1,),
        }

    def _tensors(self) -> dict[str, tuple[tuple[int, ...], int | None]]:
        """Shape, and the dimension that tensor parallelism cuts."""
        h, wide = self.hidden, 3 * self.hidden
        tensors: dict[str, tuple[tuple[int, ...], int | None]] = {
            "model.embed_tokens.weight": ((self.vocabulary, h), 0)
        }
        for i in range(self.layers):
            at = f"model.layers.{i}"
            for name, rows in (("q", h), ("k", h // 2), ("v", h // 2)):
                tensors[f"{at}.self_attn.{name}_proj.weight"] = ((rows, h), 0)
            tensors[f"{at}.self_attn.o_proj.weight"] = ((h, h), 1)
            tensors |= {f"{at}.mlp.{name}_proj.weight": ((wide, h), 0) for name in ("gate", "up")}
            tensors[f"{at}.mlp.down_proj.weight"] = ((h, wide), 1)
            tensors |= {f"{at}.{name}_layernorm.weight": ((h,), None) for name in ("input", "post_attention")}
        return tensors | {"model.norm.weight": ((h,), None), "lm_head.weight": ((self.vocabulary, h), 0)}


@dataclass(frozen=True)
class Layout:
    name: str
    ranks: tuple[int, ...]
    """That generate; neighbours are tensor-parallel peers."""
    tp: int


SAME = tuple(range(8))
LAYOUTS = [
    Layout("the same ranks, TP 2 x DP 4", SAME, 2),
    Layout("the same ranks, TP 4 x DP 2", SAME, 4),
    Layout("the same ranks, TP 1 x DP 8", SAME, 1),
    Layout("ranks 0 to 3, TP 2 x DP 2", (0, 1, 2, 3), 2),
    Layout("ranks 0, 1, 4, 5, TP 4", (0, 1, 4, 5), 4),
    Layout("other ranks, TP 4", (8, 9, 10, 11), 4),
    Layout("other ranks, TP 2 x DP 2", (8, 9, 10, 11), 2),
    Layout("partly other ranks, TP 4", (6, 7, 8, 9), 4),
]


@dataclass(frozen=True)
class Figures:
    wire: int
    bound: int
    local: int
    extra: int
    two_buckets: int
    ours: list[float]
    bare: list[float]
    gather: list[float]
    """Seconds of each time."""


class Bench:
    """One layout on one rank."""

    def __init__(self, model: Model, layout: Layout, bucket: int, job: Job) -> None:
        self.job, self.shapes = job, model.shapes()
        training = Split(pp=2, dp=2, tp=2, tp_dims=model.tp_dims(), stages=model.stages(2))
        generation = Split(dp=len(layout.ranks) // layout.tp, tp=layout.tp, tp_dims=model.tp_dims(), fsdp=False)
        self.shards = Shards(training_boxes(self.shapes, training, SAME), dict.fromkeys(range(WORLD), "here"))
        self.domains = own_domains(training_boxes(self.shapes, generation, layout.ranks))
        self.buckets = cut_buckets(self.shapes, DTYPE.itemsize, bucket)
        self.two_buckets = 2 * largest_bucket(self.buckets, self.shapes, DTYPE.itemsize)
        self.domain: Domain | None = next((d for d in self.domains if job.rank in d.readers), None)
        self.targets, addresses = self.make_parameters()
        self.sync = WeightSync(
            job.rank,
            self.shards,
            self.domains,
            self.buckets,
            DTYPE,
            make_world_group("weights", job.timeout),
            job.board,
            addresses=addresses,
        )
        draws = torch.Generator().manual_seed(job.rank)
        mine = self.shards.boxes.get(job.rank, {})
        self.sources = {name: torch.randn(_sizes(box), generator=draws) for name, box in mine.items()}
        pairs: dict[tuple[int, int], int] = {}
        for t in plan(self.shards, self.domains, DTYPE.itemsize):
            if t.src != t.dst:
                pairs[t.src, t.dst] = pairs.get((t.src, t.dst), 0) + t.size
        self.outgoing = {d: torch.ones(n, dtype=torch.uint8) for (s, d), n in pairs.items() if s == job.rank}
        self.incoming = {s: torch.ones(n, dtype=torch.uint8) for (s, d), n in pairs.items() if d == job.rank}
        self.whole = {name: torch.empty(shape, dtype=DTYPE) for name, shape in self.shapes.items()}

    def make_parameters(self) -> tuple[dict[str, Tensor], dict[str, Address]]:
        """Of a rank that generates, and where the others find those that they write into: as the torch backend has
        them."""
        if self.domain is None:
            return {}, {}
        shapes = {name: _sizes(box) for name, box in self.domain.boxes.items()}
        transfers = plan(self.shards, self.domains, DTYPE.itemsize)
        names = from_neighbours(transfers, self.shards.node_of, self.domain.name)
        window = Window({name: shapes[name] for name in names}, DTYPE)
        own = {name: torch.empty(shape, dtype=DTYPE) for name, shape in shapes.items() if name not in names}
        return own | window.tensors, {self.domain.name: window.address(window.tensors)}

    def run(self, repetitions: int) -> Figures | None:
        """By turns, after one of each that is not counted."""
        sides: dict[str, Callable[[], None]] = {"ours": self.reshard, "bare": self.bare, "gather": self.gather}
        spent: dict[str, list[float]] = {name: [] for name in sides}
        for number in range(1 + repetitions):
            for name, do in sides.items():
                dist.barrier()
                took = seconds(lambda do=do: (do(), dist.barrier()))
                if number:
                    spent[name].append(took)
        said = self.job.everywhere((self.sync.traffic, self.sync.staging_bytes))
        return Figures(
            wire=sum(traffic.wire for traffic, _ in said),
            bound=self.lower_bound(),
            local=sum(traffic.local for traffic, _ in said),
            extra=max(staging for _, staging in said),
            two_buckets=self.two_buckets,
            **spent,
        )

    def reshard(self) -> None:
        targets = {self.domain.name: lambda _: self.targets} if self.domain else {}
        self.sync.run(self.sources, targets, _Nobody() if self.domain else None)

    def bare(self) -> None:
        operations = [dist.P2POp(dist.irecv, tensor, src) for src, tensor in self.incoming.items()]
        operations += [dist.P2POp(dist.isend, tensor, dst) for dst, tensor in self.outgoing.items()]
        for work in dist.batch_isend_irecv(operations) if operations else []:
            work.wait()

    def gather(self) -> None:
        """Every shard to every rank, parameter by parameter; a rank that generates then takes its part."""
        for name, whole in self.whole.items():
            holders: dict[Box, int] = {}
            for rank, boxes in self.shards.boxes.items():
                if name in boxes:
                    holders.setdefault(boxes[name], rank)
            everything = tuple((0, size) for size in self.shapes[name])
            for box, rank in holders.items():
                part = self.sources[name].to(DTYPE) if rank == self.job.rank else torch.empty(_sizes(box), dtype=DTYPE)
                dist.broadcast(part, rank)
                whole[within(box, everything)] = part
            if self.domain:
                self.targets[name].copy_(whole[within(self.domain.boxes[name], everything)])

    def lower_bound(self) -> int:
        """What a generating rank holds no part of itself has to come to it."""
        total = 0
        for domain in self.domains:
            held = self.shards.boxes.get(domain.readers[0], {})
            for name, box in domain.boxes.items():
                both = intersect(box, held[name]) if name in held else None
                total += volume(box) - (volume(both) if both else 0)
        return total * DTYPE.itemsize


class _Nobody:
    """Parameters that nobody else has to take in."""

    def begin_load(self) -> None: ...

    def take_bucket(self, number: int) -> None: ...

    def await_bucket(self) -> None: ...


def _sizes(box: Box) -> list[int]:
    return [high - low for low, high in box]


def measure_layout(model: Model, layout: Layout, bucket: int, repetitions: int) -> Figures | None:
    torch.set_num_threads(1)
    job = start_job(TIMEOUT, check_program=False)
    figures = Bench(model, layout, bucket, job).run(repetitions)
    job.close()
    return figures


def layouts_table(model: Model, bucket: int, repetitions: int) -> Table:
    size = sum(prod(shape) for shape in model.shapes().values()) * DTYPE.itemsize / MIB
    table = Table(
        f"Resharding {size:.0f} MiB from 2 x 2 x 2 on ranks 0 to 7, buckets of {bucket / MIB:g} MiB; MiB and seconds",
        ("to", "wire", "bound", "local", "extra", "limit", "ours", "bare", "ratio", f"<= {TARGET:g}", "gather", "gain"),
    )
    best = []
    for layout in LAYOUTS:
        f = on_ranks(WORLD, measure_layout, model, layout, bucket, repetitions, timeout=TIMEOUT)
        ours, bare, gather = (statistics.median(times) for times in (f.ours, f.bare, f.gather))
        best.append(min(f.ours) / min(f.bare))
        table.add(
            layout.name,
            *(f"{size / MIB:.1f}" for size in (f.wire, f.bound, f.local, f.extra, f.two_buckets)),
            figure(ours),
            figure(bare),
            f"{ours / bare:.2f}",
            "met" if ours / bare <= TARGET else "missed",
            figure(gather),
            f"{gather / ours:.1f}x",
        )
        if f.wire != f.bound:
            table.notes.append(f"WARNING: {layout.name} moves {f.wire - f.bound} bytes more than it has to.")
    table.notes.append(
        f"extra: the most that one rank keeps for messages; limit: two buckets. Times are medians of {repetitions}: "
        f"{WORLD} processes share the cores, and the best is the luck of one side. Ratios of the best: "
        f"{', '.join(f'{ratio:.2f}' for ratio in best)}."
    )
    return table


def vllm_table(folder: Path, repetitions: int, threads: int) -> Table:
    """From float32 tensors, as a trainer on one rank has them."""
    weights = {
        name: tensor.float()
        for file in sorted(folder.glob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }
    options = VllmOptions(model_path=str(folder), dtype="bfloat16", max_model_len=64, max_num_seqs=4, threads=threads)
    engine, memory = start_vllm(options, folder, "reshard")
    try:
        engine.wait_ready()
        names = [name for bucket in memory.buckets for name, _, _ in bucket]
        targets = {name: torch.empty_like(weights[name], dtype=DTYPE) for name in names}
        megabytes = sum(tensor.nbytes for tensor in targets.values()) / 1e6

        def copy() -> None:
            for name, target in targets.items():
                target.copy_(weights[name])

        copied = statistics.median([seconds(copy) for _ in range(1 + repetitions)][1:])
        loads = [load(engine, memory, weights, version) for version in range(1, 2 + repetitions)][1:]
    finally:
        engine.close()
    table = Table(
        f"Weight sync of vLLM on one node, {megabytes:.0f} MB, {threads} threads; seconds", ("part", "seconds")
    )
    median = {part: statistics.median([spent[part] for spent in loads]) for part in loads[0]}
    for part, spent in median.items():
        table.add(part, f"{spent:.3f}")
    table.add("a plain copy of the bytes, float32 to bfloat16", f"{copied:.3f}")
    table.add("ratio of all to the copy", f"{median['all'] / copied:.1f}x")
    return table


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parser(__doc__)
    arguments.add_argument("--bucket", type=at_least(1), default=16, help="MiB of a bucket of the layouts; default 16")
    arguments.add_argument("--threads", type=at_least(1), default=2, help="of the engine; default 2")
    given = arguments.parse_args(argv)
    repetitions = given.repetitions or (1 if given.quick else 15)
    folder = model_folder(given.model, given.quick)
    model = replace(Model(), layers=2, hidden=64, vocabulary=512) if given.quick else Model()
    with OtherPrograms() as others:
        table = layouts_table(model, (given.bucket * MIB) // (64 if given.quick else 1), repetitions)
    show(table, others)
    if probe("cpu").usable:
        with OtherPrograms() as others:
            table = vllm_table(folder, repetitions, given.threads)
        show(table, others)
    return 0


if __name__ == "__main__":
    sys.exit(main())
