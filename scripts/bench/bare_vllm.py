"""The other side of generation.py: vllm.LLM by itself, in a process of its own.

It is told what to do by lines of JSON on standard input, and answers each with one on the descriptor that its first
line names: standard output is vLLM's. The first line has the arguments of vllm.LLM; each further one asks for a run.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any


def main() -> None:
    start = json.loads(sys.stdin.readline())
    answers = os.fdopen(start["answers"], "w", buffering=1)

    from vllm import LLM, SamplingParams, TokensPrompt

    llm = LLM(**start["arguments"])
    answers.write(json.dumps({"ready": True}) + "\n")
    for line in sys.stdin:
        run: dict[str, Any] = json.loads(line)
        prompts = [TokensPrompt(prompt_token_ids=ids) for ids in run["prompts"]]
        params = [SamplingParams(**run["sampling"], seed=seed) for seed in run["seeds"]]
        began = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - began
        tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
        answers.write(json.dumps({"seconds": seconds, "tokens": tokens}) + "\n")
    os._exit(0)  # past vLLM's own shutdown, which takes ten seconds


if __name__ == "__main__":
    main()
