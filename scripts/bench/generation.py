"""Generation: this project's rollout against vllm.LLM by itself, at the same settings.

    python -m scripts.bench.generation [--threads 2] [--requests 64] [--model FOLDER]

Ours is the backend as the rollout uses it: vLLM in a child process, weights read from shared memory, samples sent back
as they finish. The other is `LLM.generate` in a process of its own that loaded the model's folder. Both have the same
arguments, environment, threads, requests, seeds and log-probs of the sampled tokens; all responses are equally long.
As information: vLLM without log-probs, the torch backend, and how long new weights take to load.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from scripts.bench.common import (
    OUT,
    OtherPrograms,
    Table,
    at_least,
    by_turns,
    figure,
    model_folder,
    parser,
    seconds,
    show,
)
from scripts.bench.engines import load, start_vllm
from verl.generation.inprocess.engine import TorchEngine
from verl.generation.types import Backend, Request, Sampling
from verl.generation.vllm.environment import child_environment
from verl.generation.vllm.options import VllmOptions, llm_arguments
from verl.model.load import read_config

TARGET = 0.9
PROMPT_TOKENS = (20, 60)
"""Shortest and longest."""


@dataclass(frozen=True)
class Work:
    requests: list[Request]
    sampling: Sampling

    @classmethod
    def draw(cls, num_requests: int, response_tokens: int, vocab_size: int) -> Work:
        """Random prompts; responses go on to `response_tokens` whatever is sampled."""
        draws = torch.Generator().manual_seed(1)
        lengths = torch.randint(PROMPT_TOKENS[0], PROMPT_TOKENS[1] + 1, (num_requests,), generator=draws).tolist()
        prompts = [tuple(torch.randint(vocab_size, (length,), generator=draws).tolist()) for length in lengths]
        requests = [Request(row, ids, seed=1000 + row) for row, ids in enumerate(prompts)]
        return cls(requests, Sampling(1.0, 1.0, 0, response_tokens, stop_token_ids=(), ignore_eos=True))

    @property
    def num_tokens(self) -> int:
        return len(self.requests) * self.sampling.max_tokens

    def rate(self, backend: Backend) -> float:
        """Tokens per second of one call, until the last sample is there."""
        return self.num_tokens / seconds(lambda: list(backend.generate(self.requests, self.sampling)))


class BareVllm:
    """bare_vllm.py, and what is said to it."""

    def __init__(self, options: VllmOptions, log_path: Path) -> None:
        ours = llm_arguments(options)
        arguments = {name: value for name, value in ours.items() if name not in ("worker_extension_cls", "load_format")}
        answers, theirs = os.pipe()
        with log_path.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, Path(__file__).with_name("bare_vllm.py")],
                env=child_environment(os.environ, options),
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs],
                text=True,
            )
        os.close(theirs)
        self._answers, self._log_path = os.fdopen(answers), log_path
        self._ask({"answers": theirs, "arguments": arguments})

    def rate(self, work: Work, logprobs: int | None) -> float:
        sampling = {"max_tokens": work.sampling.max_tokens, "temperature": work.sampling.temperature}
        sampling |= {"ignore_eos": True, "logprobs": logprobs, "detokenize": False}
        answer = self._ask(
            {
                "prompts": [request.prompt_ids for request in work.requests],
                "seeds": [request.seed for request in work.requests],
                "sampling": sampling,
            }
        )
        assert answer["tokens"] == work.num_tokens, answer
        return answer["tokens"] / answer["seconds"]

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)

    def _ask(self, question: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        answer = self._answers.readline()
        if not answer:
            raise SystemExit(f"error: vLLM by itself ended with status {self._process.wait()}: see {self._log_path}")
        return json.loads(answer)


def load_torch(backend: TorchEngine, weights: dict[str, Tensor], version: int) -> None:
    """New weights, as the rollout gets them: copied into the parameters."""
    backend.begin_load()
    for name, destination in backend.weights().items():
        destination.copy_(weights[name])
    backend.commit(version)


def measure_vllm(
    table: Table, mode: str, folder: Path, weights: dict[str, Tensor], work: Work, threads: int, repetitions: int
) -> None:
    """Rows for vLLM run eagerly or compiled. Both engines are up at once; the one that is not asked sleeps."""
    options = VllmOptions(
        model_path=str(folder),
        dtype="bfloat16",
        max_model_len=PROMPT_TOKENS[1] + work.sampling.max_tokens,
        max_num_seqs=len(work.requests),
        engine_kwargs={"enforce_eager": mode == "eager"},
        threads=threads,
    )
    with ExitStack() as closing:
        engine, memory = start_vllm(options, folder, mode)
        closing.callback(engine.close)
        engine.wait_ready()
        bare = BareVllm(options, OUT / f"bare_vllm_{mode}.log")
        closing.callback(bare.close)
        loads = [load(engine, memory, weights, version)["all"] for version in range(1 + repetitions)]
        rates = by_turns(
            {
                "ours": lambda: work.rate(engine),
                "bare": lambda: bare.rate(work, logprobs=0),
                "without": lambda: bare.rate(work, logprobs=None),
            },
            repetitions,
        )
    table.compare(f"vLLM, {mode}", rates["ours"], rates["bare"], TARGET)
    without = statistics.median(rates["without"])
    table.add(f"vLLM, {mode}, no log-probs", "", figure(without), "", "")
    megabytes = sum(weight.numel() for weight in weights.values()) * torch.bfloat16.itemsize / 1e6
    table.notes.append(f"vLLM, {mode}: new weights ({megabytes:.0f} MB) in {statistics.median(loads[1:]):.2f} s")


def measure_torch(
    table: Table, folder: Path, weights: dict[str, Tensor], work: Work, threads: int, repetitions: int
) -> None:
    torch.set_num_threads(threads)
    device = torch.device("cpu")
    backend = TorchEngine(str(folder), torch.bfloat16, device, len(work.requests), False, on_progress=lambda: None)
    loads = [
        seconds(lambda version=version: load_torch(backend, weights, version)) for version in range(1 + repetitions)
    ]
    rates = by_turns({"ours": lambda: work.rate(backend)}, repetitions)
    table.add("torch backend", figure(statistics.median(rates["ours"])), "", "", "")
    table.notes.append(f"torch backend: new weights in {statistics.median(loads[1:]):.2f} s")


def read_weights(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parser(__doc__)
    arguments.add_argument("--threads", type=at_least(1), default=2, help="of each engine; default 2")
    arguments.add_argument("--requests", type=at_least(1), default=64, help="generated at once; default 64")
    arguments.add_argument("--tokens", type=at_least(1), default=64, help="of each response; default 64")
    arguments.add_argument(
        "--mode", action="append", choices=("eager", "compiled", "torch"), help="repeatable; all (--quick: eager)"
    )
    given = arguments.parse_args(argv)
    modes = given.mode or (["eager", "torch"] if given.quick else ["eager", "compiled", "torch"])
    repetitions = given.repetitions or (1 if given.quick else 3)
    folder = model_folder(given.model, given.quick)
    vocab_size = read_config(folder, trust_remote_code=False).get_text_config().vocab_size
    work = Work.draw(4, 8, vocab_size) if given.quick else Work.draw(given.requests, given.tokens, vocab_size)
    OUT.mkdir(parents=True, exist_ok=True)
    weights = read_weights(folder)
    table = Table(
        f"Generation: {len(work.requests)} requests of {work.sampling.max_tokens} tokens, {given.threads} threads, "
        "bfloat16, tokens/s",
        ("engine", "ours", "vLLM by itself", "ratio", "target"),
    )
    measures: dict[str, Callable[[], None]] = {
        "eager": lambda: measure_vllm(table, "eager", folder, weights, work, given.threads, repetitions),
        "compiled": lambda: measure_vllm(table, "compiled", folder, weights, work, given.threads, repetitions),
        "torch": lambda: measure_torch(table, folder, weights, work, given.threads, repetitions),
    }
    with OtherPrograms() as others:
        for mode in modes:
            measures[mode]()
    show(table, others)
    return 0


if __name__ == "__main__":
    sys.exit(main())
