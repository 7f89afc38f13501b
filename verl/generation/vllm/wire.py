"""What a rank and its engine process say to each other, and how it is written on their socket pair."""

from __future__ import annotations

import json
import select
import socket
import struct
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from verl.generation.types import Request, Sample, Sampling

_PREFIX = struct.Struct("!IQ")  # bytes of the JSON header, bytes of the body


@dataclass(frozen=True)
class Message:
    kind: str
    """To the engine: start, join (the sender of weights), begin (a load), take (a bucket), take_all (of them), commit,
    generate, abort, sleep, wake, quit. Back: ready, joined, taken (each bucket), committed, sample, aborted,
    asleep, awake; progress, a sign of life; error, the last one."""
    fields: dict[str, Any] = field(default_factory=dict)
    body: bytes = b""
    """Token ids and log-probs, in the machine's own byte order: both ends run on one machine. Of start: pickled, what
    memory on devices is opened with."""


class Disconnected(Exception):
    """The other end has closed the connection, or is dead."""


class Channel:
    """Messages over a connected stream socket. One thread may send while another receives."""

    def __init__(self, connection: socket.socket, timeout: float | None = None):
        """`timeout`: seconds that one read or write may block, within a message."""
        self._socket = connection
        self._socket.settimeout(timeout)
        self._poll = select.poll()  # not select.select, which cannot take descriptors from 1024 on
        self._poll.register(connection, select.POLLIN)

    def send(self, message: Message) -> None:
        """Raises Disconnected where the other end is gone, TimeoutError where it does not read."""
        header = json.dumps([message.kind, message.fields]).encode()
        try:
            self._socket.sendall(_PREFIX.pack(len(header), len(message.body)) + header + message.body)
        except ConnectionError as error:
            raise Disconnected from error

    def poll(self, seconds: float) -> bool:
        """Is there something to receive, within so many seconds? The end of the stream counts."""
        return bool(self._poll.poll(seconds * 1000))

    def receive(self) -> Message:
        """Raises Disconnected at the end of the stream, TimeoutError where a message stops in the middle."""
        header_length, body_length = _PREFIX.unpack(self._read(_PREFIX.size))
        kind, fields = json.loads(self._read(header_length))
        return Message(kind, fields, self._read(body_length))

    def close(self) -> None:
        self._socket.close()

    def _read(self, length: int) -> bytes:
        data = bytearray(length)
        view = memoryview(data)
        while view:
            try:
                count = self._socket.recv_into(view)
            except ConnectionError as error:
                raise Disconnected from error
            if count == 0:
                raise Disconnected
            view = view[count:]
        return bytes(data)


def generate_message(call: int, requests: Sequence[Request], sampling: Sampling) -> Message:
    """`call` numbers the calls of an engine; it tells late answers of an aborted one apart."""
    prompts = [np.asarray(request.prompt_ids, dtype=np.int32) for request in requests]
    fields = {
        "call": call,
        "rows": [request.row for request in requests],
        "seeds": [request.seed for request in requests],
        "lengths": [len(prompt) for prompt in prompts],
        "sampling": asdict(sampling),
    }
    return Message("generate", fields, b"".join(prompt.tobytes() for prompt in prompts))


def parse_generate(message: Message) -> tuple[int, list[Request], Sampling]:
    fields = message.fields
    tokens = np.frombuffer(message.body, dtype=np.int32)
    prompts = np.split(tokens, np.cumsum(fields["lengths"])[:-1])
    requests = [
        Request(row, tuple(prompt.tolist()), seed)
        for row, prompt, seed in zip(fields["rows"], prompts, fields["seeds"], strict=True)
    ]
    stop_token_ids = tuple(fields["sampling"].pop("stop_token_ids"))
    return fields["call"], requests, Sampling(**fields["sampling"], stop_token_ids=stop_token_ids)


def sample_message(call: int, sample: Sample) -> Message:
    body = np.asarray(sample.token_ids, dtype=np.int32).tobytes() + np.asarray(sample.logprobs, np.float32).tobytes()
    return Message("sample", {"call": call, "row": sample.row, "ended": sample.ended, "version": sample.version}, body)


def parse_sample(message: Message) -> tuple[int, Sample]:
    half = len(message.body) // 2
    token_ids = np.frombuffer(message.body[:half], dtype=np.int32).tolist()
    logprobs = np.frombuffer(message.body[half:], dtype=np.float32).tolist()
    fields = message.fields
    return fields["call"], Sample(fields["row"], token_ids, logprobs, fields["ended"], fields["version"])
