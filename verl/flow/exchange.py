"""Hand-overs: send at the line, receive at the first read. With `agree`, all that roles know of each other."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from verl.flow import wire
from verl.flow.batch import Column, Record, Rows
from verl.flow.board import Board
from verl.flow.placement import Home, Placement
from verl.flow.plan import Move, plan

AnyRecord = TypeVar("AnyRecord", bound=Record)


class Placed(Protocol):
    """Whatever has a place: a role."""

    @property
    def placement(self) -> Placement: ...


@dataclass(frozen=True)
class Posted:
    """A send on its way, which keeps the tensor alive."""

    work: dist.Work
    tensor: Tensor
    dst: int


def post(tensor: Tensor, dst: int, group: dist.ProcessGroup, tag: int) -> Posted:
    work = dist.isend(tensor, dst, group=group, tag=tag)
    assert work is not None
    return Posted(work, tensor, dst)


class Exchange:
    """The hand-overs of one program, numbered alike on every rank: `record = hand_over(record, to=(actor, critic))`."""

    def __init__(self, rank: int, group: dist.ProcessGroup, board: Board, check_program: bool = False) -> None:
        """`group`: a gloo group of all ranks that carries nothing else."""
        self.rank, self.group, self._board = rank, group, board
        self._others = [other for other in range(dist.get_world_size()) if other != rank]
        self._number = 0
        self._check = check_program
        self._log: list[str] = []
        self._sent: list[Posted] = []
        self._reports: list[Posted] = []
        self._open: list[Arrival] = []

    def __call__(self, record: AnyRecord, to: Sequence[Placed | None]) -> AnyRecord:
        """The same record, living where the roles in `to` need it; what lives there already stays as it is.

        A role that the algorithm does without is None.
        """
        moved: dict[str, Column] = {}
        placements = [role.placement for role in to if role is not None]
        for (source, targets), columns in _by_way(record, placements).items():
            moved |= self._move(source, columns, targets)
        return record.with_columns(moved)

    def agree(self, value: Any, source: int) -> Any:
        """What `source` says, on every rank: the only ground for a branch on data. `value` is anything JSON holds.

        A synchronisation of the whole job: put it after work that others wait for.
        """
        self._note(f"agree from {source}")
        raw = json.dumps(value).encode() if self.rank == source else b""
        size = torch.tensor([len(raw)])
        with self._board.waiting(self._others, "an agreement"):
            dist.broadcast(size, source, group=self.group)
            data = (
                torch.frombuffer(bytearray(raw), dtype=torch.uint8)
                if raw
                else torch.empty(int(size), dtype=torch.uint8)
            )
            dist.broadcast(data, source, group=self.group)
        return json.loads(bytes(data.numpy()))

    def settle(self, report: bytes) -> list[bytes] | None:
        """The end of a step: pull what was handed over and never read, wait for the sends, report to rank 0.

        A gloo send ends only when its receiver has it, so an unread column would hold its sender. Returns every rank's
        report on rank 0.
        """
        for arrival in self._open:
            arrival.pull()
        self._open.clear()
        self._finish(self._sent, "the receipt of rows")
        if self._check:
            self._compare_programs()
        self._number += 1
        return self._report(report)

    def close(self) -> None:
        """The end of the job: the last report has arrived."""
        self._finish(self._reports, "the receipt of the last report")

    # -- one hand-over ---------------------------------------------------------------------------------------------

    def _move(self, source: Home, columns: dict[str, Column], targets: tuple[Home, ...]) -> dict[str, Column]:
        self._number += 1
        size = next(iter(columns.values())).size
        assert all(column.size == size for column in columns.values()), {n: c.size for n, c in columns.items()}
        self._note(f"{sorted(columns)} of {size} rows from {source} to {targets}")
        moves = plan(source, targets, size)
        for move in moves:
            if move.src == self.rank and move.dst != self.rank:
                self._send(move, [_held(column, source, self.rank, move.rows) for column in columns.values()])
        arrival = Arrival(self, self._number, source, columns, [move for move in moves if move.dst == self.rank])
        moved = {}
        for name, column in columns.items():
            moved[name] = column.living_also_on(targets)
            for home in targets:
                if self.rank in home.ranks:
                    moved[name].put(home.role, partial(arrival.rows, name, home.rows(self.rank, size)))
        if arrival.moves:
            self._open.append(arrival)
        return moved

    def _send(self, move: Move, columns: list[Rows]) -> None:
        self._sent += self._post(move.dst, wire.pack(self._number, columns), self._number)

    def _post(self, dst: int, message: tuple[Tensor, Tensor], tag: int) -> list[Posted]:
        return [post(tensor, dst, self.group, tag) for tensor in message]

    def _finish(self, posted: list[Posted], what: str) -> None:
        if posted:
            with self._board.waiting(sorted({p.dst for p in posted}), what):
                for p in posted:
                    p.work.wait()
            posted.clear()

    def receive(self, src: int, number: int, num_columns: int, what: str) -> list[Rows]:
        place = f"rank {self.rank} receiving {what} from rank {src}"
        with self._board.waiting([src], what):
            head = torch.empty(wire.HEAD.size, dtype=torch.uint8)
            dist.recv(head, src, group=self.group, tag=number)
            body = torch.empty(wire.body_size(head, number, num_columns, place), dtype=torch.uint8)
            dist.recv(body, src, group=self.group, tag=number)
        return wire.unpack(body, num_columns, place)

    # -- the end of a step -----------------------------------------------------------------------------------------

    def _report(self, report: bytes) -> list[bytes] | None:
        """Reports are awaited a step later: no rank waits for rank 0 to read them."""
        if self.rank:
            self._finish(self._reports, "the receipt of the last step's report")
            self._reports = self._post(
                0, wire.pack(self._number, [Rows.ragged([list(report)], torch.uint8)]), self._number
            )
            return None
        others = [self.receive(src, self._number, 1, "a step's report") for src in self._others]
        return [report] + [bytes(rows[0].values.numpy()) for rows in others]

    def _note(self, line: str) -> None:
        if self._check:
            self._log.append(line)

    def _compare_programs(self) -> None:
        """All ranks' hand-over logs of the step must be equal; the first line that differs is named."""
        digest = torch.tensor(list(hashlib.sha256("\n".join(self._log).encode()).digest()), dtype=torch.uint8)
        digests = [torch.empty_like(digest) for _ in range(dist.get_world_size())]
        with self._board.waiting(self._others, "the comparison of programs"):
            dist.all_gather(digests, digest, group=self.group)
        if any(not torch.equal(other, digest) for other in digests):
            logs: list[Any] = [None] * len(digests)
            dist.all_gather_object(logs, self._log, group=self.group)
            raise wire.ProtocolError(_first_difference(logs))
        self._log.clear()


class Arrival:
    """One hand-over's rows on the way to this rank, for all of its columns and all of the roles that it serves here."""

    def __init__(
        self, exchange: Exchange, number: int, source: Home, columns: dict[str, Column], moves: list[Move]
    ) -> None:
        """`moves`: those to this rank, ascending in their rows."""
        self.moves = moves
        self._exchange, self._number, self._source, self._columns = exchange, number, source, columns
        self._parts: list[dict[str, Rows]] = []

    def pull(self) -> None:
        """Receive what has not been received yet."""
        if not self._parts:
            self._parts = [dict(zip(self._columns, self._receive(move), strict=True)) for move in self.moves]

    def rows(self, name: str, wanted: range) -> Rows:
        """These rows of one column; waits for them."""
        self.pull()
        cut = []
        for move, parts in zip(self.moves, self._parts, strict=True):
            both = range(max(wanted.start, move.rows.start), min(wanted.stop, move.rows.stop))
            if both:
                cut.append(parts[name].take(range(both.start - move.rows.start, both.stop - move.rows.start)))
        return Rows.cat(cut)

    def _receive(self, move: Move) -> list[Rows]:
        if move.src == self._exchange.rank:
            return [_held(column, self._source, move.src, move.rows) for column in self._columns.values()]
        what = ", ".join(self._columns)
        return self._exchange.receive(move.src, self._number, len(self._columns), what)


def _held(column: Column, source: Home, rank: int, rows: range) -> Rows:
    start = source.rows(rank, column.size).start
    return column.held(source.role).take(range(rows.start - start, rows.stop - start))


def _by_way(record: Record, readers: Sequence[Placement]) -> dict[tuple[Home, tuple[Home, ...]], dict[str, Column]]:
    """The columns that must move, by where they leave from (the home that made them) and where they are missing."""
    by_way: dict[tuple[Home, tuple[Home, ...]], dict[str, Column]] = {}
    for name, column in record.columns():
        wanted = [record.home(name, placement) for placement in readers]
        missing = tuple(home for home in wanted if column.homes.get(home.role) != home)
        if missing:
            by_way.setdefault((next(iter(column.homes.values())), missing), {})[name] = column
    return by_way


def _first_difference(logs: list[list[str]]) -> str:
    for number in range(max(map(len, logs))):
        lines = [log[number] if number < len(log) else "(nothing)" for log in logs]
        if len(set(lines)) > 1:
            shown = "\n".join(f"  rank {rank}: {line}" for rank, line in enumerate(lines))
            return f"the ranks run different programs; line {number} of this step's hand-overs:\n{shown}"
    raise AssertionError("equal logs with different hashes")
