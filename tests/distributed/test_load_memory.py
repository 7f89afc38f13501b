"""How much of a machine's memory a rank takes to load its shards: their bytes, and no second copy on the way."""

from __future__ import annotations

import ctypes
import gc
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from scripts.make_tiny_model import make_tiny_model
from tests.support.ranks import run_ranks
from verl.engine.train_engine import EngineSpec, TrainEngine
from verl.flow.job import Job, start_job
from verl.flow.placement import Groups, Placement, make_groups
from verl.model.heads import Head
from verl.model.load import local_tensor

pytestmark = pytest.mark.dist

MOST = 1.2
"""Times the bytes of a rank's shards."""
LAYOUTS = {"fsdp 2": (1, 1), "tp 2": (1, 2), "pp 2": (2, 1)}
"""(pipeline stages, tensor-parallel ranks) of two ranks."""


@dataclass(frozen=True)
class Growth:
    """Of one rank's resident memory, all in bytes."""

    shards: int
    after: int
    """What it has more when it has loaded."""
    most: int
    """What it had more at a time while it loaded."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(a tiny one, one of 180 MB), as their files are: float32."""
    folder = tmp_path_factory.mktemp("load")
    tiny = make_tiny_model(folder / "tiny", num_layers=2)
    sizes = {"hidden_size": 768, "num_heads": 12, "num_kv_heads": 4, "head_dim": 64, "vocab_size": 8192}
    return tiny, make_tiny_model(folder / "large", num_layers=6, **sizes)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("trained", [True, False], ids=["float32", "bfloat16"])
def test_a_rank_takes_little_more_than_its_shards(models: tuple[Path, Path], layout: str, trained: bool) -> None:
    pp, tp = LAYOUTS[layout]
    ranks: list[Growth] = run_ranks(2, load_on_rank, Placement("actor", (0, 1), tp, pp), trained, *models)
    whole = sum(file.stat().st_size for file in models[1].glob("*.safetensors")) // (1 if trained else 2)
    assert sum(rank.shards for rank in ranks) == pytest.approx(whole, rel=0.01)
    for rank in ranks:
        assert rank.after <= MOST * rank.shards
        assert rank.most <= MOST * rank.shards


def load_on_rank(place: Placement, trained: bool, tiny: Path, large: Path) -> Growth:
    job = start_job(stage_timeout=300, check_program=False)
    groups = make_groups([place], job.rank, "cpu", job.timeout)["actor"]
    load(tiny, trained, groups, job)  # libraries, and the code that they map
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what that has freed must not serve the next one
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before = resident("VmRSS")
    engine = load(large, trained, groups, job)
    growth = Growth(
        shards=sum(local_tensor(parameter).nbytes for parameter in engine.model.parameters()),
        after=resident("VmRSS") - before,
        most=resident("VmHWM") - before,
    )
    job.close()
    return growth


def load(folder: Path, trained: bool, groups: Groups, job: Job) -> TrainEngine:
    spec = EngineSpec(folder, Head.lm, trained, torch.bfloat16, seed=0, max_tokens_per_micro_batch=64)
    return TrainEngine(spec, groups, job.device, job.board)


def resident(what: str) -> int:
    """Bytes of this process that are in memory, pages of mapped files among them: now (VmRSS) or at most (VmHWM)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith(f"{what}:")]
    return int(line.split()[1]) * 1024
