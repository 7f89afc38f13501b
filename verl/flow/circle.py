"""Ranks that do something together, and what goes wrong on some of them is known to all."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch.distributed as dist

from verl.errors import SharedError, UserError
from verl.flow.meeting import node_name
from verl.flow.signs import Signs

Result = TypeVar("Result")


@dataclass(frozen=True)
class Circle:
    """One thread of each rank of a group; no other thread speaks on it."""

    group: dist.ProcessGroup
    """gloo"""
    signs: Signs
    """Of the thread."""
    what: str
    """That they do, for whoever looks at the board."""

    def everywhere(self, value: Any) -> list[Any]:
        """What each rank says, on every rank."""
        ranks = dist.get_process_group_ranks(self.group)
        said: list[Any] = [None] * len(ranks)
        with self.signs.waiting([rank for rank in ranks if rank != self.signs.rank], self.what):
            dist.all_gather_object(said, value, group=self.group)
        return said

    def together(self, do: Callable[[], Result]) -> Result:
        """`do()` on every rank. What one rank's user got wrong ends all ranks alike, with one SharedError."""
        problems: list[str] = []
        result: Result | None = None
        try:
            result = do()
        except UserError as error:
            problems = list(error.problems)
        if found := _by_problem(self.everywhere((node_name(os.environ), problems))):
            raise SharedError(*found)
        return cast(Result, result)


def _by_problem(said: Sequence[tuple[str, list[str]]]) -> list[str]:
    """Each problem once, with the nodes that have it where others have not. `said`: each rank's node and problems."""
    nodes = {node for node, _ in said}
    found: dict[str, list[str]] = {}
    for node, problems in said:
        for problem in problems:
            found.setdefault(problem, []).append(node)
    return [
        problem if set(having) == nodes else f"on {', '.join(dict.fromkeys(having))}: {problem}"
        for problem, having in found.items()
    ]
