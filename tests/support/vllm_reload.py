"""vLLM in this process, loaded bucket by bucket by its own reload, which the CPU otherwise goes without.

    python -m tests.support.vllm_reload FOLDER [tied]

After each of several loads it prints, as JSON, whether the greedy tokens are Hugging Face's and the largest distance of
their log-probs. A bucket is overwritten with NaN as soon as it has been taken in.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

from tests.support.vllm_rig import perturb, tiny_llama
from verl.generation.vllm.buffer import WeightBuffer, layout_to_json
from verl.generation.vllm.environment import child_environment
from verl.generation.vllm.loaders import PackedLoader
from verl.generation.vllm.options import VllmOptions, llm_arguments
from verl.reshard.buckets import cut_buckets

PROMPT = [1, 50, 300, 100, 77]
TOKENS = 12
BUCKET_BYTES = 20 * 1024


def main(folder: Path, tied: bool) -> None:
    os.environ.update(child_environment(os.environ, _options(folder)))
    from vllm import LLM

    PackedLoader.serves = staticmethod(lambda model: False)  # type: ignore[method-assign]
    model = tiny_llama(folder, tied)
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    buckets = cut_buckets({name: tuple(p.shape) for name, p in parameters.items()}, 4, BUCKET_BYTES)
    memory = WeightBuffer([[(name, tuple(parameters[name].shape), torch.float32) for name in b] for b in buckets], 2)
    llm = LLM(**llm_arguments(_options(folder)))
    llm.collective_rpc("verl_open_weights", args=(memory.path, [layout_to_json(b) for b in memory.buckets], 2))
    for seed in range(3):
        perturb(model, seed)
        llm.collective_rpc("verl_begin_load")
        for number in range(len(buckets)):
            for name, view in memory.tensors(number).items():
                view.copy_(parameters[name])
            llm.collective_rpc("verl_take_bucket", args=(number,))
            for view in memory.tensors(number).values():
                view.fill_(float("nan"))
        llm.collective_rpc("verl_finish_load")
        llm.reset_prefix_cache()
        ids, logprobs = _greedy(llm)
        with torch.no_grad():
            expected = model(torch.tensor([PROMPT + ids])).logits[0, len(PROMPT) - 1 : -1].log_softmax(-1)
        right = expected.argmax(-1).tolist() == ids
        gap = (expected.max(-1).values - torch.tensor(logprobs)).abs().max()
        print(json.dumps({"right": right, "gap": float(gap), "buckets": len(buckets)}), flush=True)
    os._exit(0)


def _options(folder: Path) -> VllmOptions:
    return VllmOptions(
        model_path=str(folder), dtype="float32", max_model_len=128, max_num_seqs=4,
        engine_kwargs={"kv_cache_memory_bytes": 64 * 2**20},
    )  # fmt: skip


def _greedy(llm: Any) -> tuple[list[int], list[float]]:
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    sampling = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True, detokenize=False, logprobs=0)
    (output,) = llm.generate([TokensPrompt(prompt_token_ids=PROMPT)], sampling, use_tqdm=False)
    chosen = output.outputs[0]
    ids = list(chosen.token_ids)
    return ids, [of_token[i].logprob for of_token, i in zip(chosen.logprobs, ids, strict=True)]


if __name__ == "__main__":
    main(Path(sys.argv[1]), tied=len(sys.argv) > 2)
