"""The parts of context parallelism on real ranks: who is whose peer, the exchange around attention, what is sent."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor.debug import CommDebugMode
from transformers import AttentionInterface

from scripts.make_tiny_model import CONFIGS, make_tiny_model
from tests.support.engine_cases import LONG, Case, assert_same_steps, make_models, train_on_ranks
from tests.support.ranks import run_ranks
from verl.flow.job import start_job
from verl.flow.placement import Groups, Placement, make_groups
from verl.model.context import Context, WholeRows, context_attention
from verl.model.heads import Head, HeadedModel
from verl.model.load import load_shards, materialise, meta_model, read_config
from verl.model.packing import Sequences, pack
from verl.parallel.parallelize import ParallelPlan, parallelize

pytestmark = pytest.mark.dist


def on_ranks(place: Placement, work: Callable[..., Any], *arguments: Any) -> list[Any]:
    """`work(groups, *arguments)` on every rank."""
    return run_ranks(len(place.ranks), _on_rank, place, work, arguments)


def _on_rank(place: Placement, work: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    job = start_job(stage_timeout=300, check_program=False)
    result = work(make_groups([place], job.rank, "cpu", job.timeout)["actor"], *arguments)
    job.close()
    return result


# -- groups ------------------------------------------------------------------------------------------------------------


def peers(groups: Groups) -> tuple[list[int], list[int], list[int]]:
    """The ranks that share this rank's rows out, those with other rows, and those that parameters are spread over."""
    assert groups.context is not None
    of = (groups.context, groups.rows, groups.mesh.get_group("shards"))
    context, rows, shards = (dist.get_process_group_ranks(group) for group in of)
    return context, rows, shards


def test_context_parallel_ranks_are_neighbours_and_share_parameters_with_all() -> None:
    """Listed order 2 3 1 0 5 4 7 6: pairs of tensor-parallel ranks, pairs of those with the same rows."""
    said = on_ranks(Placement("actor", (2, 3, 1, 0, 5, 4, 7, 6), tp=2, cp=2), peers)
    assert said[2] == ([2, 1], [2, 5], [2, 1, 5, 7])
    assert said[0] == ([3, 0], [0, 6], [3, 0, 4, 6])
    assert said[7] == ([5, 7], [1, 7], [2, 1, 5, 7])


# -- the exchange ------------------------------------------------------------------------------------------------------


BATCH, DIM = 3, 5


def draw(heads: int, time: int, seed: int) -> Tensor:
    """[batch, heads, time, dim]"""
    return torch.randn(BATCH, heads, time, DIM, generator=torch.Generator().manual_seed(seed))


def exchanged(groups: Groups, heads: int, key_heads: int) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """(what this rank gets of queries, keys and values; the gradients of what it gave; what comes back of its heads)"""
    assert groups.context is not None
    context = Context(groups.context)
    time, rank = 4 * context.size, context.rank
    whole = [draw(count, time, seed) for seed, count in enumerate((heads, key_heads, key_heads))]
    here = [x[:, :, 4 * rank : 4 * (rank + 1)].clone().requires_grad_() for x in whole]
    got = context.share_heads(*here)
    # a loss in which each rank, head and place counts by itself
    loss = sum((x * weights(x, rank, number)).sum() for number, x in enumerate(got))
    assert isinstance(loss, Tensor)
    loss.backward()
    gradients = [x.grad for x in here if x.grad is not None]
    return [x.detach() for x in got], gradients, context.share_time(got[0].detach().transpose(1, 2))


def weights(x: Tensor, rank: int, number: int) -> Tensor:
    return draw(x.shape[1], x.shape[2], 100 + 10 * number + rank)


@pytest.mark.parametrize(("size", "heads", "key_heads"), [(2, 4, 4), (2, 6, 2), (2, 4, 1), (4, 8, 2)])
def test_every_rank_gets_whole_rows_of_its_heads_and_gives_gradients_back(
    size: int, heads: int, key_heads: int
) -> None:
    time = 4 * size
    whole = [draw(count, time, seed) for seed, count in enumerate((heads, key_heads, key_heads))]
    # by the definition of grouped queries: query head i goes with key head i // (heads / key_heads)
    queries = [range(r * heads // size, (r + 1) * heads // size) for r in range(size)]
    keys = [list(dict.fromkeys(i * key_heads // heads for i in mine)) for mine in queries]
    wanted = [torch.zeros_like(x) for x in whole]
    ranks = on_ranks(Placement("actor", tuple(range(size)), cp=size), exchanged, heads, key_heads)
    for rank, (got, _, _) in enumerate(ranks):
        for number, of in enumerate((list(queries[rank]), keys[rank], keys[rank])):
            assert torch.equal(got[number], whole[number][:, of])
            wanted[number][:, of] += weights(got[number], rank, number)
    for rank, (_, gradients, back) in enumerate(ranks):
        mine = slice(4 * rank, 4 * (rank + 1))
        for gradient, expected in zip(gradients, wanted, strict=True):
            torch.testing.assert_close(gradient, expected[:, :, mine])
        assert torch.equal(back, whole[0].transpose(1, 2)[:, mine])


def all_outputs(groups: Groups) -> tuple[Tensor, Tensor]:
    assert groups.context is not None
    context = Context(groups.context)
    # rank 1 has nothing in a part without outputs
    places = [torch.tensor([3, 0, 4]), torch.tensor([], dtype=torch.int64), torch.tensor([1, 2])][context.rank]
    here = (torch.stack([places, -places]).float() + 0.1).requires_grad_()
    every = context.all_outputs(here, places, 5)
    (every * torch.arange(10.0).view(2, 5)).sum().backward()
    assert here.grad is not None
    return every.detach(), here.grad


def test_outputs_are_put_together_and_gradients_are_each_ranks_own() -> None:
    """The ranks all compute the whole loss, so their gradients are not summed."""
    ranks = on_ranks(Placement("actor", (0, 1, 2), cp=3), all_outputs)
    for every, _ in ranks:
        assert torch.equal(every, torch.stack([torch.arange(5.0), -torch.arange(5.0)]) + 0.1)
    assert [grad.tolist() for _, grad in ranks] == [[[3, 0, 4], [8, 5, 9]], [[], []], [[1, 2], [6, 7]]]


def seen_by_kernel(groups: Groups) -> tuple[dict[str, Any], bool]:
    """(what a kernel of this name gets to see, whether what it gives comes back to its places)"""
    assert groups.context is not None
    context = Context(groups.context)
    seen: dict[str, Any] = {}

    def kernel(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any) -> Any:
        seen.update(kwargs, name=module.config._attn_implementation, groups=module.num_key_value_groups)
        seen.update(shapes=[tuple(x.shape) for x in (query, key, value)])
        return query.transpose(1, 2), None

    AttentionInterface.register("recorder", kernel)
    config = CONFIGS["llama"]()
    config._attn_implementation = "recorder"
    layer = nn.Module()
    vars(layer).update(config=None, num_key_value_groups=3)
    query, key, value = (draw(heads, 4, context.rank) for heads in (6, 2, 2))
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]]).expand(BATCH, -1)
    rows = WholeRows(context, config, positions)
    part = positions[:, :4]
    out, _ = context_attention(layer, query, key, value, None, whole_rows=rows, position_ids=part, sliding_window=5)
    assert vars(layer)["num_key_value_groups"] == 3 and vars(layer)["config"] is None
    return seen, torch.equal(out, query.transpose(1, 2))


def test_a_kernel_sees_whole_rows_of_some_heads_and_its_own_name() -> None:
    """Flash attention reads its name in the layer's config, and where sequences end in the positions."""
    for seen, same in on_ranks(Placement("actor", (0, 1), cp=2), seen_by_kernel):
        assert same
        assert seen.pop("position_ids").tolist() == [[0, 1, 2, 0, 1, 2, 3, 4]] * BATCH
        shapes = [(BATCH, heads, 8, DIM) for heads in (3, 1, 1)]
        assert seen == {"name": "recorder", "groups": 3, "shapes": shapes, "sliding_window": 5}


# -- what is sent and held ---------------------------------------------------------------------------------------------


def split_model(groups: Groups, folder: Path) -> HeadedModel:
    model = meta_model(read_config(folder, False), Head.lm, torch.float32, "sdpa", 8, False)
    parallelize(model, groups.mesh, ParallelPlan(torch.float32, False, False), groups.context)
    materialise(model, torch.device("cpu"))
    load_shards(model, folder, 0, lambda: None)
    return model


def sent_and_held(groups: Groups, folder: Path) -> tuple[dict[str, int], set[int]]:
    """(messages of a forward pass by kind, the times of the hidden states that go through layers and norms)"""
    model = split_model(groups, folder)
    ids = torch.arange(3, 11)
    batch = pack(Sequences((ids,), (1,), (7,), 1), [[0]], multiple_of=2)
    times: set[int] = set()
    for module in model.hf.base_model.modules():
        if "MLP" in type(module).__name__ or "Norm" in type(module).__name__:
            module.register_forward_hook(lambda module, args, out: times.add(out.shape[1]))
    with torch.no_grad():
        model(batch, 1.0)  # gathers the parameters, which stay
        with CommDebugMode() as messages:
            model(batch, 1.0)
    return {str(op).split(".")[-1]: count for op, count in messages.get_comm_counts().items()}, times


def test_a_layer_exchanges_twice_and_holds_its_part_of_the_time(tmp_path: Path) -> None:
    """In front of attention and behind it; besides, the outputs alone are put together."""
    folder = make_tiny_model(tmp_path, num_layers=3)
    for counts, times in on_ranks(Placement("actor", (0, 1), cp=2), sent_and_held, folder):
        assert counts == {"alltoall_base_": 2 * 3, "allreduce_": 1}
        assert times == {4}


# -- training ----------------------------------------------------------------------------------------------------------


STEPS = {
    "one long row": Case(shapes=tuple(LONG), max_tokens=12, checkpointing=True),
    "ranks of dead rows": Case("qwen3", dead=(0, 1, 2, 3, 4, 5), max_tokens=1000),
    "ranks without rows": Case("tied", blocks=True, head=Head.token_value, max_tokens=15),
}


def test_two_steps_on_two_copies_are_those_of_a_plain_loop(tmp_path: Path) -> None:
    """Each data-parallel index has a copy of the model, which the ranks that share its rows have among them."""
    models = make_models(tmp_path, ["llama", "qwen3", "tied"])
    place = Placement("actor", (2, 0, 3, 1), cp=2, fsdp_size=2)
    ranks = run_ranks(4, train_on_ranks, place, STEPS, models)
    for name, case in STEPS.items():
        steps = {rank: results[name] for rank, results in enumerate(ranks)}
        assert_same_steps(place, steps, case.plainly(models[case.model]))
