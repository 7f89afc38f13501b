"""The order in which prompts are served: the same on every rank and for every mesh, and resumable at any batch."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Protocol, TypedDict

from verl.data.prompts import Prompt, PromptBatch
from verl.errors import UserError


class PromptSequence(Protocol):
    def __len__(self) -> int: ...

    def prompt(self, position: int) -> Prompt: ...


class LoaderState(TypedDict):
    """Where a loader stands, and what its order depends on."""

    epoch: int
    position: int
    """Prompts of the epoch that were served."""
    seed: int
    shuffle: bool
    num_prompts: int


def epoch_order(num_prompts: int, seed: int, epoch: int) -> list[int]:
    """A permutation of `range(num_prompts)` that depends on nothing but the arguments.

    The positions sorted by a hash: no library's random stream, which a new version may change, decides the order.
    """
    key = f"{seed}/{epoch}/".encode()
    return sorted(range(num_prompts), key=lambda position: hashlib.blake2b(key + b"%d" % position).digest())


class PromptLoader:
    """Training batches of `batch_size` prompts, epoch after epoch.

    An epoch has `len(dataset) // batch_size` batches; the prompts left over wait for the next epoch's order.
    """

    def __init__(self, dataset: PromptSequence, batch_size: int, seed: int, shuffle: bool) -> None:
        """Raises `ValueError` if the data set has not one batch."""
        if batch_size < 1:
            raise UserError(f"data.train_batch_size is {batch_size}; it must be at least 1")
        if len(dataset) < batch_size:
            raise UserError(
                f"data.train_files has {len(dataset)} usable prompts, fewer than data.train_batch_size={batch_size}: "
                "lower it, or give more prompts."
            )
        self._dataset = dataset
        self._batch_size = batch_size
        self._seed = seed
        self._shuffle = shuffle
        self._epoch = 0
        self._position = 0
        self._order = self._epoch_order()

    @property
    def batches_per_epoch(self) -> int:
        return len(self._dataset) // self._batch_size

    @property
    def epoch(self) -> int:
        """The epoch, from 0, of the batch served last."""
        return self._epoch

    def next_batch(self, step: int) -> PromptBatch:
        """The next prompts, for `step`. Epochs never end; how many steps there are is the caller's affair."""
        if self._position + self._batch_size > len(self._dataset):
            self._epoch += 1
            self._position = 0
            self._order = self._epoch_order()
        chosen = self._order[self._position : self._position + self._batch_size]
        self._position += self._batch_size
        prompts = tuple(self._dataset.prompt(position) for position in chosen)
        return PromptBatch(prompts, (1.0,) * len(prompts), step)

    def state_dict(self) -> LoaderState:
        """The place after the batch served last. A caller that reads ahead keeps the state of the batch it trained."""
        return LoaderState(
            epoch=self._epoch,
            position=self._position,
            seed=self._seed,
            shuffle=self._shuffle,
            num_prompts=len(self._dataset),
        )

    def load_state_dict(self, state: LoaderState) -> None:
        """Goes on after the batch at which `state` was taken. The number of ranks does not matter, and the batch size
        may have changed. Raises `ValueError` if the prompts would come in another order than before.
        """
        own = self.state_dict()
        settings = {
            "seed": "trainer.seed",
            "shuffle": "data.shuffle",
            "num_prompts": "usable prompts in data.train_files",
        }
        changed = [
            f"{setting}: {state[key]} in the checkpoint, {own[key]} now"
            for key, setting in settings.items()
            if state[key] != own[key]
        ]
        if changed:
            raise UserError(
                f"The checkpoint's place in the training prompts means nothing here, since their order has changed "
                f"({'; '.join(changed)}). Restore the setting, or start afresh with trainer.resume=never."
            )
        self._epoch = state["epoch"]
        self._position = state["position"]
        self._order = self._epoch_order()

    def _epoch_order(self) -> list[int]:
        if not self._shuffle:
            return list(range(len(self._dataset)))
        return epoch_order(len(self._dataset), self._seed, self._epoch)


def validation_batches(
    dataset: PromptSequence, batch_size: int | None, multiple_of: int, step: int
) -> Iterator[PromptBatch]:
    """Every prompt once, in order, in batches whose number of prompts is a multiple of `multiple_of` (what every role's
    data-parallel ranks divide).

    `batch_size` is the most prompts at once, rounded down to such a multiple but never below one; None: all of them.
    The last batch is filled up with copies of its last prompt at weight 0.
    """
    if multiple_of < 1 or (batch_size is not None and batch_size < 1):
        raise UserError(f"data.val_batch_size is {batch_size} and must be at least 1 (in multiples of {multiple_of})")
    limit = len(dataset) if batch_size is None else max(batch_size // multiple_of, 1) * multiple_of
    for start in range(0, len(dataset), limit):
        stop = min(start + limit, len(dataset))
        prompts = [dataset.prompt(position) for position in range(start, stop)]
        num_dead = -len(prompts) % multiple_of
        weights = (1.0,) * len(prompts) + (0.0,) * num_dead
        prompts += [prompts[-1]] * num_dead
        yield PromptBatch(tuple(prompts), weights, step)
