"""A whole PPO step: this project on two processes against TRL's PPOTrainer at its best setting.

    python -m scripts.bench.ppo_step [--model FOLDER] [--trl-venv FOLDER]

Both sides train policy and value model (float32 parameters, bfloat16 computation) with a reference and a reward model,
four copies of one backbone, on the same prompts: one epoch, one mini-batch, temperature 1, KL penalty 0.05. Both take
old log-probs from what generated, as TRL always does; with --recompute ours takes them from the actor. TRL runs as one
process with two threads, at which it is faster on two cores than as two processes; it gets an environment of its
own in .venv-trl/, of the last version that has a PPO trainer. Runs of the two sides take turns, and a run's first step
is left out.

fixed: 16 prompts of about 45 tokens, 64 tokens each, whatever is sampled.
ragged: 16 prompts of 20 to 120 tokens, up to 128 tokens each, which a full stop ends (after 20 to 24).
"""

from __future__ import annotations

import json
import random
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

from scripts.bench.common import OUT, ROOT, OtherPrograms, Table, at_least, by_turns, model_folder, parser, show
from scripts.bench.runs import Messages, launch, longest, metrics, run_command, step_seconds, write_prompts
from verl.monitor.jsonl import read_jsonl
from verl.monitor.names import RESPONSE_LENGTH

BATCH = 16
LEARNING_RATE = 1e-6
KL = 0.05
TRL_PACKAGES = ("torch==2.13.0", "trl==1.12.0", "transformers==5.19.0", "accelerate", "datasets")
"""trl 1.13 and later have no PPO trainer."""
MESH = {
    "actor": {"devices": [0]},
    "reward": {"devices": [0]},
    "critic": {"devices": [1]},
    "reference": {"devices": [0, 1], "parallelism": {"fsdp_size": 1}},
    "rollout": {"devices": [0], "backend": "auto", "max_num_seqs": BATCH},
}
"""On each rank a forward, half of the reference's and an update, no gradient between them, and both cores for the
engine while they wait."""
RECOMPUTES = {"reference": {"devices": [1]}}
"""Where the first rank has the actor's forward to do, too."""

FACTS = (
    "Water boils at 100 degrees at sea level.", "Paris is the capital of France.", "Honey bees live with one queen.",
    "The moon goes around the earth in a month.", "Gold is heavier than silver.", "The Nile flows into the sea.",
    "Penguins are birds that cannot fly.", "Light is faster than sound.", "Iron rusts when it gets wet.",
)  # fmt: skip
QUESTIONS = (
    "Which of these is the shortest?", "What is the capital of France?", "Name one animal.", "Which metal rusts?",
    "What is faster, light or sound?", "Why is that so?", "Explain one of these facts.", "Describe one animal.",
    "How does iron rust?", "Why is the sky blue?",
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    name: str
    max_response: int
    stops: bool
    """A full stop ends a response; else it goes on to max_response."""
    target: float

    def prompts(self, number: int) -> list[Messages]:
        make = _ragged if self.stops else _equal
        return list(make(random.Random(1), number))


CASES = (Case("fixed", 64, False, target=1.7), Case("ragged", 128, True, target=3.0))


def _equal(draws: random.Random, number: int) -> Iterator[Messages]:
    """One digit each: all of one length."""
    for _ in range(number):
        question = f"What is {draws.randint(1, 9)} + {draws.randint(1, 9)}? Answer with only the number."
        yield [{"role": "user", "content": question}]


def _ragged(draws: random.Random, number: int) -> Iterator[Messages]:
    """A question after none or up to all of the facts, which SmolLM2-135M answers with 20 to 24 tokens on average."""
    for _ in range(number):
        facts = draws.sample(FACTS, draws.randint(0, len(FACTS)))
        question = " ".join([*facts, draws.choice(QUESTIONS)])
        yield [{"role": "system", "content": "Be brief."}, {"role": "user", "content": question}]


def full_stop(folder: Path) -> int:
    """The token that is a full stop."""
    (token,) = AutoTokenizer.from_pretrained(folder)(".", add_special_tokens=False)["input_ids"]
    return token


def make_reward_model(folder: Path, out: Path) -> Path:
    """The model's backbone with a random scalar head, as a folder. Reward and value model of both sides."""
    config = AutoConfig.from_pretrained(folder)
    config.num_labels = 1
    config.pad_token_id = 0
    torch.manual_seed(1)
    model = AutoModelForSequenceClassification.from_pretrained(folder, config=config, dtype=torch.float32)
    model.save_pretrained(out)
    return out


def trl_python(venv: Path) -> Path:
    """The interpreter of TRL's environment, which is made if need be."""
    python, ready = venv / "bin" / "python", venv / "ready"
    if not ready.exists():
        print(f"making {venv} for TRL ...", flush=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", venv], check=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", *TRL_PACKAGES], check=True)
        ready.touch()
    return python


@dataclass(frozen=True)
class Contest:
    """One case, prepared for both sides. A measurement is a run, and its result the median of its steps' samples/s."""

    case: Case
    model: Path
    reward: Path
    prompts: Path
    max_prompt: int
    num_steps: int
    python: Path
    """TRL's."""
    mesh: dict[str, dict[str, Any]]
    recomputes: bool
    lengths: dict[str, list[float]]
    """Mean response length of each step, by side."""

    def ours(self) -> float:
        lines = metrics(launch(OUT / f"ppo_{self.case.name}", self.mesh, 2, self.settings()))
        self.lengths["ours"] += [line[f"{RESPONSE_LENGTH}/mean"] for line in lines[1:]]
        return BATCH / statistics.median(step_seconds(lines))

    def settings(self) -> dict[str, Any]:
        """Of our run."""
        return {
            "model.path": str(self.model),
            "critic.path": str(self.reward),
            "reward.model.path": str(self.reward),
            "reward.function.path": None,
            "data.train_files": [str(self.prompts)],
            "data.train_batch_size": BATCH,
            "data.max_prompt_length": self.max_prompt,
            "data.max_response_length": self.case.max_response,
            "data.shuffle": False,
            "actor.ppo_mini_batch_size": BATCH,
            "actor.optim.lr": LEARNING_RATE,
            "critic.optim.lr": LEARNING_RATE,
            "algorithm.kl_ctrl.kl_coef": KL,
            "algorithm.recompute_old_logprobs": self.recomputes,
            "rollout.stop_token_ids": [full_stop(self.model)] if self.case.stops else [],
            "rollout.ignore_eos": not self.case.stops,
            "trainer.total_training_steps": self.num_steps,
        }

    def trl(self) -> float:
        folder = OUT / f"trl_{self.case.name}"
        job = {
            "model": str(self.model),
            "reward": str(self.reward),
            "prompts": str(self.prompts),
            "folder": str(folder),
            "out": str(folder / "steps.jsonl"),
            "threads": 2,
            "seed": 1,
            "batch": BATCH,
            "steps": self.num_steps,
            "lr": LEARNING_RATE,
            "kl_coef": KL,
            "response_length": self.case.max_response,
            "stop_token_id": full_stop(self.model) if self.case.stops else None,
        }
        folder.mkdir(parents=True, exist_ok=True)
        script = Path(__file__).with_name("trl_ppo.py")
        run_command([self.python, script, json.dumps(job)], folder / "run.log", {"OMP_NUM_THREADS": "2"})
        lines = read_jsonl(folder / "steps.jsonl")
        self.lengths["TRL"] += [line["response_tokens"] for line in lines[1:]]
        return BATCH / statistics.median(step_seconds(lines))


def measure(table: Table, contest: Contest, repetitions: int) -> None:
    case = contest.case
    rates = by_turns({"ours": contest.ours, "trl": contest.trl}, repetitions, warm_up=0)
    table.compare(case.name, rates["ours"], rates["trl"], case.target)
    lengths = {side: statistics.mean(of_steps) for side, of_steps in contest.lengths.items()}
    table.notes.append(
        f"{case.name}: mean response {lengths['ours']:.1f} tokens of ours, {lengths['TRL']:.1f} of TRL's; "
        f"runs {_list(rates['ours'])} and {_list(rates['trl'])} samples/s"
    )


def _list(rates: Sequence[float]) -> str:
    return ", ".join(f"{rate:.2f}" for rate in rates)


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parser(__doc__)
    arguments.add_argument("--case", action="append", choices=[case.name for case in CASES], help="repeatable; both")
    arguments.add_argument("--steps", type=at_least(2), help="of a run, the first of which does not count; default 5")
    arguments.add_argument("--compiled", action="store_true", help="vLLM compiles the model (a minute at each start)")
    arguments.add_argument("--recompute", action="store_true", help="old log-probs of ours come from the actor")
    arguments.add_argument("--trl-venv", type=Path, default=ROOT / ".venv-trl", help="TRL's environment")
    given = arguments.parse_args(argv)
    repetitions = given.repetitions or (1 if given.quick else 3)
    num_steps = given.steps or (2 if given.quick else 5)
    model = model_folder(given.model, given.quick)
    reward = make_reward_model(model, OUT / "reward_model")
    mesh = MESH | (RECOMPUTES if given.recompute else {})
    if given.compiled:
        mesh["rollout"] = {**MESH["rollout"], "engine_kwargs": {"enforce_eager": False}}
    python = trl_python(given.trl_venv)
    table = Table(f"A PPO step of {BATCH} samples, samples/s", ("case", "ours", "TRL", "ratio", "target"))
    with OtherPrograms() as others:
        for case in CASES:
            if given.case and case.name not in given.case:
                continue
            prompts = case.prompts(BATCH * num_steps)
            contest = Contest(
                case,
                model,
                reward,
                prompts=write_prompts(OUT / f"{case.name}.jsonl", prompts),
                max_prompt=longest(model, prompts),
                num_steps=num_steps,
                python=python,
                mesh=mesh,
                recomputes=given.recompute,
                lengths={"ours": [], "TRL": []},
            )
            measure(table, contest, repetitions)
    show(table, others)
    return 0


if __name__ == "__main__":
    sys.exit(main())
