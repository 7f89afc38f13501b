"""Whom the watchdog blames, on lines written by hand; real ranks are in tests/distributed/test_board.py."""

from __future__ import annotations

import threading
import time
from contextlib import ExitStack

import pytest
import torch.distributed as dist

from tests.support.jobs import wait_until
from verl.flow import board as board_module
from verl.flow.board import Board
from verl.flow.signs import Entry, Signs

LIMIT = 100.0


class Clock:
    now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return self.now


class Rig:
    """Rank 0 watches; the others' lines are what the test writes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock = Clock()
        monkeypatch.setattr(board_module, "time", self.clock)
        self.store = dist.HashStore()
        self.board = Board(0, 4, None, LIMIT)
        self.pulse = 0

    def write(
        self,
        rank: int,
        beat: int,
        waits_for: tuple[int, ...] = (),
        pulse: int | None = None,
        stage: str = "a stage",
        turn: int = 0,
    ) -> None:
        entry = Entry(self.pulse if pulse is None else pulse, beat, self.clock.now, stage, waits_for, turn)
        self.store.set(f"board/{rank}", entry.dump())

    def fault(self) -> str | None:
        return self.board._fault(self.store)

    def later(self, seconds: float) -> None:
        self.clock.now += seconds
        self.pulse += 1


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Rig:
    return Rig(monkeypatch)


def test_an_awaited_rank_is_blamed_after_the_limit_and_not_before(rig: Rig) -> None:
    with rig.board.waiting([2], "rows"):
        for _ in range(11):
            rig.write(2, beat=7)
            assert rig.fault() is None
            rig.later(LIMIT / 10)
        rig.write(2, beat=7)
        assert rig.fault() == "rank 0 waits, and rank 2 has shown no sign of life"


def test_one_that_beats_is_never_blamed(rig: Rig) -> None:
    with rig.board.waiting([2], "rows"):
        for beat in range(100):
            rig.write(2, beat)
            assert rig.fault() is None
            rig.later(0.9 * LIMIT)


def test_the_end_of_a_chain_is_blamed(rig: Rig) -> None:
    with rig.board.waiting([1], "rows"):
        for _ in range(3):
            rig.write(1, 5, waits_for=(2,))
            rig.write(2, 5, waits_for=(3,))
            rig.write(3, 5)
            fault = rig.fault()
            rig.later(0.6 * LIMIT)
    assert fault == "rank 0 waits, and rank 3 has shown no sign of life"


def test_those_who_wait_for_one_that_beats_are_not_blamed(rig: Rig) -> None:
    """Ranks 1 and 2 wait for each other too, as in a barrier that rank 3 has not reached yet."""
    with rig.board.waiting([1, 2, 3], "start-up"):
        for beat in range(10):
            rig.write(1, 5, waits_for=(0, 2, 3))
            rig.write(2, 5, waits_for=(0, 1, 3))
            rig.write(3, beat)
            assert rig.fault() is None
            rig.later(0.6 * LIMIT)


def test_ranks_that_wait_for_each_other_are_named(rig: Rig) -> None:
    with rig.board.waiting([1], "rows"):
        faults = []
        for _ in range(3):
            rig.write(1, 5, waits_for=(2,))
            rig.write(2, 5, waits_for=(0,))
            faults.append(rig.fault())
            rig.later(0.6 * LIMIT)
    assert faults == [None, None, "ranks 0, 1, 2 wait for each other, and none of them has moved"]


def test_those_who_wait_for_ranks_that_wait_for_each_other_are_not_among_them(rig: Rig) -> None:
    """Rank 1 gets its micro-batches from rank 2, which computes with rank 3."""
    with rig.board.waiting([1], "rows"):
        for _ in range(3):
            rig.write(1, 5, waits_for=(2,))
            rig.write(2, 5, waits_for=(3,))
            rig.write(3, 5, waits_for=(2,))
            fault = rig.fault()
            rig.later(0.6 * LIMIT)
    assert fault == "rank 0 waits, and ranks 2, 3 wait for each other, and none of them has moved"


@pytest.mark.parametrize(
    ("stages", "turns", "fault"),
    [
        (("update", "update"), (4, 5), "rank 0 waits, and rank 2 has shown no sign of life"),
        (("update: backward", "update: forward"), (9, 8), "rank 0 waits, and rank 3 has shown no sign of life"),
        (("update", "update"), (5, 5), "rank 0 waits, and ranks 2, 3 wait for each other, and none of them has moved"),
        (("update", "update"), (0, 5), "rank 0 waits, and ranks 2, 3 wait for each other, and none of them has moved"),
        (("update", "values"), (4, 5), "rank 0 waits, and ranks 2, 3 wait for each other, and none of them has moved"),
    ],
    ids=["one is behind", "the other is behind", "both in one part", "one has begun none", "in different stages"],
)
def test_of_ranks_that_wait_for_each_other_the_one_behind_is_blamed(
    stages: tuple[str, str], turns: tuple[int, int], fault: str, rig: Rig
) -> None:
    with rig.board.waiting([2], "a micro-batch"):
        for _ in range(3):
            rig.write(2, 5, (3,), stage=stages[0], turn=turns[0])
            rig.write(3, 5, (2,), stage=stages[1], turn=turns[1])
            found = rig.fault()
            rig.later(0.6 * LIMIT)
    assert found == fault


def test_a_process_that_is_stopped_while_it_waits_is_blamed(rig: Rig) -> None:
    """Rank 1 waits for rank 0 as far as its last line says; it has stopped writing."""
    with rig.board.waiting([1], "rows"):
        for _ in range(3):
            rig.write(1, 5, waits_for=(0,), pulse=9)
            fault = rig.fault()
            rig.later(0.6 * LIMIT)
    assert fault == "rank 0 waits, and rank 1 has shown no sign of life"


def test_a_rank_that_never_wrote_is_blamed(rig: Rig) -> None:
    with rig.board.waiting([3], "start-up"):
        assert rig.fault() is None
        rig.later(LIMIT + 1)
        assert rig.fault() == "rank 0 waits, and rank 3 has shown no sign of life"


def test_nobody_else_is_looked_at(rig: Rig) -> None:
    """Rank 2 stands still, and nobody waits for it."""
    with rig.board.waiting([1], "rows"):
        for beat in range(4):
            rig.write(1, beat)
            rig.write(2, 5)
            assert rig.fault() is None
            rig.later(0.6 * LIMIT)


def test_a_rank_blames_itself_when_it_waits_for_nobody(rig: Rig) -> None:
    rig.board.at("gen")
    assert rig.fault() is None
    rig.later(0.6 * LIMIT)
    rig.board.beat()
    assert rig.fault() is None
    rig.later(1.1 * LIMIT)
    assert rig.fault() == "rank 0 has shown no sign of life"


def test_a_wait_inside_a_stage_gives_the_stage_back(rig: Rig) -> None:
    rig.board.at("values")
    with rig.board.waiting([1, 2], "rows"):
        assert rig.board.entry.stage == "values: waits for rows from rank 1, 2"
        with rig.board.waiting([], "nobody"):
            assert rig.board.entry.waits_for == (1, 2)
    assert (rig.board.entry.stage, rig.board.entry.waits_for) == ("values", ())


def test_a_part_of_a_wait_says_what_is_done_and_a_turn_stays_until_the_next_stage(rig: Rig) -> None:
    board = rig.board
    board.at("update")
    with board.waiting([1, 2], "the others' part"):
        with board.doing("forward of micro-batch 1", [2], turn=7):
            assert (board.entry.stage, board.entry.waits_for, board.entry.turn) == (
                "update: forward of micro-batch 1", (2,), 7,
            )  # fmt: skip
        assert board.entry.stage == "update: waits for the others' part from rank 1, 2"
        with board.waiting([1], "the backward of micro-batch 1"):
            assert board.entry.stage == "update: waits for the backward of micro-batch 1 from rank 1"
            assert (board.entry.waits_for, board.entry.turn) == ((1,), 7)
    board.at("reshard")
    assert (board.entry.stage, board.entry.waits_for, board.entry.turn) == ("reshard", (), 0)


def test_a_line_is_read_as_it_was_written() -> None:
    entry = Entry(3, 4, 5.5, "a stage", (1, 2), 6)
    assert Entry.load(entry.dump().encode()) == entry


def test_the_main_thread_says_what_the_one_that_it_waits_for_says(rig: Rig) -> None:
    aside = Signs(0)
    aside.at("writes step_4")
    rig.board.at("save_checkpoint")
    said: list[tuple[str, tuple[int, ...]]] = []
    beats: list[int] = []

    def look(_: float) -> bool:
        """Three looks: the thread works, then waits, and then is still there."""
        said.append((rig.board.entry.stage, rig.board.entry.waits_for))
        beats.append(rig.board.entry.beat)
        if len(said) == 2:
            waits.enter_context(aside.waiting([3], "its shards"))
        return len(said) == 5

    with ExitStack() as waits:
        rig.board.follow(aside, look)
    working = ("save_checkpoint: writes step_4", ())
    waiting = ("save_checkpoint: writes step_4: waits for its shards from rank 3", (3,))
    assert said == [("save_checkpoint", ()), working, waiting, waiting, waiting]
    assert beats[2] == beats[3] == beats[4], "the main thread shows no life that the other one does not"
    assert rig.board.entry.stage == "save_checkpoint"


class Store:
    """Answers like the job's store, but first with an error."""

    def __init__(self, error: Exception) -> None:
        self.errors, self.lines = [error], {}

    def set_timeout(self, timeout: object) -> None: ...

    def set(self, key: str, value: str) -> None:
        if self.errors:
            raise self.errors.pop()
        self.lines[key] = value

    def check(self, keys: list[str]) -> bool:
        return all(key in self.lines for key in keys)


def test_the_watchdog_goes_on_when_the_store_was_slow(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(board_module, "WRITE_SECONDS", 0.01)
    store, ended = Store(dist.DistStoreError("wait timeout after 5000ms")), threading.Event()
    monkeypatch.setattr(Board, "_end", lambda self, fault, store: ended.set())
    board = Board(0, 2, lambda: store, 0.5)  # type: ignore[arg-type, return-value]
    with board.waiting([1], "rows"):
        assert ended.wait(100)
    board.close()
    assert "slow to answer the watchdog" in caplog.text
    assert "board/0" in store.lines


def test_the_watchdog_says_that_it_stops_when_the_store_is_gone(caplog: pytest.LogCaptureFixture) -> None:
    board = Board(3, 4, lambda: Store(dist.DistNetworkError("Broken pipe")), 100)  # type: ignore[arg-type, return-value]
    wait_until(lambda: "nobody watches rank 3: Broken pipe" in caplog.text, 100, lambda: caplog.text)
    board.close()


class Silent(Store):
    """Answers until its host is cut off; from then on no call returns."""

    def __init__(self) -> None:
        self.lines, self.errors, self.cut = {}, [], threading.Event()

    def set(self, key: str, value: str) -> None:
        if self.cut.is_set():
            threading.Event().wait()
        super().set(key, value)


def test_a_store_that_answers_no_more_ends_the_rank_with_what_it_last_saw(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(board_module, "WRITE_SECONDS", 0.01)
    monkeypatch.setattr(board_module, "STORE_SECONDS", 0.0)
    monkeypatch.setenv("MASTER_ADDR", "node1")
    store, faults = Silent(), []
    monkeypatch.setattr(Board, "_end", lambda self, fault, store: (faults.append((fault, store)), self.close()))
    nodes = ["node1", "node1", "node2", "node2"]
    board = Board(3, 4, lambda: store, 5.0, nodes)  # type: ignore[arg-type, return-value]
    for _ in range(30):
        board.beat()
        time.sleep(0.02)
    assert faults == []
    store.cut.set()
    board.timeout = 0.2
    wait_until(lambda: bool(faults), 100, lambda: "it has not noticed")
    assert faults == [("rank 3 (node2) has had no answer from the job's store on node1", None)]
