"""Whom the watchdog blames, on lines written by hand; real ranks are in tests/distributed/test_board.py."""

from __future__ import annotations

import threading
import time

import pytest
import torch.distributed as dist

from tests.support.jobs import wait_until
from verl.flow import board as board_module
from verl.flow.board import Board, Entry

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

    def write(self, rank: int, beat: int, waits_for: tuple[int, ...] = (), pulse: int | None = None) -> None:
        entry = Entry(self.pulse if pulse is None else pulse, beat, self.clock.now, "a stage", waits_for)
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
        assert rig.board._entry.stage == "values: waits for rows from rank 1, 2"
        with rig.board.waiting([], "nobody"):
            assert rig.board._entry.waits_for == (1, 2)
    assert (rig.board._entry.stage, rig.board._entry.waits_for) == ("values", ())


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
        assert ended.wait(20)
    board.close()
    assert "slow to answer the watchdog" in caplog.text
    assert "board/0" in store.lines


def test_the_watchdog_says_that_it_stops_when_the_store_is_gone(caplog: pytest.LogCaptureFixture) -> None:
    board = Board(3, 4, lambda: Store(dist.DistNetworkError("Broken pipe")), 100)  # type: ignore[arg-type, return-value]
    wait_until(lambda: "nobody watches rank 3: Broken pipe" in caplog.text, 20, lambda: caplog.text)
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
    board = Board(3, 4, lambda: store, 0.2, nodes)  # type: ignore[arg-type, return-value]
    for _ in range(30):
        board.beat()
        time.sleep(0.02)
    assert faults == []
    store.cut.set()
    wait_until(lambda: bool(faults), 20, lambda: "it has not noticed")
    assert faults == [("rank 3 (node2) has had no answer from the job's store on node1", None)]
