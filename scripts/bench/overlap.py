"""Placements: roles on ranks of their own against all roles on all ranks, and against the critical path of the stages.

    python -m scripts.bench.overlap [--ranks 2] [--model FOLDER]

The same steps (prompts, response lengths, models) in both placements, in runs that take turns; a run's first step is
left out. With two ranks, actor and rollout have one and critic and reference the other; with four, each role has one.
The critical path is computed from the run's own timeline: how long its steps would have taken if each stage had begun
the moment that its rank and what it reads were ready.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scripts.bench.common import OUT, OtherPrograms, Table, at_least, by_turns, model_folder, parser, show
from scripts.bench.critical_path import critical_path
from scripts.bench.runs import Messages, launch, longest, metrics, step_seconds, write_prompts
from verl.monitor.timeline import read_timeline

BATCH = 16
RESPONSE_TOKENS = 64
GIB_NEEDED = {2: 10, 4: 20}
"""By number of ranks, with the demo's model."""
ROLES = ("actor", "critic", "reference", "rollout")
DISJOINT = {
    2: {"actor": [0], "rollout": [0], "critic": [1], "reference": [1]},
    4: {"actor": [0], "critic": [1], "reference": [2], "rollout": [3]},
}


def mesh_of(devices: Mapping[str, list[int]], backend: str) -> dict[str, dict[str, Any]]:
    mesh: dict[str, dict[str, Any]] = {role: {"devices": list(devices[role])} for role in ROLES}
    mesh["rollout"] |= {"backend": backend, "max_num_seqs": BATCH}
    return mesh


def colocated(num_ranks: int) -> dict[str, list[int]]:
    return {role: list(range(num_ranks)) for role in ROLES}


def questions(number: int) -> Iterator[Messages]:
    for index in range(number):
        yield [{"role": "user", "content": f"What is {index % 9 + 1} + {index % 7 + 1}? Answer with only the number."}]


@dataclass
class Runs:
    """A measurement is a run, and its result the median of its steps' seconds."""

    settings: Mapping[str, Any]
    backend: str
    num_ranks: int
    paths: list[float] = field(default_factory=list)
    """Critical paths of the disjoint runs' steps."""
    shares: list[float] = field(default_factory=list)
    """Of each of those steps, the critical path over what it took."""

    def colocated(self) -> float:
        mesh = mesh_of(colocated(self.num_ranks), self.backend)
        run_dir = launch(OUT / f"colocated_{self.num_ranks}", mesh, self.num_ranks, self.settings)
        return statistics.median(step_seconds(metrics(run_dir)))

    def disjoint(self) -> float:
        mesh = mesh_of(DISJOINT[self.num_ranks], self.backend)
        run_dir = launch(OUT / f"disjoint_{self.num_ranks}", mesh, self.num_ranks, self.settings)
        lines = metrics(run_dir)
        times = step_seconds(lines)
        for line, seconds in zip(lines[1:], times, strict=True):
            path = critical_path(read_timeline(run_dir, line["step"]))
            self.paths.append(path)
            self.shares.append(path / seconds)
        return statistics.median(times)


def measure(table: Table, runs: Runs, repetitions: int) -> None:
    times = by_turns({"colocated": runs.colocated, "disjoint": runs.disjoint}, repetitions, warm_up=0)
    together, apart = (statistics.median(times[name]) for name in ("colocated", "disjoint"))
    path, share = statistics.median(runs.paths), statistics.median(runs.shares)
    table.add(
        f"{runs.num_ranks}", f"{together:.2f}", f"{apart:.2f}", f"{together / apart:.2f}", f"{path:.2f}", f"{share:.2f}"
    )


def make_settings(model: Path, num_steps: int, response_tokens: int) -> dict[str, Any]:
    prompts = list(questions(BATCH))
    return {
        "model.path": str(model),
        "data.train_files": [str(write_prompts(OUT / "overlap.jsonl", prompts))],
        "data.train_batch_size": BATCH,
        "data.max_prompt_length": longest(model, prompts),
        "data.max_response_length": response_tokens,
        "actor.ppo_mini_batch_size": BATCH,
        "rollout.ignore_eos": True,
        "reward.function.path": "last_number",
        "trainer.total_training_steps": num_steps,
        "debug.timeline": True,
    }


def available_gib() -> float:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable")) / 2**20


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parser(__doc__)
    arguments.add_argument(
        "--ranks", type=int, action="append", choices=sorted(DISJOINT), help="repeatable; 2, and 4 if memory allows"
    )
    arguments.add_argument("--steps", type=at_least(2), help="of a run, the first of which does not count; default 5")
    arguments.add_argument("--backend", choices=("auto", "vllm", "torch"), help="default auto; torch if --quick")
    given = arguments.parse_args(argv)
    repetitions = given.repetitions or (1 if given.quick else 2)
    num_steps = given.steps or (2 if given.quick else 5)
    model = model_folder(given.model, given.quick)
    response_tokens = 8 if given.quick else RESPONSE_TOKENS
    settings = make_settings(model, num_steps, response_tokens)
    table = Table(
        f"Placements: seconds a step of {BATCH} samples of {response_tokens} tokens",
        ("ranks", "colocated", "disjoint", "gain", "critical path", "path / disjoint"),
    )
    backend = given.backend or ("torch" if given.quick else "auto")
    with OtherPrograms() as others:
        for num_ranks in given.ranks or ((2,) if given.quick else sorted(DISJOINT)):
            if given.ranks is None and available_gib() < GIB_NEEDED[num_ranks]:
                table.notes.append(
                    f"{num_ranks} ranks left out: they want {GIB_NEEDED[num_ranks]} GiB, {available_gib():.0f} are free"
                )
                continue
            measure(table, Runs(settings, backend, num_ranks), repetitions)
    show(table, others)
    return 0


if __name__ == "__main__":
    sys.exit(main())
