"""A vLLM engine with a tiny random Llama, and the same model in Hugging Face's code to hold it against.

Run as a module it is a rank: `python -m tests.support.vllm_rig MODEL_FOLDER LOG TP` starts an engine, prints its
process id and then "ready", and sleeps.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from verl.generation.types import Request, Sample, Sampling
from verl.generation.vllm.buffer import Layout, WeightBuffer
from verl.generation.vllm.delivery import Delivery
from verl.generation.vllm.engine import VllmEngine
from verl.generation.vllm.options import VllmOptions
from verl.reshard.buckets import cut_buckets

VOCABULARY = 500
"""vLLM pads it to 512."""
PROMPTS = [[1, 50 + i, 300 + 7 * i, 100 + i, 77] for i in range(4)]
GREEDY = Sampling(temperature=0.0, top_p=1.0, top_k=0, max_tokens=16, stop_token_ids=(), ignore_eos=True)


def tiny_llama(folder: Path, tied: bool) -> LlamaForCausalLM:
    """Writes the config alone: the engine gets its weights by `load`."""
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=4, head_dim=32, tie_word_embeddings=tied, initializer_range=0.2,
        max_position_embeddings=1024, dtype="float32", architectures=["LlamaForCausalLM"],
    )  # fmt: skip
    config.save_pretrained(folder)
    torch.manual_seed(0)
    return LlamaForCausalLM(config).eval()


def perturb(model: LlamaForCausalLM, seed: int, only: str = "") -> None:
    """New values for the parameters that have `only` in their names."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if only in name:
                parameter += 0.5 * parameter.std() * torch.randn(parameter.shape, generator=generator)


@dataclass
class Rig:
    model: LlamaForCausalLM
    engine: VllmEngine
    memory: WeightBuffer
    version: int = 0

    def load(self) -> None:
        """As a rank does that trains alone: a bucket is written while the engine takes the one before."""
        self.version += 1
        self.engine.begin_load()
        for number in range(len(self.memory.buckets)):
            if number >= self.memory.slots:
                self.engine.await_bucket()
            self.write(number)
            self.engine.take_bucket(number)
        for _ in range(min(self.memory.slots, len(self.memory.buckets))):
            self.engine.await_bucket()
        self.engine.commit(self.version)

    def write(self, bucket: int) -> None:
        parameters = dict(self.model.named_parameters())
        for name, destination in self.memory.tensors(bucket).items():
            destination.copy_(parameters[name].detach())

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling, seed: int = 0) -> list[Sample]:
        """In row order; row r has seed `seed + r`."""
        requests = [Request(row, tuple(prompt), seed + row) for row, prompt in enumerate(prompts)]
        return sorted(self.engine.generate(requests, sampling), key=lambda sample: sample.row)

    @torch.no_grad()
    def greedy(self, prompt: Sequence[int], length: int) -> list[int]:
        ids = list(prompt)
        for _ in range(length):
            ids.append(int(self.model(torch.tensor([ids])).logits[0, -1].argmax()))
        return ids[len(prompt) :]

    @torch.no_grad()
    def logits(self, prompt: Sequence[int], response: Sequence[int]) -> Tensor:
        """Before each token of the response: [tokens, vocabulary]."""
        return self.model(torch.tensor([[*prompt, *response]])).logits[0, len(prompt) - 1 : -1]


def start_rig(
    model: LlamaForCausalLM,
    folder: Path,
    log_path: Path,
    *,
    tp: int = 1,
    stage_timeout: float = 300.0,
    leave_out: str | None = None,
    bucket_bytes: int = 48 * 1024,
    **engine_kwargs: object,
) -> Rig:
    """The engine's process is under way."""
    memory = WeightBuffer(layouts(model, leave_out, bucket_bytes), 2)
    delivery = Delivery.in_node_memory(memory)
    return Rig(model, start_engine(folder, log_path, delivery, tp, stage_timeout, **engine_kwargs), memory)


def layouts(model: LlamaForCausalLM, leave_out: str | None = None, bucket_bytes: int = 48 * 1024) -> list[Layout]:
    """Buckets are small: a layer's attention and its MLP are in different ones."""
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters() if name != leave_out}
    return [[(name, shapes[name], torch.float32) for name in b] for b in cut_buckets(shapes, 4, bucket_bytes)]


def start_engine(
    folder: Path, log_path: Path, delivery: Delivery, tp: int, stage_timeout: float = 300.0, **engine_kwargs: object
) -> VllmEngine:
    options = VllmOptions(
        model_path=str(folder), dtype="float32", max_model_len=512, max_num_seqs=32, tensor_parallel_size=tp,
        engine_kwargs={"kv_cache_memory_bytes": 64 * 2**20, **engine_kwargs},
    )  # fmt: skip
    return VllmEngine(
        options,
        delivery,
        name="rollout replica 3",
        log_path=log_path,
        start_timeout=600.0,
        stage_timeout=stage_timeout,
        on_progress=lambda: None,
    )


def assert_equals_hugging_face(rig: Rig, prompts: list[list[int]]) -> list[list[int]]:
    samples = rig.generate(prompts, GREEDY)
    for prompt, sample in zip(prompts, samples, strict=True):
        assert sample.token_ids == rig.greedy(prompt, GREEDY.max_tokens)
        expected = rig.logits(prompt, sample.token_ids).log_softmax(-1)
        expected = expected.gather(-1, torch.tensor(sample.token_ids)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(sample.logprobs), expected, atol=1e-4, rtol=0)
        assert sample.version == rig.version
    return [sample.token_ids for sample in samples]


def assert_follows_new_weights(rig: Rig) -> None:
    """All of them; then those of the embedding alone, which a tied head must follow; then none."""
    seen = [assert_equals_hugging_face(rig, PROMPTS)]
    for seed, only in [(1, ""), (2, "embed"), (3, "")]:
        perturb(rig.model, seed, only)
        rig.load()
        seen.append(assert_equals_hugging_face(rig, PROMPTS))
        assert seen[-1] != seen[-2]
        assert rig.engine.version == rig.version
    rig.load()
    assert assert_equals_hugging_face(rig, PROMPTS) == seen[-1]


def nucleus_logprobs(logits: Tensor, temperature: float, top_p: float) -> Tensor:
    """Log-probs [tokens, vocabulary] of nucleus sampling (Holtzman et al. 2020): the smallest set of at least top_p."""
    probs = (logits / temperature).softmax(-1)
    ordered, index = probs.sort(-1, descending=True)
    kept_ordered = ordered.cumsum(-1) - ordered < top_p
    kept = torch.zeros_like(kept_ordered).scatter(-1, index, kept_ordered)
    return (probs * kept / (probs * kept).sum(-1, keepdim=True)).log()


def main() -> None:
    folder, log_path, tp = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    engine = start_rig(tiny_llama(folder, tied=False), folder, log_path, tp=tp).engine
    print(engine.pid, flush=True)
    engine.wait_ready()
    print("ready", flush=True)
    time.sleep(3600)


if __name__ == "__main__":
    main()
