"""What the engine process runs: vLLM behind one end of a socket pair.

It is crash-only: whatever goes wrong is written to the log, told to the rank if possible, and ends the process.
"""

from __future__ import annotations

import logging
import multiprocessing
import multiprocessing.connection
import os
import queue
import socket
import sys
import threading
import time
import traceback
from typing import Any, NoReturn

from verl.generation.types import Request, Sample, Sampling
from verl.generation.vllm.intake import make_intake
from verl.generation.vllm.tree import remove_segments, shared_segments
from verl.generation.vllm.wire import Channel, Disconnected, Message, parse_generate, sample_message

_PROGRESS_SECONDS = 1.0
_FLUSH_SECONDS = 5.0
_EXIT_CODE_SECONDS = 0.3  # in which vLLM, which takes the exit code, logs it


class Outbox:
    """Sends from a thread of its own, so that a rank that is slow to read does not hold up the engine."""

    def __init__(self, channel: Channel):
        self._channel = channel
        self._messages: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="outbox", daemon=True)
        self._thread.start()

    def put(self, message: Message) -> None:
        self._messages.put(message)

    def flush(self) -> None:
        """Nothing can be put in afterwards."""
        self._messages.put(None)
        self._thread.join(_FLUSH_SECONDS)

    def _run(self) -> None:
        while (message := self._messages.get()) is not None:
            try:
                self._channel.send(message)
            except Disconnected:
                return  # the rank is gone; the receiving side sees it too


class Server:
    """Carries out the rank's messages, and steps the engine in between while requests are running."""

    def __init__(self, channel: Channel, outbox: Outbox, start: Message):
        from vllm import LLM

        # It would try out the chat template, for which there is no tokenizer, and log a traceback.
        logging.getLogger("vllm.renderers.base").addFilter(lambda record: record.levelno >= logging.ERROR)
        self._channel = channel
        self._outbox = outbox
        self._llm = LLM(**start.fields["arguments"])
        self._engine = self._llm.llm_engine
        self._caches_prefixes: bool = start.fields["arguments"]["enable_prefix_caching"]
        self._version: int | None = None
        self._call = 0
        self._running: dict[str, int] = {}  # row of each request that has not finished, by its name in vLLM
        self._intake = make_intake(self._llm, start.fields["weights"], start.body)
        self._num_buckets = len(start.fields["weights"]["buckets"])

    def run(self) -> None:
        """Until the rank says quit, or is gone."""
        told = time.monotonic()
        while True:
            while not self._running or self._channel.poll(0):
                message = self._channel.receive()
                if message.kind == "quit":
                    return
                self._handle(message)
            if self._step():
                told = time.monotonic()
            elif time.monotonic() - told >= _PROGRESS_SECONDS:
                told = time.monotonic()
                self._outbox.put(Message("progress"))

    def _handle(self, message: Message) -> None:
        match message.kind:
            case "begin":
                assert not self._running, "weights change between two calls of generate"
                self._version = None
                self._intake.begin()
            case "take":
                self._take(message.fields["bucket"])
            case "take_all":
                for bucket in range(self._num_buckets):
                    self._take(bucket)
            case "join":
                self._intake.join()
                self._outbox.put(Message("joined"))
            case "commit":
                self._commit(message.fields["version"])
            case "generate":
                self._generate(*parse_generate(message))
            case "abort":
                self._engine.abort_request(list(self._running))
                self._running.clear()
                self._outbox.put(Message("aborted", message.fields))
            case "sleep":
                self._llm.sleep(level=1)
                self._outbox.put(Message("asleep"))
            case "wake":
                self._llm.wake_up(message.fields["tags"])
                self._outbox.put(Message("awake"))
            case kind:
                raise AssertionError(f"a message of kind {kind}")

    def _take(self, bucket: int) -> None:
        self._intake.take(bucket)
        self._outbox.put(Message("taken"))

    def _commit(self, version: int) -> None:
        self._intake.finish()
        # The cached keys and values of a prefix come from the old weights.
        if not self._llm.reset_prefix_cache() and self._caches_prefixes:
            raise RuntimeError("vLLM did not reset its prefix cache")
        self._version = version
        self._outbox.put(Message("committed"))

    def _generate(self, call: int, requests: list[Request], sampling: Sampling) -> None:
        assert self._version is not None, "no weights are loaded"
        from vllm.inputs.engine import tokens_input

        self._call = call
        for request in requests:
            name = f"{call}-{request.row}"
            prompt = tokens_input(list(request.prompt_ids))
            self._engine.add_request(name, prompt, _sampling_params(sampling, request.seed))
            self._running[name] = request.row

    def _step(self) -> bool:
        """One token for everything that runs. Have samples been sent?"""
        assert self._version is not None
        outputs: list[Any] = self._engine.step()
        finished = [output for output in outputs if output.finished]
        for output in finished:
            completion = output.outputs[0]
            sample = Sample(
                row=self._running.pop(output.request_id),
                token_ids=list(completion.token_ids),
                logprobs=completion.logprobs.logprobs,  # flat: one for each token
                ended=completion.finish_reason == "stop",
                version=self._version,
            )
            assert len(sample.token_ids) == len(sample.logprobs)
            self._outbox.put(sample_message(self._call, sample))
        return bool(finished)


def _sampling_params(sampling: Sampling, seed: int) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        max_tokens=sampling.max_tokens,
        # What ends a response is said here and nowhere else: not by the end token that vLLM read from the folder.
        ignore_eos=True,
        stop_token_ids=[] if sampling.ignore_eos else list(sampling.stop_token_ids),
        seed=seed,
        logprobs=0,  # of the sampled token alone
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def _end_with_workers() -> None:
    """If a tensor-parallel worker dies, so does this process, at once: left to vLLM it takes ten seconds."""
    workers = multiprocessing.active_children()
    if not workers:
        return

    def watch() -> None:
        dead = multiprocessing.connection.wait([worker.sentinel for worker in workers])
        for worker in workers:
            if worker.sentinel in dead:
                sys.stderr.write(f"engine worker {worker.name}, process {worker.pid}, died\n")
        time.sleep(_EXIT_CODE_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, name="worker-watch", daemon=True).start()


def serve(descriptor: int) -> NoReturn:
    """Starts vLLM as the first message asks, carries out the others, and ends the process."""
    os.set_inheritable(descriptor, False)
    channel = Channel(socket.socket(fileno=descriptor))
    outbox = Outbox(channel)
    try:
        server = Server(channel, outbox, channel.receive())
        # All processes have attached to them by now; without a name they cannot be left behind.
        remove_segments(shared_segments(os.getsid(0)))
        _end_with_workers()
        outbox.put(Message("ready"))
        server.run()
        exit_code = 0
    except Disconnected:
        exit_code = 0  # the rank is gone
    except Exception as error:
        traceback.print_exc()
        outbox.put(Message("error", {"error": f"{type(error).__name__}: {error}"}))
        exit_code = 1
    outbox.flush()
    # Past vLLM's own shutdown, which collects garbage for ten seconds. The workers die with this process.
    os._exit(exit_code)
