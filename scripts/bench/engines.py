"""vLLM as a rank runs it, and new weights for it, as one rank writes them that has them all."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from scripts.bench.common import OUT, seconds
from verl.config import RolloutConfig
from verl.generation.vllm.buffer import WeightBuffer
from verl.generation.vllm.delivery import Delivery
from verl.generation.vllm.engine import VllmEngine
from verl.generation.vllm.options import VllmOptions
from verl.model.load import parameter_shapes, read_config
from verl.reshard.buckets import SLOTS, cut_buckets

START_SECONDS = 600.0
DTYPE = torch.bfloat16


def start_vllm(options: VllmOptions, folder: Path, name: str) -> tuple[VllmEngine, WeightBuffer]:
    """The engine, and the memory that it reads weights from."""
    shapes = parameter_shapes(folder, read_config(folder, trust_remote_code=False))
    buckets = cut_buckets(shapes, DTYPE.itemsize, RolloutConfig().reshard_bucket_mib << 20)
    memory = WeightBuffer([[(parameter, shapes[parameter], DTYPE) for parameter in b] for b in buckets], SLOTS)
    engine = VllmEngine(
        options,
        Delivery.in_node_memory(memory),
        name="the benchmark's replica",
        log_path=OUT / f"vllm_{name}.log",
        start_timeout=START_SECONDS,
        stage_timeout=START_SECONDS,
        on_progress=lambda: None,
    )
    return engine, memory


def load(engine: VllmEngine, memory: WeightBuffer, weights: Mapping[str, Tensor], version: int) -> dict[str, float]:
    """A bucket is written while the engine takes the one before. Seconds that this process spent in each part."""
    began, writing, telling, waiting = time.perf_counter(), 0.0, 0.0, 0.0
    beginning = seconds(engine.begin_load)
    for number in range(len(memory.buckets)):
        if number >= memory.slots:
            waiting += seconds(engine.await_bucket)
        writing += seconds(lambda number=number: _copy(memory.tensors(number), weights))
        telling += seconds(lambda number=number: engine.take_bucket(number))
    for _ in range(min(memory.slots, len(memory.buckets))):
        waiting += seconds(engine.await_bucket)
    committing = seconds(lambda: engine.commit(version))
    return {
        "all": time.perf_counter() - began,
        "beginning": beginning,
        "writing buckets": writing,
        "telling the engine, which begins on the same cores": telling,
        "waiting for the engine to take them": waiting,
        "commit": committing,
    }


def _copy(views: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> None:
    for name, view in views.items():
        view.copy_(weights[name])
