"""Memory: what each role's tensors take on each mesh, against what `verl mesh check` reckons.

    python -m scripts.bench.memory [--model FOLDER] [--mesh NAME]

Every role of a mesh does its work on real ranks of this machine, in bfloat16: the actor and the critic take optimizer
steps, the reference computes log-probs. Meanwhile each storage that a tensor has is counted from when it is made until
it is freed; the process's resident memory, which has its libraries in it, is not looked at. Parameters and the
optimizer's state are what stays. Gradients are what there is of them between micro-batches and before the optimizer's
step, activations what autograd keeps for the backward pass, both when it is most. The peak is of all that there is at a
time: with gathered parameters, logits and whatever else is on its way. In brackets stands how far the estimate is from
what is measured. A term counts where it is a twentieth of the peak or more.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from scripts.bench.common import OUT, OtherPrograms, Table, model_folder, parser, show
from scripts.bench.ranks import on_ranks
from scripts.bench.storages import Kind, Storages, known_of
from scripts.make_tiny_model import make_tiny_model
from verl.advise import memory
from verl.advise.budget import TRAINED, longest, tokens_of
from verl.advise.job import Job as PlannedJob
from verl.advise.job import imagine, nodes_of
from verl.advise.model import ModelShape, find_config, shape_of
from verl.algo.losses import policy_loss
from verl.config import ActorConfig, CriticConfig, DataConfig, ModelConfig, OptimConfig, PPOConfig, ReferenceConfig
from verl.engine.train_engine import EngineSpec, TrainEngine
from verl.flow.job import start_job
from verl.flow.placement import Groups, make_groups
from verl.flow.signs import Signs
from verl.mesh.parse import parse
from verl.model.heads import Head, TokenOutputs
from verl.model.packing import Sequences

TARGET = 0.15
"""How far an estimate may be from what is measured."""
MATTERS = 0.05
"""Of the peak: a smaller term does not."""
HEADS = {"actor": Head.lm, "critic": Head.token_value, "reference": Head.lm}
TERMS = ("parameters", "gradients", "optimizer", "activations", "peak")
DTYPE = torch.bfloat16
MIB = 2**20
TIMEOUT = 600.0


@dataclass(frozen=True)
class Case:
    """A mesh on which every role is on all ranks, split alike."""

    name: str
    dp: int = 1
    tp: int = 1
    pp: int = 1
    checkpointing: bool = False
    micro_batches: int = 2
    """Of an optimizer step, on each rank."""
    architecture: str = "llama"
    attention: str = "auto"

    @property
    def world(self) -> int:
        return self.dp * self.tp * self.pp

    @property
    def mesh(self) -> str:
        split = f"{{tensor_parallel_size: {self.tp}, pipeline_parallel_size: {self.pp}}}"
        hybrid = f"{{activation_checkpointing: {str(self.checkpointing).lower()}}}"
        role = f"{{devices: [0-{self.world - 1}], parallelism: {split}, hybrid_engine: {hybrid}}}"
        return f"actor: {role}\ncritic: {role}\nrollout: {{devices: [0], backend: torch}}\n"


CASES = [
    Case("1 rank"),
    Case("FSDP 2", dp=2),
    Case("TP 2", tp=2),
    Case("PP 2", pp=2, micro_batches=4),
    Case("FSDP 2 x TP 2", dp=2, tp=2),
    Case("PP 2 x FSDP 2", dp=2, pp=2, micro_batches=4),
    Case("FSDP 2, one micro-batch", dp=2, micro_batches=1),
    Case("FSDP 2, checkpointing", dp=2, checkpointing=True),
    Case("PP 2 x FSDP 2, checkpointing", dp=2, pp=2, checkpointing=True, micro_batches=4),
    Case("FSDP 2, Gemma 2", dp=2, architecture="gemma2", attention="eager"),
]


@dataclass(frozen=True)
class Size:
    """Of the models that are made for it, and of the work."""

    hidden_size: int
    num_layers: int
    vocab_size: int
    rows: int = 12
    """Of a micro-batch."""
    prompt: int = 16
    response: int = 48
    """Tokens, of every row."""
    chunk: int = 128
    """Tokens whose logits are there at once."""

    @property
    def tokens(self) -> int:
        """Of a micro-batch."""
        return self.rows * (self.prompt + self.response)


FULL = Size(hidden_size=256, num_layers=6, vocab_size=4096)
QUICK = Size(hidden_size=128, num_layers=4, vocab_size=512, rows=4)


@dataclass(frozen=True)
class Figures:
    """Of one role on one rank, bytes by term."""

    stage: int
    measured: Mapping[str, int]
    estimated: Mapping[str, int]

    def missed(self) -> list[str]:
        """Terms that are large enough to matter and further off than `TARGET`."""
        enough = MATTERS * self.measured["peak"]
        return [
            term
            for term, size in self.measured.items()
            if size >= enough and abs(self.estimated[term] / size - 1) > TARGET
        ]


def settings(case: Case, size: Size) -> PPOConfig:
    """A step of one mini-batch. Its rows have all the same length, so that micro-batches are as full as can be."""
    prompts = case.dp * case.micro_batches * size.rows
    return PPOConfig(
        model=ModelConfig(
            attn_implementation=case.attention,
            reshard_after_forward=case.pp == 1,  # as on a GPU
            logprob_chunk_tokens=size.chunk,
        ),
        data=DataConfig(train_batch_size=prompts, max_prompt_length=size.prompt, max_response_length=size.response),
        actor=ActorConfig(ppo_mini_batch_size=prompts, max_tokens_per_micro_batch=size.tokens),
        critic=CriticConfig(max_tokens_per_micro_batch=size.tokens),
        reference=ReferenceConfig(max_tokens_per_micro_batch=size.tokens),
    )


def estimate(job: PlannedJob, role: str, stage: int, model: ModelShape, config: PPOConfig) -> dict[str, int]:
    spec, dp = job.spec(role), job.placements[role].dp
    split, tokens = model.split(spec, dp), tokens_of(role, config, dp)
    reshards = config.model.reshard_after_forward
    assert reshards is not None
    if role not in TRAINED:
        need = memory.frozen(model, split, stage, DTYPE.itemsize, tokens, spec, reshards)
        return {"parameters": need.term("parameters"), "peak": need.total}
    need = memory.trained(model, split, stage, DTYPE.itemsize, tokens, spec, reshards)
    found = {term: max(moment.get(term, 0) for moment in need.moments) for term in ("gradients", "activations")}
    if stage > 0:  # what is seen of gradients are those of states, too, on their way to the stage before
        found["gradients"] += need.term("messages")
    return {**need.stays, **found, "peak": need.total}


def measure_case(case: Case, folder: Path, size: Size) -> dict[str, list[Figures]]:
    """By role, what each rank has seen; on every rank."""
    torch.set_num_threads(1)
    job, config = start_job(TIMEOUT, check_program=False), settings(case, size)
    mesh = parse(case.mesh, "mesh.yaml")
    planned = imagine(mesh, nodes_of(mesh), config)
    roles = {role: planned.placements[role] for role in HEADS}
    groups = make_groups(list(roles.values()), job.rank, "cpu", job.timeout)
    mine: dict[str, Figures] = {}
    for role, place in roles.items():
        model = shape_of(find_config(str(folder)), str(folder), HEADS[role])
        stage = place.coordinate(job.rank).pp
        measured = _Role(role, case, config, folder, groups[role], job.board).measure(size)
        mine[role] = Figures(stage, measured, estimate(planned, role, stage, model, config))
        gc.collect()
    said = job.everywhere(mine)
    job.close()
    return {role: [figures[role] for figures in said] for role in roles}


class _Role:
    """A role's engine at its work on this rank."""

    def __init__(self, role: str, case: Case, config: PPOConfig, folder: Path, groups: Groups, signs: Signs) -> None:
        self.trained, self.head = role in TRAINED, HEADS[role]
        spec = EngineSpec(
            folder,
            self.head,
            self.trained,
            DTYPE,
            seed=0,
            max_tokens_per_micro_batch=config.actor.max_tokens_per_micro_batch,
            attn_implementation=config.model.attn_implementation,
            logprob_chunk_tokens=config.model.logprob_chunk_tokens,
            reshard_after_forward=config.model.reshard_after_forward,
            activation_checkpointing=case.checkpointing,
        )
        self.engine = TrainEngine(spec, groups, torch.device("cpu"), signs)
        if self.trained:
            self.engine.add_optimizer(OptimConfig(lr=1e-6), total_steps=10)
        self.num_rows = case.micro_batches * max(1, config.actor.max_tokens_per_micro_batch // longest(config))

    def measure(self, size: Size) -> dict[str, int]:
        draws = torch.Generator().manual_seed(0)
        ids = torch.randint(3, 200, (self.num_rows, size.prompt + size.response), generator=draws)
        sequences = Sequences.responses(list(ids[:, : size.prompt]), list(ids[:, size.prompt :]))
        self._work(sequences)
        optimizer = self.engine.optimizer.adamw if self.engine.optimizer is not None else None
        known = known_of(self.engine.model, optimizer)
        with Storages(known) as storages:
            self._work(sequences)
        most, peak = storages.most, sum(storages.peak.values())
        stays = {"parameters": most[Kind.parameters]}
        if not self.trained:
            return stays | {"peak": peak}
        return stays | {
            "gradients": most[Kind.backward],
            "optimizer": most[Kind.optimizer],
            "activations": most[Kind.activations],
            "peak": peak,
        }

    def _work(self, sequences: Sequences) -> None:
        if self.trained:
            self.engine.train_step(sequences, range(self.num_rows), self._loss)
        else:
            self.engine.forward(sequences)

    def _loss(self, outputs: TokenOutputs, at: Tensor) -> Tensor:
        if self.head is Head.lm:
            same = outputs.values.detach()
            return policy_loss(outputs.values, same, torch.ones_like(same), 0.2, 0.2).loss.sum()
        return (outputs.values - 1.0).square().sum()


def add_rows(table: Table, case: Case, roles: Mapping[str, Sequence[Figures]]) -> None:
    """One row a role and stage: that of the rank that has most."""
    for role, ranks in roles.items():
        for stage in range(case.pp):
            most = max((r for r in ranks if r.stage == stage), key=lambda figures: figures.measured["peak"])
            cells = []
            for term in TERMS:
                size = most.measured.get(term)
                cells.append("" if size is None else f"{size / MIB:.1f} ({most.estimated[term] / size - 1:+.0%})")
            missed = most.missed()
            name = f"{case.name}: {role}" + (f", stage {stage}" if case.pp > 1 else "")
            table.add(name, *cells, "met" if not missed else "missed: " + ", ".join(missed))


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parser(__doc__)
    arguments.add_argument("--mesh", action="append", choices=[case.name for case in CASES], help="repeatable; all")
    given = arguments.parse_args(argv)
    size = QUICK if given.quick else FULL
    table = Table(
        f"Memory of a rank's tensors, {DTYPE}, micro-batches of {size.tokens} tokens; MiB measured (and the estimate)",
        ("mesh: role", *TERMS, f"within {TARGET:.0%}"),
    )
    with OtherPrograms() as others:
        for case in CASES:
            if given.mesh and case.name not in given.mesh:
                continue
            folder = make_model(case, size) if given.model is None else model_folder(given.model, given.quick)
            add_rows(table, case, on_ranks(case.world, measure_case, case, folder, size, timeout=TIMEOUT))
    show(table, others)
    return 0


def make_model(case: Case, size: Size) -> Path:
    """Large enough for terms to be told apart, small enough to be quick."""
    return make_tiny_model(
        OUT / f"memory_{case.architecture}",
        case.architecture,
        num_layers=size.num_layers,
        hidden_size=size.hidden_size,
        vocab_size=size.vocab_size,
    )


if __name__ == "__main__":
    sys.exit(main())
