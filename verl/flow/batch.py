"""Rows of a batch and the columns that say on which ranks they live."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from verl.flow.placement import Home, Placement


@dataclass(frozen=True)
class Rows:
    """Ragged rows on the CPU: `values` [total], one after the other, and their `lengths` [rows] (int64)."""

    values: Tensor
    lengths: Tensor

    @classmethod
    def ragged(cls, rows: Sequence[Any], dtype: torch.dtype) -> Rows:
        """Rows of different lengths, each a list or a 1-D tensor."""
        parts = [torch.as_tensor(row, dtype=dtype, device="cpu") for row in rows]
        values = torch.cat(parts) if parts else torch.empty(0, dtype=dtype)
        return cls(values, torch.tensor([len(p) for p in parts], dtype=torch.int64))

    @classmethod
    def scalars(cls, values: Any, dtype: torch.dtype) -> Rows:
        """One value a row."""
        values = torch.as_tensor(values, dtype=dtype, device="cpu")
        return cls(values, torch.ones(len(values), dtype=torch.int64))

    @classmethod
    def cat(cls, parts: Sequence[Rows]) -> Rows:
        return cls(torch.cat([p.values for p in parts]), torch.cat([p.lengths for p in parts]))

    def like(self, values: Tensor) -> Rows:
        """Other values for the same tokens."""
        assert values.shape == self.values.shape, (values.shape, self.values.shape)
        return Rows(values.to("cpu"), self.lengths)

    def split(self) -> tuple[Tensor, ...]:
        return torch.split(self.values, self.lengths.tolist())

    def scalar(self) -> Tensor:
        """[rows]: the values of rows that hold one each."""
        assert len(self.values) == len(self.lengths), "these rows hold more than one value each"
        return self.values

    def spread(self, like: Rows) -> Tensor:
        """[total of `like`]: a value a row, repeated for each token of the row."""
        return self.scalar().repeat_interleave(like.lengths)

    def take(self, rows: range) -> Rows:
        """Adjacent rows."""
        start = int(self.lengths[: rows.start].sum())
        lengths = self.lengths[rows.start : rows.stop]
        return Rows(self.values[start : start + int(lengths.sum())], lengths)

    def __len__(self) -> int:
        return len(self.lengths)


class Column:
    """One column of a batch of `size` rows: on a rank of one of its homes its rows there, elsewhere where they are."""

    def __init__(self, name: str, size: int, homes: Sequence[Home], rank: int) -> None:
        self.name, self.size, self.rank = name, size, rank
        self.homes = {home.role: home for home in homes}
        self._local: dict[str, Rows | Callable[[], Rows]] = {}

    @classmethod
    def produced(cls, name: str, size: int, placement: Placement, rank: int, rows: Rows | None) -> Column:
        """A role's output; `rows` is None on a rank that holds none of it."""
        column = cls(name, size, [placement.outputs], rank)
        if rows is not None:
            assert len(rows) == len(placement.outputs.rows(rank, size)), (name, len(rows), size)
            column._local[placement.role] = rows
        return column

    def living_also_on(self, homes: Sequence[Home]) -> Column:
        """The same column with further homes, whose rows are `put` by whoever brings them there."""
        column = Column(self.name, self.size, [*self.homes.values(), *homes], self.rank)
        column._local = {role: held for role, held in self._local.items() if self.homes[role] == column.homes[role]}
        return column

    def put(self, role: str, rows: Rows | Callable[[], Rows]) -> None:
        """Rows of this rank, or, while they are on their way, what waits for them."""
        self._local[role] = rows

    def on(self, placement: Placement) -> Rows:
        """This rank's rows for the role; waits for them if they are on their way."""
        return self.held(placement.role)

    def held(self, role: str) -> Rows:
        held = self._local.get(role)
        if held is None:
            raise RuntimeError(
                f"rank {self.rank} reads '{self.name}' for {role}, but it lives on {self._places()}. "
                f"Hand it over to {role} first, or branch on agree(...)."
            )
        if not isinstance(held, Rows):
            held = self._local[role] = held()
        return held

    def _refuse(self, asked: str) -> RuntimeError:
        return RuntimeError(
            f"rank {self.rank} asks the {asked} of '{self.name}', which lives on {self._places()}: the ranks would "
            f"take different branches. Branch on agree(value, source), or read the rows with .on(placement)."
        )

    def _places(self) -> str:
        return "; ".join(f"{home.role} ranks {home.ranks}" for home in self.homes.values())

    def __bool__(self) -> bool:
        raise self._refuse("truth")

    def __len__(self) -> int:
        raise self._refuse("length")


@dataclass(frozen=True)
class Record:
    """A batch: columns, and records of columns. A column that an algorithm does not need is None."""

    MODEL_INPUTS: ClassVar[frozenset[str]] = frozenset()
    """Columns by which a model's micro-batches are made: all stages of a pipeline need them. What is said of a model's
    outputs is needed where those are."""

    def columns(self) -> Iterator[tuple[str, Column]]:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Record):
                yield from ((f"{field.name}.{name}", column) for name, column in value.columns())
            elif value is not None:
                yield field.name, value

    def home(self, column: str, placement: Placement) -> Home:
        """Where a role needs the column of this name, which is as in `columns`."""
        outer, _, inner = column.partition(".")
        if inner:
            return getattr(self, outer).home(inner, placement)
        return placement.inputs if column in self.MODEL_INPUTS else placement.outputs

    def with_columns(self, new: dict[str, Column]) -> Self:
        """The same record with other columns at these names; `responses.weight` is a column of a record inside."""
        unknown = [name for name in new if name.split(".")[0] not in vars(self)]
        assert not unknown, f"{type(self).__name__} has no {unknown}"
        changes: dict[str, Any] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Record):
                inner = {
                    name.split(".", 1)[1]: column for name, column in new.items() if name.startswith(f"{field.name}.")
                }
                changes[field.name] = value.with_columns(inner)
            elif field.name in new:
                changes[field.name] = new[field.name]
        return replace(self, **changes)


@dataclass(frozen=True)
class Responses(Record):
    """What the rollout made. Row r is sample r mod n of prompt r // n."""

    MODEL_INPUTS: ClassVar[frozenset[str]] = frozenset({"prompt_ids", "response_ids", "weight"})

    prompt_ids: Column
    """int64, ragged."""
    response_ids: Column
    """int64, ragged; the stop token that ended a response is its last one. Empty in a dead row."""
    rollout_logprobs: Column
    """float32, like response_ids: under the distribution that was sampled from."""
    ended: Column
    """bool, one a row: a stop token ended it."""
    weight: Column
    """float32, one a row: 1, or 0 for a dead row, which has no reward, loss, metric or written sample."""
    version: Column
    """int64, one a row: the version of the weights that sampled it."""


@dataclass(frozen=True)
class Experience(Record):
    """Responses and what the roles say of them. Token columns are float32, ragged like response_ids."""

    responses: Responses
    old_logprobs: Column
    scores: Column
    """float32, one a row."""
    ref_logprobs: Column | None = None
    values: Column | None = None
    advantages: Column | None = None
    returns: Column | None = None
