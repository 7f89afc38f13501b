"""Sequences packed into micro-batches under a token budget: pure, no padding beyond the tail of a packed row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

ROW_STRETCHES = (1.0, 1.25, 1.5, 2.0, 2.5, 3.0, 4.0)
"""Row capacities that are tried under a dense mask, in lengths of the longest sequence."""
DENSE_ROW = 1500
"""Tokens of a row whose dense attention takes as long as all else. SmolLM2-135M on a CPU, forward and backward: a token
in a row of 432 takes 1.16 times as long as in one of 108, and in one of 864 1.37 times."""


@dataclass(frozen=True)
class MicroBatch:
    """Some of a rank's sequences, laid end to end in the rows of a [batch, time] rectangle."""

    input_ids: Tensor
    """[batch, time]"""
    position_ids: Tensor
    """[batch, time]; restarts at 0 where a sequence begins, which is what separates sequences in attention."""
    select: Tensor
    """[k] flat places in the rectangle whose hidden state is used."""
    targets: Tensor
    """[k] the token that follows each of them."""
    tokens: Tensor
    """[k] where each of them stands in the rank's flat outputs; of a part of a micro-batch, in the whole's."""

    def to(self, device: torch.device) -> MicroBatch:
        """What the model reads, on the device; `tokens` stays where the rank's flat outputs are."""

        def there(tensor: Tensor) -> Tensor:
            return tensor.to(device, non_blocking=True)

        return MicroBatch(
            there(self.input_ids), there(self.position_ids), there(self.select), there(self.targets), self.tokens
        )

    def part(self, index: int, parts: int) -> MicroBatch:
        """One of `parts` equal stretches of the time of all rows, with the outputs that are made in it.

        An output's target is the token after it, in this stretch or the next.
        """
        whole = self.input_ids.shape[1]
        time = whole // parts
        assert time * parts == whole, f"{whole} tokens do not split over {parts} ranks"
        stretch = slice(index * time, (index + 1) * time)
        (here,) = (self.select % whole // time == index).nonzero(as_tuple=True)
        row, at = self.select[here] // whole, self.select[here] % whole
        ids, positions = self.input_ids[:, stretch], self.position_ids[:, stretch]
        return MicroBatch(ids, positions, row * time + at - stretch.start, self.targets[here], here)


@dataclass(frozen=True)
class Sequences:
    """A rank's sequences and the part of each that the head looks at.

    `first[i] .. first[i] + count[i]` are the tokens of sequence i that the outputs speak of: its response for log-probs
    and values (each predicted at the token before it), its last token alone for a score.
    """

    ids: tuple[Tensor, ...]
    first: tuple[int, ...]
    count: tuple[int, ...]
    shift: int
    """1: the output of token t is made at t - 1; 0: at t itself."""

    @classmethod
    def responses(cls, prompts: Sequence[Tensor], responses: Sequence[Tensor]) -> Sequences:
        """Outputs for every response token, at the token before it: log-probs and values."""
        assert all(len(prompt) for prompt in prompts), "the first response token is predicted at a prompt's last one"
        ids = tuple(torch.cat(pair) for pair in zip(prompts, responses, strict=True))
        return cls(ids, tuple(len(p) for p in prompts), tuple(len(r) for r in responses), shift=1)

    @classmethod
    def last_tokens(cls, prompts: Sequence[Tensor], responses: Sequence[Tensor]) -> Sequences:
        """One output a sequence, at its last token: scores."""
        ids = tuple(torch.cat(pair) for pair in zip(prompts, responses, strict=True))
        return cls(ids, tuple(len(i) - 1 for i in ids), (1,) * len(ids), shift=0)

    @property
    def num_outputs(self) -> int:
        return sum(self.count)

    @property
    def lengths(self) -> list[int]:
        return [len(i) for i in self.ids]


def plan_micro_batches(
    lengths: Sequence[int], rows: Sequence[int], max_tokens: int, row_capacity: int | None, multiple_of: int = 1
) -> list[list[list[int]]]:
    """Micro-batches of packed rows of sequence numbers: `plan[m][b]` lie end to end in row b of micro-batch m.

    A row takes up to `row_capacity` tokens and a micro-batch up to `max_tokens`, both raised to the longest sequence.
    Where `row_capacity` is None, attention has a dense mask, and the capacity is the one that costs the least: short
    rows leave more of the rectangle empty, long ones have more to attend to. `multiple_of`: what `pack` lengthens rows
    to.
    """
    if not rows:
        return []
    longest = _up(max(lengths[r] for r in rows), multiple_of)
    limit = max(max_tokens, longest)
    if row_capacity is not None:
        return _first_fit(lengths, rows, limit, max(row_capacity // multiple_of * multiple_of, longest))
    capacities = {_up(int(longest * stretch), multiple_of) for stretch in ROW_STRETCHES}
    plans = (_first_fit(lengths, rows, limit, c) for c in sorted(capacities) if c <= limit)
    return min(plans, key=lambda plan: _cost(lengths, plan, multiple_of))


def _first_fit(lengths: Sequence[int], rows: Sequence[int], max_tokens: int, capacity: int) -> list[list[list[int]]]:
    """By decreasing length, so that rows of a micro-batch are about equally full."""
    bins: list[list[int]] = []
    room: list[int] = []
    for row in sorted(rows, key=lambda r: (-lengths[r], r)):
        fit = next((i for i, left in enumerate(room) if lengths[row] <= left), None)
        if fit is None:
            bins.append([])
            room.append(capacity)
            fit = len(bins) - 1
        bins[fit].append(row)
        room[fit] -= lengths[row]
    fullest_first = sorted(range(len(bins)), key=lambda i: (room[i], i))
    per_batch = max(1, max_tokens // capacity)
    return [[bins[i] for i in fullest_first[at : at + per_batch]] for at in range(0, len(bins), per_batch)]


def _cost(lengths: Sequence[int], plan: Sequence[Sequence[Sequence[int]]], multiple_of: int) -> int:
    """Places of all rectangles, each dearer by what it attends to. Whole, so that equal plans cost the same."""
    times = [_up(max(sum(lengths[i] for i in row) for row in batch), multiple_of) for batch in plan]
    return sum(len(batch) * time * (DENSE_ROW + time) for batch, time in zip(plan, times, strict=True))


def _up(number: int, multiple_of: int) -> int:
    return -(-number // multiple_of) * multiple_of


def pack(sequences: Sequences, rows: Sequence[Sequence[int]], multiple_of: int = 1) -> MicroBatch:
    """The rectangle of one planned micro-batch, its time a multiple of `multiple_of`, so that it can be split.

    The tail of a short row goes on as its last sequence: attention is causal, so that nobody sees it.
    """
    time = _up(max(sum(len(sequences.ids[i]) for i in row) for row in rows), multiple_of)
    input_ids = torch.zeros(len(rows), time, dtype=torch.int64)
    position_ids = torch.zeros(len(rows), time, dtype=torch.int64)
    starts = [0]
    for count in sequences.count:
        starts.append(starts[-1] + count)
    select, targets, tokens = [], [], []
    for b, row in enumerate(rows):
        at = 0
        for i in row:
            ids = sequences.ids[i]
            input_ids[b, at : at + len(ids)] = ids
            position_ids[b, at : at + len(ids)] = torch.arange(len(ids))
            wanted = torch.arange(sequences.first[i], sequences.first[i] + sequences.count[i])
            select.append(b * time + at + wanted - sequences.shift)
            targets.append(ids[wanted])
            tokens.append(torch.arange(starts[i], starts[i + 1]))
            at += len(ids)
        position_ids[b, at:] = torch.arange(time - at) + (position_ids[b, at - 1] + 1 if at else 0)
    return MicroBatch(input_ids, position_ids, torch.cat(select), torch.cat(targets), torch.cat(tokens))


def dummy_micro_batch(time: int = 1) -> MicroBatch:
    """Keeps a rank with fewer micro-batches in step with its peers: `time` tokens, no output, no gradient."""
    nothing = torch.empty(0, dtype=torch.int64)
    ids, positions = torch.zeros(1, time, dtype=torch.int64), torch.arange(time)[None]
    return MicroBatch(ids, positions, nothing, nothing, nothing)
