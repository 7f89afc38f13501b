"""Training: this project's engine against a plain loop around the same Hugging Face model.

    python -m scripts.bench.training [--threads 2] [--model FOLDER]

Both take optimizer steps (forward, backward, clipping, AdamW) on PPO's clipped loss of the same packed rows, in one
process with the same threads. float32: all of it. bfloat16: the loop has float32 parameters under autocast, the engine
float32 parameters and bfloat16 computation. Tokens are those of prompts and responses, without padding. The engine has
the process keep the memory that it frees (verl/engine/host_memory.py); as the process is one, the loop gains by it too.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from scripts.bench.common import OtherPrograms, Table, at_least, by_turns, model_folder, parser, seconds, show
from verl.algo.losses import policy_loss
from verl.config import OptimConfig
from verl.engine.train_engine import EngineSpec, TrainEngine
from verl.flow.job import start_job
from verl.flow.placement import Groups, Placement, make_groups
from verl.flow.signs import Signs
from verl.model.heads import Head, TokenOutputs
from verl.model.load import read_config
from verl.model.packing import MicroBatch, Sequences, pack, plan_micro_batches

TARGET = 0.9
PROMPT_TOKENS, RESPONSE_TOKENS = (20, 60), (8, 64)
"""Shortest and longest."""
LEARNING_RATE = 1e-6
CLIP = 0.2


@dataclass(frozen=True)
class Work:
    """One optimizer step: sequences, and for each response token what PPO's loss needs."""

    sequences: Sequences
    old_logprobs: Tensor
    advantages: Tensor
    max_tokens: int
    """Of a micro-batch."""

    @classmethod
    def draw(cls, num_rows: int, vocab_size: int, max_tokens: int) -> Work:
        draws = torch.Generator().manual_seed(1)

        def ids(bounds: tuple[int, int]) -> Tensor:
            length = int(torch.randint(bounds[0], bounds[1] + 1, (), generator=draws))
            return torch.randint(vocab_size, (length,), generator=draws)

        pairs = [(ids(PROMPT_TOKENS), ids(RESPONSE_TOKENS)) for _ in range(num_rows)]
        sequences = Sequences.responses([prompt for prompt, _ in pairs], [response for _, response in pairs])
        normal = torch.randn(2, sequences.num_outputs, generator=draws)
        return cls(sequences, normal[0] - 10, normal[1], max_tokens)

    @property
    def rows(self) -> range:
        return range(len(self.sequences.ids))

    @property
    def num_tokens(self) -> int:
        return sum(self.sequences.lengths)

    def micro_batches(self) -> list[MicroBatch]:
        """Those that the engine makes on a CPU."""
        plan = plan_micro_batches(self.sequences.lengths, self.rows, self.max_tokens, None)
        return [pack(self.sequences, rows) for rows in plan]

    def loss(self, logprobs: Tensor, at: Tensor) -> Tensor:
        """A micro-batch's share of the mean over all response tokens; `at`: where its tokens stand."""
        losses = policy_loss(logprobs, self.old_logprobs[at], self.advantages[at], CLIP, CLIP).loss
        return losses.sum() / self.sequences.num_outputs


def engine_step(folder: Path, dtype: torch.dtype, work: Work, groups: Groups) -> Callable[[], float]:
    """One step of the engine; gives the gradient's norm."""
    spec = EngineSpec(folder, Head.lm, trained=True, dtype=dtype, seed=0, max_tokens_per_micro_batch=work.max_tokens)
    engine = TrainEngine(spec, groups, torch.device("cpu"), Signs(rank=0))
    engine.add_optimizer(OptimConfig(lr=LEARNING_RATE), total_steps=1_000_000)

    def loss(outputs: TokenOutputs, at: Tensor) -> Tensor:
        return work.loss(outputs.values, at)

    return lambda: engine.train_step(work.sequences, work.rows, loss)[0]


def plain_step(folder: Path, dtype: torch.dtype, work: Work) -> Callable[[], float]:
    """One step of the loop that one would write with transformers and torch alone; gives the gradient's norm."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0, fused=True)
    batches = work.micro_batches()

    def step() -> float:
        for batch in batches:
            with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
                logits = model(input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False).logits
            chosen = logits.flatten(0, 1)[batch.select].float()
            logprobs = chosen.log_softmax(-1).gather(-1, batch.targets[:, None]).squeeze(-1)
            work.loss(logprobs, batch.tokens).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), OptimConfig().clip_grad)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return norm.item()

    return step


def compare(table: Table, folder: Path, dtype: torch.dtype, work: Work, groups: Groups, repetitions: int) -> None:
    engine, plain = engine_step(folder, dtype, work, groups), plain_step(folder, dtype, work)
    first = engine(), plain()  # of the same parameters
    sides = {"engine": lambda: seconds(engine), "plain": lambda: seconds(plain)}
    times = by_turns(sides, repetitions)
    name = str(dtype).removeprefix("torch.")
    ours, theirs = ([work.num_tokens / t for t in times[side]] for side in ("engine", "plain"))
    table.compare(name, ours, theirs, TARGET)
    spread = max(max(side) / statistics.median(side) - 1 for side in times.values())
    table.notes.append(f"{name}: gradient norms {first[0]:.3g} and {first[1]:.3g}; slowest step +{spread:.0%}")


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parser(__doc__)
    arguments.add_argument("--threads", type=at_least(1), default=2, help="of the process; default 2")
    arguments.add_argument("--rows", type=at_least(1), default=32, help="sequences of an optimizer step; default 32")
    arguments.add_argument("--max-tokens", type=at_least(1), default=4096, help="of a micro-batch; default 4096")
    arguments.add_argument("--dtype", action="append", choices=("bfloat16", "float32"), help="repeatable; both")
    given = arguments.parse_args(argv)
    folder = model_folder(given.model, given.quick)
    torch.set_num_threads(given.threads)
    repetitions = given.repetitions or (1 if given.quick else 5)
    vocab_size = read_config(folder, trust_remote_code=False).get_text_config().vocab_size
    work = Work.draw(4 if given.quick else given.rows, vocab_size, given.max_tokens)
    job = start_job(stage_timeout=600.0, check_program=False)
    groups = make_groups([Placement("actor", (0,))], job.rank, "cpu", job.timeout)["actor"]
    table = Table(
        f"Training: {work.num_tokens} tokens a step, {given.threads} threads, tokens/s",
        ("precision", "engine", "plain loop", "ratio", "target"),
    )
    with OtherPrograms() as others:
        for name in given.dtype or ("bfloat16", "float32"):
            dtype = {"bfloat16": torch.bfloat16, "float32": torch.float32}[name]
            compare(table, folder, dtype, work, groups, repetitions)
    job.close()
    show(table, others)
    return 0


if __name__ == "__main__":
    sys.exit(main())
