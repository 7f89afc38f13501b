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
from verl.advise.budget import TRAINED, longest, trainer
from verl.advise.job import imagine, nodes_of
from verl.advise.memory import Need
from verl.advise.model import find_config, shape_of
from verl.algo.losses import policy_loss
from verl.config import (
    ActorConfig,
    CriticConfig,
    DataConfig,
    LoraConfig,
    ModelConfig,
    OptimConfig,
    PPOConfig,
    ReferenceConfig,
    TrainerConfig,
)
from verl.engine.copies import Copies
from verl.engine.shards import engine_tensors
from verl.engine.train_engine import EngineSpec, TrainEngine
from verl.flow.job import start_job
from verl.flow.placement import Groups, make_groups
from verl.flow.signs import Signs
from verl.mesh.parse import parse
from verl.model import attention
from verl.model.heads import Head, TokenOutputs
from verl.model.packing import Sequences

TARGET = 0.15
"""How far an estimate may be from what is measured."""
MATTERS = 0.05
"""Of the peak: a smaller term does not."""
HEADS = {"actor": Head.lm, "critic": Head.token_value, "reference": Head.lm}
COPY = "checkpoint copy"
"""In the node's memory, while checkpoints are written in the background (trainer.async_save)."""
TERMS = ("parameters", "gradients", "optimizer", "activations", "peak", COPY)
DTYPE = torch.bfloat16
MIB = 2**20
SHORT = attention.SHORT
TIMEOUT = 600.0


@dataclass(frozen=True)
class Case:
    """A mesh on which every role is on all ranks, split alike."""

    name: str
    dp: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    checkpointing: bool = False
    micro_batches: int = 2
    """Of an optimizer step, on each rank."""
    architecture: str = "llama"
    attention: str = "auto"
    lora_rank: int = 0
    """0: the whole model is trained."""

    @property
    def world(self) -> int:
        return self.dp * self.tp * self.pp * self.cp

    @property
    def mesh(self) -> str:
        degrees = {"tensor": self.tp, "pipeline": self.pp, "context": self.cp}
        split = ", ".join(f"{kind}_parallel_size: {size}" for kind, size in degrees.items())
        hybrid = f"{{activation_checkpointing: {str(self.checkpointing).lower()}}}"
        role = f"{{devices: [0-{self.world - 1}], parallelism: {{{split}}}, hybrid_engine: {hybrid}}}"
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
    Case("CP 2", cp=2),
    Case("CP 2 x TP 2", tp=2, cp=2),
    Case("FSDP 2 x CP 2, checkpointing", dp=2, cp=2, checkpointing=True),
    Case("LoRA", lora_rank=16),
    Case("FSDP 2, LoRA", dp=2, lora_rank=16),
    Case("TP 2, LoRA", tp=2, lora_rank=16),
    Case("PP 2 x FSDP 2, LoRA, checkpointing", dp=2, pp=2, checkpointing=True, micro_batches=4, lora_rank=16),
    Case("FSDP 2, Qwen3-MoE", dp=2, architecture="qwen3_moe"),
    Case("FSDP 2, Qwen3-MoE, checkpointing", dp=2, checkpointing=True, architecture="qwen3_moe"),
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
    prompts, lora = case.dp * case.micro_batches * size.rows, LoraConfig(rank=case.lora_rank)
    return PPOConfig(
        model=ModelConfig(
            attn_implementation=case.attention,
            reshard_after_forward=case.pp == 1,  # as on a GPU
            logprob_chunk_tokens=size.chunk,
        ),
        data=DataConfig(train_batch_size=prompts, max_prompt_length=size.prompt, max_response_length=size.response),
        actor=ActorConfig(ppo_mini_batch_size=prompts, max_tokens_per_micro_batch=size.tokens, lora=lora),
        critic=CriticConfig(max_tokens_per_micro_batch=size.tokens, lora=lora),
        reference=ReferenceConfig(max_tokens_per_micro_batch=size.tokens),
        trainer=TrainerConfig(async_save=True),
    )


def terms(need: Need, role: str, case: Case, stage: int) -> dict[str, int]:
    """What is looked at of an estimate."""
    if role not in TRAINED:
        return {"parameters": need.term("parameters"), "peak": need.total}
    found = {term: max(moment.get(term, 0) for moment in need.moments) for term in ("gradients", "activations")}
    if stage > 0:  # those of states are seen, too, on their way to the stage before, and of one that is just made
        found["gradients"] += need.term("messages") * (case.pp + 1) // case.pp
    return {**need.stays, **found, "peak": need.total, COPY: need.on_host[COPY]}


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
        # what comes nearest to flash attention, which never has all scores: SDPA forward, and not SDPA backward
        attention.SHORT = SHORT if role in TRAINED else 0
        stage = place.coordinate(job.rank).pp
        measured = _Role(role, case, config, folder, groups[role], job.board).measure(size)
        mine[role] = Figures(stage, measured, terms(trainer(planned, role, stage, model, config), role, case, stage))
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
            lora=LoraConfig(rank=case.lora_rank) if self.trained and case.lora_rank else None,
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
            COPY: sum(tensor.nbytes for tensor in Copies().take(engine_tensors(self.engine)).values()),
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
