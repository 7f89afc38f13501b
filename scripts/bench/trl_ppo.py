"""The other side of ppo_step.py: TRL's PPOTrainer, run in an environment of its own.

Its one argument is a JSON object; it writes a line {"step", "time", "response_tokens"} a step to the file `out`.
"""
# pyright: reportMissingImports=false

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

# PPOConfig(bf16=True) alone has no effect with this version of transformers: accelerate reads this.
os.environ["ACCELERATE_MIXED_PRECISION"] = "bf16"
os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"

import torch
import trl.experimental.ppo.ppo_trainer as ppo
from datasets import Dataset
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PrinterCallback,
    TrainerCallback,
)
from trl.experimental.ppo import PPOConfig, PPOTrainer


class Clock(TrainerCallback):
    """Writes when each step ended, and how long its responses were."""

    def __init__(self, path: str) -> None:
        self._file = Path(path).open("w", buffering=1)  # noqa: SIM115 (open as long as the run lasts)
        self._lengths: list[int] = []
        whole = ppo.truncate_response

        def truncate_response(stop_token_id: int, pad_token_id: int, responses: torch.Tensor) -> torch.Tensor:
            cut = whole(stop_token_id, pad_token_id, responses)
            self._lengths += (cut != pad_token_id).sum(1).tolist()
            return cut

        ppo.truncate_response = truncate_response

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        lengths, self._lengths = self._lengths or [args.response_length], []
        line = {"step": state.global_step, "time": time.time(), "response_tokens": sum(lengths) / len(lengths)}
        self._file.write(json.dumps(line) + "\n")


def main() -> None:
    job = json.loads(sys.argv[1])
    torch.set_num_threads(job["threads"])
    torch.manual_seed(job["seed"])
    tokenizer = AutoTokenizer.from_pretrained(job["model"], padding_side="left")
    # TRL takes every token with this id for padding; SmolLM2's own pad token stands in each chat prompt.
    tokenizer.pad_token_id = 0
    prompts = [json.loads(line)["prompt"] for line in Path(job["prompts"]).read_text().splitlines()]
    texts = [tokenizer.apply_chat_template(p, tokenize=False, add_generation_prompt=True) for p in prompts]
    rows = Dataset.from_list([{"input_ids": tokenizer(text, add_special_tokens=False)["input_ids"]} for text in texts])

    policy = AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32)
    value = AutoModelForSequenceClassification.from_pretrained(job["reward"], dtype=torch.float32)
    # Frozen models need no float32 copy: autocast would make them bfloat16 for every forward.
    reference = AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.bfloat16)
    reward = AutoModelForSequenceClassification.from_pretrained(job["reward"], dtype=torch.bfloat16)
    config = PPOConfig(
        output_dir=job["folder"],
        use_cpu=True,
        bf16=True,
        learning_rate=job["lr"],
        gradient_checkpointing=False,
        per_device_train_batch_size=job["batch"],
        gradient_accumulation_steps=1,
        num_mini_batches=1,
        num_ppo_epochs=1,
        total_episodes=job["batch"] * job["steps"],
        local_rollout_forward_batch_size=job["batch"],
        response_length=job["response_length"],
        stop_token_id=job["stop_token_id"],
        temperature=1.0,
        kl_coef=job["kl_coef"],
        num_sample_generations=0,
        report_to="none",
        logging_steps=1,
        save_strategy="no",
        disable_tqdm=True,
        seed=job["seed"],
        dataloader_pin_memory=False,
    )
    trainer = PPOTrainer(
        args=config,
        processing_class=tokenizer,
        model=policy,
        ref_model=reference,
        reward_model=reward,
        value_model=value,
        train_dataset=rows,
        eval_dataset=rows.select(range(job["batch"])),
    )
    assert trainer.accelerator.mixed_precision == "bf16", trainer.accelerator.mixed_precision
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(Clock(job["out"]))
    trainer.train()


if __name__ == "__main__":
    main()
