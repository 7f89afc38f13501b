"""The engine as its callers see it: what a sample depends on, when it ends, and when it comes."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from tests.unit.generation.inprocess.conftest import Tiny
from verl.errors import UserError
from verl.generation.inprocess import TorchEngine
from verl.generation.types import Request, Sample, Sampling


def sampling(max_tokens: int = 12, stop_token_ids: tuple[int, ...] = (), **settings: Any) -> Sampling:
    return Sampling(
        **{"temperature": 1.0, "top_p": 1.0, "top_k": 0} | settings,
        max_tokens=max_tokens,
        stop_token_ids=stop_token_ids,
    )


def requests(num_prompts: int, n: int = 1, seed: int = 0) -> list[Request]:
    """n samples of each of some prompts of 1 to 30 tokens."""
    draw = random.Random(seed)
    prompts = [tuple(draw.randrange(3, 320) for _ in range(draw.randint(1, 30))) for _ in range(num_prompts)]
    return [Request(row, prompts[row // n], seed=1000 * seed + row) for row in range(num_prompts * n)]


def by_row(samples: Sequence[Sample] | Iterator[Sample]) -> dict[int, Sample]:
    return {sample.row: sample for sample in samples}


@contextmanager
def embedded_tokens() -> Iterator[list[int]]:
    """The sizes of the inputs of every forward pass."""
    sizes: list[int] = []

    def note(module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        if isinstance(module, nn.Embedding):
            sizes.append(inputs[0].numel())

    handle = nn.modules.module.register_module_forward_pre_hook(note)
    try:
        yield sizes
    finally:
        handle.remove()


# -- what a sample depends on ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_a_sample_is_the_same_alone_in_a_batch_in_any_order_and_in_few_slots(
    tiny: Callable[[str], Tiny], architecture: str
) -> None:
    model = tiny(architecture)
    asked = requests(num_prompts=50, n=4)
    settings = sampling(stop_token_ids=tuple(range(3, 30)))
    together = by_row(model.engine(max_num_seqs=256).generate(asked, settings))
    assert len({len(sample.token_ids) for sample in together.values()}) > 8  # slots are left at different times
    shuffled = random.Random(0).sample(asked, len(asked))
    few = model.engine(max_num_seqs=7)
    one = model.engine(max_num_seqs=1)
    others = {
        "few slots": by_row(few.generate(asked, settings)),
        "another order": by_row(few.generate(shuffled, settings)),
        "one slot": by_row(one.generate(asked[:40], settings)),
        "alone": {request.row: next(few.generate([request], settings)) for request in asked[:40]},
        "without its group": by_row(few.generate(asked[::3], settings)),
    }
    for way, samples in others.items():
        for row, sample in samples.items():
            assert sample.token_ids == together[row].token_ids, (way, row)
            assert sample.logprobs == pytest.approx(together[row].logprobs, abs=1e-5), (way, row)
            assert sample.ended == together[row].ended


def test_the_same_call_gives_the_same_bits(tiny: Callable[[str], Tiny]) -> None:
    engine = tiny("llama").engine(max_num_seqs=5)
    asked = requests(num_prompts=6, n=3)
    settings = sampling(top_p=0.9, top_k=40, stop_token_ids=(5, 6, 7))
    first = list(engine.generate(asked, settings))
    list(engine.generate(requests(num_prompts=3, seed=5), sampling(max_tokens=3)))
    assert list(engine.generate(asked, settings)) == first


def test_seeds_differ_and_a_seed_repeats(tiny: Callable[[str], Tiny]) -> None:
    prompt = (5, 6, 7)
    asked = [Request(0, prompt, seed=1), Request(1, prompt, seed=2), Request(2, prompt, seed=1)]
    samples = by_row(tiny("llama").engine().generate(asked, sampling(max_tokens=20)))
    assert samples[0].token_ids == samples[2].token_ids != samples[1].token_ids


def test_first_tokens_follow_the_models_distribution(tiny: Callable[[str], Tiny]) -> None:
    model, prompt, num_samples = tiny("llama"), (9, 8, 7, 6), 6000
    asked = [Request(row, prompt, seed=row) for row in range(num_samples)]
    ids = [sample.token_ids[0] for sample in model.engine(max_num_seqs=1000).generate(asked, sampling(max_tokens=1))]
    counts = torch.bincount(torch.tensor(ids), minlength=320).double()
    with torch.no_grad():
        expected = model.hf(torch.tensor([prompt])).logits[0, -1].double().softmax(-1) * num_samples
    frequent = expected > 5
    statistic = ((counts - expected)[frequent] ** 2 / expected[frequent]).sum()
    freedom = frequent.sum()
    assert freedom > 50
    assert torch.special.gammaincc(freedom / 2, statistic / 2) > 1e-3


# -- when it ends ------------------------------------------------------------------------------------------------------


def test_nothing_follows_a_stop_token(tiny: Callable[[str], Tiny]) -> None:
    stop = frozenset(range(3, 40))
    samples = list(tiny("llama").engine(max_num_seqs=8).generate(requests(40), sampling(20, tuple(stop))))
    assert {sample.ended for sample in samples} == {True, False}
    for sample in samples:
        assert 1 <= len(sample.token_ids) <= 20
        assert len(sample.logprobs) == len(sample.token_ids)
        assert stop.isdisjoint(sample.token_ids[:-1])
        assert sample.ended == (sample.token_ids[-1] in stop)
        assert sample.ended or len(sample.token_ids) == 20


def test_a_stop_token_changes_nothing_before_it(tiny: Callable[[str], Tiny]) -> None:
    engine, asked, stop = tiny("llama").engine(), requests(20), frozenset(range(3, 40))
    free = by_row(engine.generate(asked, sampling(20)))
    for row, sample in by_row(engine.generate(asked, sampling(20, tuple(stop)))).items():
        assert sample.token_ids == free[row].token_ids[: len(sample.token_ids)]


def test_ignore_eos_goes_on_to_the_end(tiny: Callable[[str], Tiny]) -> None:
    everything = tuple(range(320))
    for sample in tiny("llama").engine().generate(requests(5), sampling(9, everything, ignore_eos=True)):
        assert len(sample.token_ids) == 9
        assert not sample.ended
    for sample in tiny("llama").engine().generate(requests(5), sampling(9, everything)):
        assert len(sample.token_ids) == 1
        assert sample.ended


def test_a_stop_token_in_the_prompt_is_no_end(tiny: Callable[[str], Tiny]) -> None:
    sample = next(tiny("llama").engine().generate([Request(0, (2, 2), seed=0)], sampling(6, (2,))))
    assert len(sample.token_ids) == 6 or sample.token_ids[-1] == 2


# -- when it comes -----------------------------------------------------------------------------------------------------


def test_a_finished_sample_comes_at_once_and_the_next_takes_its_place(tiny: Callable[[str], Tiny]) -> None:
    stop = tuple(range(3, 60))
    asked = [Request(row, (7,), seed=row) for row in range(60)]
    engine, seen = tiny("llama").engine(max_num_seqs=4), 0
    with embedded_tokens() as sizes:
        for sample in engine.generate(asked, sampling(30, stop)):
            assert len(sample.token_ids) <= len(sizes)
            seen += len(sample.token_ids)
            assert sum(sizes) < seen + 4 * 30  # nothing ran on behind a finished one
        assert sum(sizes) == seen
        assert sizes[: len(sizes) // 2] == [4] * (len(sizes) // 2)


def test_a_prompt_is_computed_once_for_its_group(tiny: Callable[[str], Tiny]) -> None:
    prompt = tuple(range(10, 40))
    asked = [Request(row, prompt, seed=row) for row in range(12)]
    engine = tiny("llama").engine(max_num_seqs=4)
    with embedded_tokens() as sizes:
        samples = list(engine.generate(asked, sampling(15, tuple(range(3, 30)))))
    assert len({len(sample.token_ids) for sample in samples}) > 3
    assert sum(sizes) == len(prompt) - 1 + sum(len(sample.token_ids) for sample in samples)


def test_more_prompt_tokens_than_one_forward_pass_takes(
    tiny: Callable[[str], Tiny], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, asked = tiny("llama").engine(), requests(20, n=2)
    expected = by_row(engine.generate(asked, sampling()))
    monkeypatch.setattr("verl.generation.inprocess.batch._PREFILL_TOKENS", 25)
    with embedded_tokens() as sizes:
        assert by_row(engine.generate(asked, sampling())).keys() == expected.keys()
    prompts = {request.prompt_ids for request in asked}
    prefills = sizes[:-12]
    assert sum(prefills) == sum(len(prompt) - 1 for prompt in prompts)
    assert len(prefills) > 5
    assert all(size <= max(25, *map(len, prompts)) for size in prefills)
    for row, sample in by_row(engine.generate(asked, sampling())).items():
        assert sample.token_ids == expected[row].token_ids


def test_progress_is_reported_throughout(tiny: Callable[[str], Tiny]) -> None:
    calls: list[None] = []
    engine = tiny("llama").engine(max_num_seqs=2, on_progress=lambda: calls.append(None))
    samples = engine.generate(requests(4), sampling(10))
    assert not calls
    next(samples)
    assert len(calls) >= 10
    rest = list(samples)
    assert len(calls) >= 20 + 1 + len(rest)


def test_no_requests_no_samples(tiny: Callable[[str], Tiny]) -> None:
    assert list(tiny("llama").engine().generate([], sampling())) == []


def test_a_call_that_is_given_up_leaves_nothing_behind(tiny: Callable[[str], Tiny]) -> None:
    engine, asked = tiny("llama").engine(max_num_seqs=3), requests(9)
    expected = list(engine.generate(asked, sampling()))
    abandoned = engine.generate(asked, sampling(stop_token_ids=tuple(range(200))))
    next(abandoned)
    del abandoned
    assert list(engine.generate(asked, sampling())) == expected


# -- weights -----------------------------------------------------------------------------------------------------------


def test_without_weights_it_refuses(tiny: Callable[[str], Tiny]) -> None:
    model = tiny("llama")
    engine = TorchEngine(str(model.folder), torch.float32, torch.device("cpu"), 4, False, lambda: None)
    with pytest.raises(RuntimeError, match="before load"):
        engine.generate(requests(1), sampling())
    model.copy_weights(engine)
    engine.commit(version=3)
    assert len(list(engine.generate(requests(1), sampling()))) == 1
    engine.close()
    with pytest.raises(RuntimeError, match="closed"):
        engine.generate(requests(1), sampling())


def test_a_forgotten_parameter_shows(tiny: Callable[[str], Tiny]) -> None:
    model = tiny("llama")
    engine = TorchEngine(str(model.folder), torch.float32, torch.device("cpu"), 4, False, lambda: None)
    source = dict(model.hf.named_parameters())
    for name, target in engine.weights().items():
        if name != "model.layers.1.mlp.up_proj.weight":
            target.copy_(source[name])
    engine.commit(version=0)
    with pytest.raises(FloatingPointError, match="row 0"):
        list(engine.generate(requests(1), sampling()))


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_new_weights_are_used_and_a_tied_head_follows(tiny: Callable[[str], Tiny], architecture: str) -> None:
    model = tiny(architecture)
    engine, asked, greedy = model.engine(), requests(3), sampling(temperature=0.0)
    assert ("lm_head.weight" in engine.weights()) is (architecture == "llama")
    before = by_row(engine.generate(asked, greedy))
    with torch.no_grad():
        for tensor in engine.weights().values():
            tensor.mul_(0.9)
    engine.commit(version=1)
    with torch.no_grad():
        saved = [parameter.clone() for parameter in model.hf.parameters()]
        for parameter in model.hf.parameters():
            parameter.mul_(0.9)
        try:
            for row, sample in by_row(engine.generate(asked, greedy)).items():
                ids = torch.tensor([[*asked[row].prompt_ids, *sample.token_ids]])
                logits = model.hf(ids, use_cache=False).logits[0, len(asked[row].prompt_ids) - 1 : -1]
                expected = logits.log_softmax(-1).max(-1)
                assert sample.token_ids == expected.indices.tolist()
                assert sample.logprobs == pytest.approx(expected.values.tolist(), abs=1e-5)
                assert sample.logprobs != pytest.approx(before[row].logprobs, abs=1e-3)
        finally:
            for parameter, value in zip(model.hf.parameters(), saved, strict=True):
                parameter.copy_(value)


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_a_trainers_own_tensors_are_computed_with_and_not_copied(
    tiny: Callable[[str], Tiny], architecture: str
) -> None:
    """All but one, which the trainer has in part, and one that it has in another dtype."""
    model = tiny(architecture)
    trained = {name: parameter.detach().clone() for name, parameter in model.hf.named_parameters()}
    whole = dict(trained)
    part, other = "model.norm.weight", "model.layers.0.mlp.up_proj.weight"
    trained[part], trained[other] = trained[part][:3], trained[other].double()
    engine, asked, greedy = model.engine(), requests(3), sampling(temperature=0.0)
    expected = by_row(engine.generate(asked, greedy))
    engine.adopt(trained)
    for name, tensor in engine.weights().items():
        assert (tensor.data_ptr() == trained[name].data_ptr()) is (name not in (part, other)), name
    assert by_row(engine.generate(asked, greedy)) == expected
    whole["model.embed_tokens.weight"].mul_(0.5)  # the trainer's step, in place
    engine.begin_load()
    engine.commit(version=1)
    changed = by_row(engine.generate(asked, greedy))
    model.copy_weights(fresh := TorchEngine(str(model.folder), torch.float32, torch.device("cpu"), 64, False, _nothing))
    fresh.weights()["model.embed_tokens.weight"].copy_(whole["model.embed_tokens.weight"])
    fresh.commit(version=1)
    assert changed == by_row(fresh.generate(asked, greedy)) != expected
    engine.close()
    assert torch.equal(trained["model.embed_tokens.weight"], whole["model.embed_tokens.weight"]), "the trainer's stay"


@pytest.mark.parametrize("architecture", ["gemma3", "qwen3_moe"])
@torch.no_grad()
def test_it_computes_with_what_others_write_into_its_shared_parameters(
    tiny: Callable[[str], Tiny], architecture: str
) -> None:
    """A tied embedding, and experts of which a few are shared."""
    model = tiny(architecture)
    engine, asked, greedy = model.engine(), requests(3), sampling(temperature=0.0)
    before = by_row(engine.generate(asked, greedy))
    names = [name for name in engine.weights() if "embed" in name or ".1." in name]
    address = engine.share(names)
    assert address is not None and list(address.views) == names
    assert by_row(engine.generate(asked, greedy)) == before, "values come along"
    engine.begin_load()
    for name, tensor in address.open().items():
        assert torch.equal(tensor, engine.weights()[name]), name
        tensor.mul_(0.5)
    engine.commit(version=1)
    after = by_row(engine.generate(asked, greedy))
    fresh = model.engine()
    for name in names:
        fresh.weights()[name].mul_(0.5)
    fresh.commit(version=1)
    assert after == by_row(fresh.generate(asked, greedy)) != before
    engine.close()
    with pytest.raises(FileNotFoundError):
        address.open()


def test_parameters_that_nobody_else_writes_stay_where_they_are(tiny: Callable[[str], Tiny]) -> None:
    engine = tiny("llama").engine()
    before = {name: tensor.data_ptr() for name, tensor in engine.weights().items()}
    assert engine.share([]) is None
    assert engine.share(["model.norm.weight"]) is not None
    after = {name: tensor.data_ptr() for name, tensor in engine.weights().items()}
    assert {name for name in before if before[name] != after[name]} == {"model.norm.weight"}


def test_nothing_is_generated_within_a_load(tiny: Callable[[str], Tiny]) -> None:
    engine = tiny("llama").engine()
    engine.begin_load()
    with pytest.raises(RuntimeError, match="no whole weights"):
        engine.generate(requests(1), sampling())
    engine.commit(version=5)
    (sample,) = engine.generate(requests(1), sampling())
    assert sample.version == 5


def _nothing() -> None:
    """No progress is shown."""


# -- what cannot be served ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        (sampling(temperature=-0.1), "rollout.temperature is -0.1"),
        (sampling(top_p=0.0), "rollout.top_p is 0.0"),
        (sampling(top_p=1.5), "rollout.top_p is 1.5"),
        (sampling(top_k=-1), "rollout.top_k is -1"),
        (sampling(max_tokens=0), "max_response_length is 0"),
        (sampling(max_tokens=511), "511 response tokens exceed the 512 tokens"),
    ],
)
def test_settings_are_checked_before_the_first_sample_is_asked_for(
    tiny: Callable[[str], Tiny], settings: Sampling, names: str
) -> None:
    with pytest.raises(UserError, match=names):
        tiny("llama").engine().generate([Request(0, (1, 2), seed=0)], settings)


def test_requests_are_checked(tiny: Callable[[str], Tiny]) -> None:
    engine = tiny("llama").engine()
    with pytest.raises(UserError, match="row 4 is empty"):
        engine.generate([Request(4, (), seed=0)], sampling())
    with pytest.raises(UserError, match="same row"):
        engine.generate([Request(4, (1,), seed=0), Request(4, (2,), seed=0)], sampling())
    with pytest.raises(UserError, match="max_num_seqs is 0"):
        tiny("llama").engine(max_num_seqs=0)
