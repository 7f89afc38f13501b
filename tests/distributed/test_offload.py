"""What is in host memory changes no bit of what is learnt, wherever it is kept and however it is saved."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from scripts.make_tiny_model import make_tiny_model
from tests.support.engine_cases import Case, Rank, make_engine, make_models, train_case
from tests.support.engines import Layout, assert_equal, learnt, make_engines, train
from tests.support.plain_loop import Steps
from tests.support.ranks import run_ranks
from verl.engine.checkpoint import Checkpoints
from verl.engine.export import export_hf
from verl.flow.job import start_job
from verl.flow.placement import Placement, make_groups
from verl.model.heads import Head
from verl.model.load import local_tensor

pytestmark = [pytest.mark.dist, pytest.mark.timeout(900)]

CASES = {
    "actor": Case(),
    "critic, gathered twice": Case("qwen3", head=Head.token_value, reshard=True, checkpointing=True),
    "tied": Case("tied llama", max_tokens=20),
}
PLACES = {
    "FSDP 2": (Placement("actor", (1, 0)), ["actor", "critic, gathered twice"]),
    "TP 2": (Placement("actor", (0, 1), tp=2), ["tied"]),
    "two stages": (Placement("actor", (0, 1), pp=2), ["tied"]),
}
ALL = ("activations", "parameters", "optimizer")
OFFLOADED = [
    *(("FSDP 2", case, offload) for case in PLACES["FSDP 2"][1] for offload in (*((one,) for one in ALL), ALL)),
    ("TP 2", "tied", ALL),
    ("two stages", "tied", ("activations", "optimizer")),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_models(tmp_path_factory.mktemp("models"), ["llama", "qwen3", "tied llama"])


def train_with_all(models: Mapping[str, Path]) -> dict[tuple[str, str], dict[tuple[str, ...], Steps]]:
    """By place and case: the steps without offloading, (), and with each."""
    job = start_job(stage_timeout=300, check_program=False)
    groups = make_groups([replace(p, role=name) for name, (p, _) in PLACES.items()], job.rank, "cpu", job.timeout)
    results: dict[tuple[str, str], dict[tuple[str, ...], Steps]] = {}
    for name, (place, cases) in PLACES.items():
        for case in cases:
            results[name, case] = {
                offload: train_case(
                    job, place, groups[name], replace(CASES[case], offload=offload), models[CASES[case].model]
                )
                for offload in [(), *(o for *at, o in OFFLOADED if at == [name, case])]
            }
    job.close()
    return results


@pytest.fixture(scope="module")
def results(models: dict[str, Path]) -> list[dict[tuple[str, str], dict[tuple[str, ...], Steps]]]:
    return run_ranks(2, train_with_all, models)


@pytest.mark.parametrize(
    ("name", "case", "offload"), OFFLOADED, ids=lambda value: value if isinstance(value, str) else "+".join(value)
)
def test_two_steps_are_the_same_bits(
    name: str, case: str, offload: tuple[str, ...], results: list[dict[tuple[str, str], dict[tuple[str, ...], Steps]]]
) -> None:
    for rank in results:
        steps, expected = rank[name, case][offload], rank[name, case][()]
        assert (steps.norms, steps.losses) == (expected.norms, expected.losses)
        assert_equal(steps.parameters, expected.parameters)
        for one, other in zip(steps.gradients, expected.gradients, strict=True):
            assert_equal(one, other)
        assert torch.equal(steps.after, expected.after)
        assert len(steps.gradients) == 2 and any(g.abs().max() > 0 for g in steps.gradients[0].values())


# -- activations -------------------------------------------------------------------------------------------------------


def saved_by_autograd(model: Path, tp: int) -> tuple[list[tuple[bool, bool]], int]:
    """Of a training step: for each saved tensor (whether it is a weight, whether it stayed), and how many copies."""
    job = start_job(stage_timeout=300, check_program=False)
    place = Placement("actor", (0, 1), tp=tp)
    groups = make_groups([place], job.rank, "cpu", job.timeout)["actor"]
    case = Case(max_tokens=30, reshard=True, offload=("activations",))
    engine, part = make_engine(job, groups, case, model), Rank(case, place, job.rank, groups)
    host = engine._host_activations
    assert host is not None
    saved: list[tuple[bool, bool]] = []
    copies: dict[int, Tensor] = {}
    pack = host._pack

    def watched(tensor: Tensor) -> tuple[Tensor, torch.device]:
        memory = {local_tensor(p).untyped_storage().data_ptr() for p in engine.model.parameters()}
        kept = pack(tensor)
        stayed = kept[0].data_ptr() == tensor.data_ptr()
        if tensor.numel():
            saved.append((tensor.untyped_storage().data_ptr() in memory, stayed))
        if not stayed:
            copies[id(kept[0])] = kept[0]
        return kept

    host._pack = watched  # type: ignore[method-assign]
    batch = part.mini_batches[0]
    engine.train_step(part.sequences, batch.rows, part.loss(batch))
    job.close()
    return saved, len(copies)


@pytest.mark.parametrize("tp", [1, 2])
def test_weights_stay_and_what_is_saved_again_is_copied_once(tp: int, models: dict[str, Path]) -> None:
    for saved, copies in run_ranks(2, saved_by_autograd, models["llama"], tp):
        assert all(is_weight == stayed for is_weight, stayed in saved)
        weights = sum(is_weight for is_weight, _ in saved)
        assert weights > 0
        # queries, keys and values have one input, gate and up another: three of a layer's copies are saved
        assert 0 < copies < len(saved) - weights


# -- checkpoints and exports -------------------------------------------------------------------------------------------

LAYOUT: Layout = {"actor": (0, 1), "critic": Placement("critic", (1, 0), fsdp_size=1)}


def save_and_load(models: dict[str, Path], run_dir: Path) -> None:
    """Two steps, saved, and two more: without offloading, and again with it, each from what the other has saved."""
    job = start_job(stage_timeout=300, check_program=True)
    away = {"offload_parameters": True}, {"offload_optimizer": True}
    first = make_engines(job, LAYOUT, models)
    train(first, 2)
    Checkpoints(run_dir / "plain", 2, job).save(2, first, {}, {})
    for number, settings in enumerate(away):
        second = make_engines(job, LAYOUT, models, **settings)
        train(second, 2)
        checkpoints = Checkpoints(run_dir / str(number), 2, job)
        checkpoints.save(2, second, {}, {})
        third, fourth = make_engines(job, LAYOUT, models), make_engines(job, LAYOUT, models, **settings)
        checkpoints.load(checkpoints.at(run_dir / str(number) / "checkpoints" / "step_2"), third)
        checkpoints.load(checkpoints.at(run_dir / "plain" / "checkpoints" / "step_2"), fourth)
        for engines in (second, third, fourth):
            for role in engines:
                assert_equal(learnt(engines[role]), learnt(first[role]))
        train(third, 2)
        train(fourth, 2)
        for role in third:
            assert_equal(learnt(third[role]), learnt(fourth[role]))
        export_hf(second["actor"], run_dir / f"hf {number}", models["actor"], job.board, torch.float32)
    export_hf(first["actor"], run_dir / "hf plain", models["actor"], job.board, torch.float32)
    job.close()


def test_checkpoints_and_exports_do_not_show_where_the_state_was(tmp_path: Path) -> None:
    models = {role: make_tiny_model(tmp_path / role, num_layers=1, tied=True) for role in ("actor", "critic")}
    run_ranks(2, save_and_load, models, tmp_path)
    whole = (tmp_path / "hf plain" / "model.safetensors").read_bytes()
    assert (tmp_path / "hf 0" / "model.safetensors").read_bytes() == whole
    assert (tmp_path / "hf 1" / "model.safetensors").read_bytes() == whole
