"""Reward functions run in worker processes, each sample within a time limit.

A sample that hangs, a function that raises and a process that dies cost that sample its score and nothing else. A
thread for each worker feeds it from one queue and replaces it, so the rank's own thread never waits for a pipe.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any

from verl.errors import UserError
from verl.rewards.process import Unwanted, WorkerDied, WorkerProcess, WorkerTimeout
from verl.rewards.resolve import FunctionSpec
from verl.rewards.score import RewardError, Sample, Score, Status

logger = logging.getLogger(__name__)

LOGGED_FAILURES = 5
"""Failed samples that a pool logs one by one; the scores carry every failure."""


ON_ERROR = ("raise", "count")


class RewardPool:
    """`num_workers` processes that score samples with one reward function.

    Create it before the process group: the workers then start while the rest does. `close` it in any case, also after
    an error; a rank that is killed takes its workers with it.
    """

    def __init__(
        self,
        function: FunctionSpec,
        *,
        num_workers: int,
        timeout: float,
        failure_score: float,
        on_error: str,
        start_timeout: float = 300.0,
    ) -> None:
        """Starts the workers and returns at once.

        `timeout`: seconds for one sample. `start_timeout`: seconds for one worker, also a replacement, to import the
        function. Raises `ValueError` for settings out of range; a function that cannot be used is `wait_ready`'s
        affair.
        """
        if num_workers < 1:
            raise UserError(f"reward.function.num_workers={num_workers} must be at least 1")
        if not 0 < timeout < math.inf:
            raise UserError(f"reward.function.timeout={timeout} must be a positive number of seconds")
        if not math.isfinite(failure_score):
            raise UserError(f"reward.function.failure_score={failure_score} must be finite")
        if on_error not in ON_ERROR:
            raise UserError(f"reward.function.on_error={on_error!r} must be one of {', '.join(ON_ERROR)}")
        self._function = function
        self._timeout = timeout
        self._start_timeout = start_timeout
        self._failure_score = failure_score
        self._on_error = on_error
        self._samples: SimpleQueue[Sample | None] = SimpleQueue()
        self._changed = threading.Condition()  # guards what follows
        self._open_rows: set[int] = set()
        self._scores: dict[int, Score] = {}
        self._pids: dict[int, int] = {}  # by the number of the worker
        self._ready: set[int] = set()  # numbers of the workers that were ready once
        self._num_failures = 0
        self._failure: RewardError | None = None
        self._closing = False
        self._threads = [
            threading.Thread(target=self._run, args=(number,), name=f"reward-worker-{number}", daemon=True)
            for number in range(num_workers)
        ]
        for thread in self._threads:
            thread.start()

    def __enter__(self) -> RewardPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pids(self) -> list[int]:
        """The processes that this one has started, each the guard of a worker that runs now."""
        with self._changed:
            return list(self._pids.values())

    def wait_ready(self, timeout: float) -> None:
        """Waits until every worker has imported the function. Raises `RewardError` if it cannot be used, or if that
        takes more than `timeout` seconds.
        """
        deadline = time.monotonic() + timeout
        with self._changed:
            while True:
                self._check_usable()
                if len(self._ready) == len(self._threads):
                    return
                left = deadline - time.monotonic()
                if left <= 0:
                    raise RewardError(
                        f"{len(self._threads) - len(self._ready)} of {len(self._threads)} reward workers have not "
                        f"imported {self._function.path} within {timeout:.0f} s"
                    )
                self._changed.wait(left)

    def submit(
        self, row: int, data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any]
    ) -> None:
        """Queues a sample and returns at once. `row` names it until it is collected.

        Raises `RewardError` once a sample or a worker has failed for good.
        """
        with self._changed:
            self._check_usable()
            assert row not in self._open_rows, f"row {row} was submitted before and is not collected"
            self._open_rows.add(row)
        self._samples.put(Sample(row, data_source, solution_str, ground_truth, extra_info))

    def collect(self, rows: Sequence[int], on_progress: Callable[[], None] = lambda: None) -> list[Score]:
        """Waits for the scores of submitted rows; in the order of `rows`, whatever order they were finished in.

        It waits no longer than the samples before them may take, `timeout` each, and calls `on_progress` every second
        meanwhile. With `on_error` raise, the first
        sample that fails, of these rows or not, raises `RewardError` at once.
        """
        with self._changed:
            unknown = [row for row in rows if row not in self._open_rows]
            assert not unknown, f"rows {unknown[:5]} were not submitted or are collected already"
            for row in rows:
                while row not in self._scores:
                    self._check_usable()
                    self._changed.wait(1.0)
                    on_progress()
            self._check_usable()
            self._open_rows.difference_update(rows)
            return [self._scores.pop(row) for row in rows]

    def close(self) -> None:
        """Kills the workers, whatever they do, and waits until they are gone. Samples in the queue are dropped."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        for _ in self._threads:
            self._samples.put(None)  # wakes a thread that waits for a sample
        for thread in self._threads:
            thread.join()

    def _check_usable(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self._closing:
            raise RewardError("The reward pool is closed")

    # What follows runs on the workers' threads.

    def _run(self, number: int) -> None:
        """One worker after another, until the pool closes or fails."""
        try:
            while not self._unwanted():
                self._live(number)
        except Unwanted:
            pass
        except Exception as error:  # the rank's own thread must learn of whatever happened here
            self._fail(f"The reward workers cannot run {self._function.path}: {error}", error)

    def _live(self, number: int) -> None:
        """One worker from its start until it must be replaced or the pool closes."""
        worker = WorkerProcess(self._function, self._unwanted)
        try:
            with self._changed:
                self._pids[number] = worker.pid
            try:
                worker.wait_ready(self._start_timeout)
            except WorkerTimeout:
                raise WorkerTimeout(f"a worker has not imported it within {self._start_timeout:.0f} s") from None
            with self._changed:
                self._ready.add(number)
                self._changed.notify_all()
            while (sample := self._samples.get()) is not None and not self._unwanted():
                if worker.has_exited():  # while idle: not this sample's fault
                    self._samples.put(sample)
                    break
                score, is_usable = self._score(worker, sample)
                self._publish(sample, score)
                if not is_usable:
                    break
        finally:
            with self._changed:
                del self._pids[number]
            worker.kill()

    def _score(self, worker: WorkerProcess, sample: Sample) -> tuple[Score, bool]:
        """The sample's score, and whether the worker can go on."""
        is_usable = False
        try:
            reply = worker.score(sample.arguments, self._timeout)
            if "error" not in reply:
                return Score(sample.row, reply["score"], reply["extra"], Status.ok), True
            status, problem, is_usable = Status.error, reply["error"], True
        except WorkerTimeout:
            status, problem = Status.timeout, f"no score within reward.function.timeout={self._timeout} s"
        except WorkerDied as error:
            status, problem = Status.error, str(error)
        return Score(sample.row, self._failure_score, {}, status, problem), is_usable

    def _publish(self, sample: Sample, score: Score) -> None:
        message = f"The reward function {self._function.path} failed on the {sample}: {score.problem}"
        if score.status is Status.error and self._on_error == "raise":
            self._fail(f"{message}\nMend it, or give such samples a score with reward.function.on_error=count.")
            return
        with self._changed:
            self._scores[sample.row] = score
            self._changed.notify_all()
            self._num_failures += score.status is not Status.ok
            is_logged = score.status is not Status.ok and self._num_failures <= LOGGED_FAILURES
        if is_logged:
            logger.warning("%s\nIt gets the score %s.", message, score.score)

    def _fail(self, message: str, cause: Exception | None = None) -> None:
        with self._changed:
            if self._failure is None:
                self._failure = RewardError(message)
                self._failure.__cause__ = cause
            self._changed.notify_all()

    def _unwanted(self) -> bool:
        return self._closing or self._failure is not None
