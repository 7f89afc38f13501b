"""The order of prompts: complete, reproducible, and the same after a resume."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl.data.loader import PromptLoader, epoch_order, validation_batches
from verl.data.prompts import Prompt, PromptBatch


class Numbered:
    """Prompts whose index is ten times their position, to tell the two apart."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def prompt(self, position: int) -> Prompt:
        if not 0 <= position < self.size:
            raise IndexError(position)
        return Prompt((position,), 10 * position, "unit", str(position), {})


ORDER_SEED_1_EPOCH_0 = [5, 7, 6, 1, 0, 2, 3, 4]


def indices(batch: PromptBatch) -> list[int]:
    return [prompt.index for prompt in batch.prompts]


@given(st.integers(0, 300), st.integers(0, 2**40), st.integers(0, 1000))
def test_an_order_is_a_permutation(size: int, seed: int, epoch: int) -> None:
    assert sorted(epoch_order(size, seed, epoch)) == list(range(size))


def test_the_order_is_the_same_for_ever() -> None:
    """A change would silently break the resuming of older checkpoints.

    Written down from `for i in 0 1 2 3 4 5 6 7; do echo "$(printf 1/0/$i | b2sum) $i"; done | sort`.
    """
    assert epoch_order(8, seed=1, epoch=0) == ORDER_SEED_1_EPOCH_0
    assert epoch_order(8, seed=1, epoch=1) != ORDER_SEED_1_EPOCH_0
    assert epoch_order(8, seed=2, epoch=0) != ORDER_SEED_1_EPOCH_0


def test_all_places_are_alike() -> None:
    """Over many seeds each prompt comes first about equally often."""
    first = [epoch_order(4, seed, 0)[0] for seed in range(2000)]
    counts = [first.count(prompt) for prompt in range(4)]
    assert all(400 < count < 600 for count in counts)  # 500 expected, standard deviation 19


@given(st.data())
def test_an_epoch_serves_each_prompt_at_most_once(data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 40))
    batch_size = data.draw(st.integers(1, size))
    loader = PromptLoader(
        Numbered(size), batch_size, seed=data.draw(st.integers(0, 99)), shuffle=data.draw(st.booleans())
    )
    for epoch in range(3):
        served: list[int] = []
        for _ in range(loader.batches_per_epoch):
            batch = loader.next_batch(step=0)
            assert loader.epoch == epoch
            assert batch.weights == (1.0,) * batch_size
            served += indices(batch)
        assert len(served) == len(set(served)) == size // batch_size * batch_size


def test_without_shuffling_files_are_read_in_order() -> None:
    loader = PromptLoader(Numbered(5), 2, seed=1, shuffle=False)
    assert [indices(loader.next_batch(step)) for step in range(4)] == [[0, 10], [20, 30], [0, 10], [20, 30]]


def test_epochs_differ_when_shuffled() -> None:
    loader = PromptLoader(Numbered(32), 32, seed=1, shuffle=True)
    assert indices(loader.next_batch(0)) != indices(loader.next_batch(1))


def test_a_batch_carries_its_step() -> None:
    assert PromptLoader(Numbered(2), 2, seed=1, shuffle=True).next_batch(step=17).step == 17


@given(st.data())
def test_a_resumed_loader_serves_what_the_first_would_have(data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 30))
    batch_size = data.draw(st.integers(1, size))
    served = data.draw(st.integers(0, 20))
    undisturbed = PromptLoader(Numbered(size), batch_size, seed=5, shuffle=True)
    expected = [undisturbed.next_batch(step) for step in range(served + 10)]
    first = PromptLoader(Numbered(size), batch_size, seed=5, shuffle=True)
    for step in range(served):
        first.next_batch(step)
    state = json.loads(json.dumps(first.state_dict()))
    second = PromptLoader(Numbered(size), batch_size, seed=5, shuffle=True)
    second.load_state_dict(state)
    assert second.epoch == first.epoch
    assert [second.next_batch(step) for step in range(served, served + 10)] == expected[served:]


def test_a_state_is_a_snapshot() -> None:
    """Reading one batch ahead of the one that is trained leaves the trained one's state alone."""
    loader = PromptLoader(Numbered(8), 2, seed=1, shuffle=True)
    loader.next_batch(0)
    state = loader.state_dict()
    ahead = loader.next_batch(1)
    loader.load_state_dict(state)
    assert loader.next_batch(1) == ahead


def test_the_batch_size_may_change_in_between() -> None:
    loader = PromptLoader(Numbered(12), 4, seed=1, shuffle=False)
    loader.next_batch(0)
    other = PromptLoader(Numbered(12), 3, seed=1, shuffle=False)
    other.load_state_dict(loader.state_dict())
    assert indices(other.next_batch(1)) == [40, 50, 60]


@pytest.mark.parametrize(
    ("size", "seed", "shuffle", "said"),
    [
        (9, 1, True, "usable prompts in data.train_files: 8 in the checkpoint, 9 now"),
        (8, 2, True, "trainer.seed: 1 in the checkpoint, 2 now"),
        (8, 1, False, "data.shuffle: True in the checkpoint, False now"),
    ],
)
def test_a_state_of_another_order_is_refused(size: int, seed: int, shuffle: bool, said: str) -> None:
    state = PromptLoader(Numbered(8), 2, seed=1, shuffle=True).state_dict()
    with pytest.raises(ValueError, match=said):
        PromptLoader(Numbered(size), 2, seed=seed, shuffle=shuffle).load_state_dict(state)


def test_less_than_one_batch_is_refused() -> None:
    with pytest.raises(ValueError, match=r"has 3 usable prompts, fewer than data\.train_batch_size=4"):
        PromptLoader(Numbered(3), 4, seed=1, shuffle=True)
    with pytest.raises(ValueError, match="at least 1"):
        PromptLoader(Numbered(3), 0, seed=1, shuffle=True)


@given(st.integers(1, 40), st.none() | st.integers(1, 50), st.integers(1, 8))
def test_validation_covers_each_prompt_once(size: int, batch_size: int | None, multiple_of: int) -> None:
    batches = list(validation_batches(Numbered(size), batch_size, multiple_of, step=3))
    alive = [
        prompt.index
        for batch in batches
        for prompt, weight in zip(batch.prompts, batch.weights, strict=True)
        if weight == 1.0
    ]
    assert alive == [10 * position for position in range(size)]
    assert {batch.step for batch in batches} == {3}
    for batch in batches:
        assert len(batch.prompts) % multiple_of == 0
        assert set(batch.weights) <= {0.0, 1.0}
        assert len(batch.prompts) <= max(batch_size or size + multiple_of, multiple_of)
    num_dead = sum(weight == 0.0 for batch in batches for weight in batch.weights)
    assert num_dead < multiple_of  # in the last batch alone
    assert all(weight == 1.0 for batch in batches[:-1] for weight in batch.weights)


def test_dead_prompts_come_last_and_are_copies() -> None:
    (batch,) = validation_batches(Numbered(3), None, 4, step=0)
    assert indices(batch) == [0, 10, 20, 20]
    assert batch.weights == (1.0, 1.0, 1.0, 0.0)
