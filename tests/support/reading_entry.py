"""In place of the engine process, without vLLM: takes buckets as its weight transfer would, and says what they are.

Each line of its log is JSON: {"bucket": number, "bytes": [a digest by worker]} or {"commit": version}. It reads a
little after it is told to, as an engine would that is busy. It has as many workers as devices are shown to it, else
one.
"""

from __future__ import annotations

import base64
import hashlib
import json
import pickle
import signal
import socket
import sys
import time
from typing import Any

import torch
from torch import Tensor

from tests.support.host_transfer import GlooGroup, open_exported
from verl.generation.vllm.delivery import updates
from verl.generation.vllm.wire import Channel, Message
from verl.processes import die_with

LATE = 0.05
"""Seconds."""


def digest(memory: Tensor) -> str:
    return hashlib.sha256(memory.numpy().tobytes()).hexdigest()[:16]


class Workers:
    def __init__(self, start: Message) -> None:
        self._told = start.fields["weights"]
        self.updates = updates(self._told, pickle.loads(start.body))
        self._opened: dict[Any, Tensor] = {}

    def join(self) -> None:
        group = base64.b64decode(self._told["group"])
        self._group = GlooGroup(group, self._told["first"], self._told["size"])

    def read(self, number: int) -> list[str]:
        update = self.updates[number]
        time.sleep(LATE)
        if "ipc_handles" in update:
            length = sum(update["tensor_sizes"])
            return [digest(open_exported(*handle)[:length]) for _, handle in sorted(update["ipc_handles"].items())]
        sizes = [
            torch.Size(shape).numel() * getattr(torch, dtype).itemsize
            for shape, dtype in zip(update["shapes"], update["dtype_names"], strict=True)
        ]
        memory = torch.empty(sum(sizes), dtype=torch.uint8)
        self._group.broadcast(memory, src=0)
        return [digest(memory)]


def main() -> None:
    die_with(int(sys.argv[2]), signal.SIGKILL)
    channel = Channel(socket.socket(fileno=int(sys.argv[1])))
    workers = Workers(channel.receive())
    channel.send(Message("ready"))
    while (message := channel.receive()).kind != "quit":
        match message.kind:
            case "join":
                workers.join()
                channel.send(Message("joined"))
            case "take" | "take_all":
                asked = [message.fields["bucket"]] if message.kind == "take" else range(len(workers.updates))
                for number in asked:
                    print(json.dumps({"bucket": number, "bytes": workers.read(number)}), flush=True)
                    channel.send(Message("taken"))
            case "commit":
                print(json.dumps({"commit": message.fields["version"]}), flush=True)
                channel.send(Message("committed"))


if __name__ == "__main__":
    main()
