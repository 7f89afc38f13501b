"""A rollout replica that runs vLLM in a child process of this rank, which itself never imports it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from verl.generation.types import Request, Sample, Sampling
from verl.generation.vllm.child import Child
from verl.generation.vllm.delivery import Delivery
from verl.generation.vllm.environment import child_environment
from verl.generation.vllm.options import VllmOptions, llm_arguments
from verl.generation.vllm.wire import Channel, Disconnected, Message, generate_message, parse_sample

_QUIT_SECONDS = 10.0
_ALL = frozenset({"weights", "kv_cache"})
"""What vLLM's sleep mode gives up, by its tags."""
_DEATH_SECONDS = 10.0  # from the end of the connection to the end of the process


class EngineError(RuntimeError):
    """The engine died, hung, or raised. The message names the replica, what it did, how it ended, and the log's end."""


class VllmEngine:
    """A `Backend`. One call at a time, from the main thread; any failure is final, and every later call repeats it.

    The rank leads its replica: its child process drives all of the replica's devices. Weights come bucket by bucket,
    as `weights` says.
    """

    def __init__(
        self,
        options: VllmOptions,
        weights: Delivery,
        *,
        name: str,
        log_path: Path,
        start_timeout: float,
        stage_timeout: float,
        on_progress: Callable[[], None],
    ):
        """Starts the process and returns at once: load the trainer meanwhile, and then call `wait_ready`.

        `name`: the replica's, for messages. `start_timeout`: seconds it may take to become ready. `stage_timeout`:
        seconds without a word from it while something is awaited; while it generates it speaks every second.
        `on_progress`: called whenever it spoke. Raises MeshError where the options contradict each other.
        """
        arguments = llm_arguments(options, weights.backend)
        environment = child_environment(os.environ, options)
        self._options = options
        self._loading = weights.doing
        self._num_buckets = len(weights.buckets)
        self._taking = 0
        """Buckets that it has been told to take and has not taken yet."""
        self._name = name
        self._stage_timeout = stage_timeout
        self._on_progress = on_progress
        self._start_deadline = time.monotonic() + start_timeout
        self._start_timeout = start_timeout
        self._ready = False
        self._version: int | None = None
        self._awake = _ALL
        self._calls = 0
        self._running: int | None = None
        self._failure: str | None = None
        self._child = Child("verl.generation.vllm.entry", environment, log_path)
        self._channel = Channel(self._child.socket, stage_timeout)
        told, exports = weights.told()
        self._send(Message("start", {"arguments": arguments, "weights": told}, exports), doing="starting")

    @property
    def pid(self) -> int:
        """The engine process, which leads a session that holds its workers too."""
        return self._child.pid

    @property
    def version(self) -> int | None:
        """Of the weights that it runs; None before the first load, within one, and after one that failed."""
        return self._version

    def wait_ready(self) -> None:
        """Returns when the engine can take weights. Raises EngineError if it died, or start_timeout has passed."""
        self._raise_failure()
        while not self._ready:
            if self._channel.poll(1.0):
                self._expect("ready", doing="starting")
                self._ready = True
            elif time.monotonic() > self._start_deadline:
                raise self._fail(
                    f"was not ready within {self._start_timeout:g} s; rollout.start_timeout is the limit", hung=True
                )
            self._on_progress()

    def join(self) -> None:
        """Returns when its workers are in one group with the rank that sends weights, where one does (NCCL)."""
        doing = "joining the group that weights are sent in"
        self._settle()
        self._send(Message("join"), doing)
        self._expect("joined", doing)

    def begin_load(self) -> None:
        self._settle()
        self._version = None
        self._taking = 0
        self._send(Message("begin"), self._loading)

    def take_bucket(self, number: int) -> None:
        self._send(Message("take", {"bucket": number}), self._loading)
        self._taking += 1

    def take_all(self) -> None:
        """Every bucket, in their order, as they are sent."""
        self._send(Message("take_all"), self._loading)
        self._taking += self._num_buckets

    def await_bucket(self) -> None:
        """Raises EngineError if it failed. The weights are mixed then: the engine is dead rather than use them."""
        self._expect("taken", self._loading)
        self._taking -= 1

    def commit(self, version: int) -> None:
        """When it has taken what it was told to. Raises EngineError as `await_bucket` does."""
        while self._taking:
            self.await_bucket()
        doing = f"committing weights of version {version}"
        self._send(Message("commit", {"version": version}), doing)
        self._expect("committed", doing)
        self._version = version

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[Sample]:
        """The engine sets to work at once. A consumer that stops early (`close()`, `break`) has the rest aborted.

        Requests are submitted in row order, and each has a seed: the samples do not depend on the order given here.
        """
        if not requests:
            return iter(())
        self._check(requests, sampling)
        self._settle()
        if self._version is None:
            raise EngineError(f"{self._name}: it holds no weights that may be used. Load some before generate.")
        assert self._awake == _ALL, f"{self._name} sleeps"
        self._calls += 1
        self._running = self._calls
        ordered = sorted(requests, key=lambda request: request.row)
        self._send(generate_message(self._calls, ordered, sampling), doing="taking requests")
        return self._stream(self._calls, len(ordered))

    def sleep(self) -> None:
        """Frees devices' memory for the trainer. It is vLLM's sleep level 1, which keeps the weights in host memory, as
        there may be more to generate before the next ones come. The KV cache is lost.

        Does nothing on the CPU, and where the replica has its devices for itself. Has never been run on a GPU.
        """
        if self._sleeps and self._awake:
            self._settle()
            self._awake = frozenset()
            self._send(Message("sleep"), doing="going to sleep")
            self._expect("asleep", doing="going to sleep")

    def wake(self, *tags: str) -> None:
        """Takes memory back for "weights" (to load new ones) and for the "kv_cache" (to generate), as far as it sleeps.

        Has never been run on a GPU.
        """
        asleep = [tag for tag in tags if tag not in self._awake]
        if asleep:
            self._settle()
            self._send(Message("wake", {"tags": asleep}), doing="waking up")
            self._expect("awake", doing="waking up")
            self._awake |= frozenset(asleep)

    def close(self) -> None:
        """Asks the engine to leave, and kills what has not left. May be called again, and after a failure."""
        if self._failure is None and self._ready and self._running is None:
            try:
                self._channel.send(Message("quit"))
                self._child.wait(_QUIT_SECONDS)
            except (Disconnected, TimeoutError):
                pass  # it is gone already, or about to be killed
        self._child.kill()
        self._channel.close()
        self._failure = self._failure or f"{self._name}: the engine has been closed"

    @property
    def _sleeps(self) -> bool:
        return bool(self._options.devices) and self._options.shares_devices

    def _check(self, requests: Sequence[Request], sampling: Sampling) -> None:
        assert len({request.row for request in requests}) == len(requests), "a row is asked for once"
        assert all(request.seed >= 0 for request in requests), "vLLM takes -1 for no seed"
        longest = max(len(request.prompt_ids) for request in requests)
        if longest + sampling.max_tokens > self._options.max_model_len:
            raise ValueError(
                f"{self._name}: a prompt of {longest} tokens and a response of up to {sampling.max_tokens} do not fit "
                f"into the engine's {self._options.max_model_len}. Lower data.max_prompt_length or "
                "data.max_response_length, or raise the length that the engine is started with."
            )

    def _stream(self, call: int, count: int) -> Iterator[Sample]:
        try:
            for received in range(count):
                assert self._running == call, "samples of a generate that a later call has ended"
                message = self._expect("sample", doing=f"generating ({received} of {count} samples are done)")
                yield parse_sample(message)[1]
            self._running = None
        finally:
            if self._running == call:
                self._abort()

    def _settle(self) -> None:
        """Ends what an earlier `generate` has left running."""
        self._raise_failure()
        assert self._ready, "wait_ready comes first"
        if self._running is not None:
            self._abort()

    def _abort(self) -> None:
        call, self._running = self._running, None
        self._send(Message("abort", {"call": call}), doing="aborting")
        while self._receive("aborting").kind != "aborted":
            pass  # samples that were on their way

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise EngineError(self._failure)

    def _send(self, message: Message, doing: str) -> None:
        try:
            self._channel.send(message)
        except TimeoutError:
            raise self._fail(f"took no message for {self._stage_timeout:g} s while {doing}", hung=True) from None
        except Disconnected:
            raise self._fail(f"ended while {doing}") from None

    def _expect(self, kind: str, doing: str) -> Message:
        message = self._receive(doing)
        assert message.kind == kind, f"{kind} was awaited, {message.kind} came"
        return message

    def _receive(self, doing: str) -> Message:
        """The next message that is not a mere sign of life."""
        self._raise_failure()
        while True:
            try:
                if not self._channel.poll(self._stage_timeout):
                    raise TimeoutError
                message = self._channel.receive()
            except TimeoutError:
                raise self._fail(f"said nothing for {self._stage_timeout:g} s while {doing}", hung=True) from None
            except Disconnected:
                raise self._fail(f"ended while {doing}") from None
            self._on_progress()
            if message.kind == "error":
                raise self._fail(f"raised while {doing}: {message.fields['error']}")
            if message.kind != "progress":
                return message

    def _fail(self, what: str, hung: bool = False) -> EngineError:
        """Kills what is left and makes the error, now and for every later call."""
        if not hung:
            self._child.wait(_DEATH_SECONDS)
        ending = self._child.kill(dump_stacks=hung)
        self._version = None
        self._running = None
        self._failure = (
            f"{self._name}: the engine {what}. Process {self._child.pid} {ending}. "
            f"The end of its log, {self._child.log_path}:\n{self._child.log_tail()}"
        )
        return EngineError(self._failure)
