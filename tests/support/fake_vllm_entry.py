"""Stands in for the engine process: the same messages, no vLLM. `arguments["fault"]` says how it misbehaves.

It "generates" the row's number, once for each token of the prompt.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import socket
import sys
import time

faulthandler.register(signal.SIGUSR1)

from verl.generation.types import Sample  # noqa: E402  first what must be there early, then torch
from verl.generation.vllm.wire import Channel, Message, parse_generate, sample_message  # noqa: E402


def main() -> None:
    channel = Channel(socket.socket(fileno=int(sys.argv[1])))
    start = channel.receive().fields
    fault = start["arguments"].get("fault")
    sys.stderr.write(f"{os.environ.get('RANK')} {fault}\n")
    if fault == "silent at start":
        time.sleep(60)
    if fault == "exit at start":
        sys.exit(7)
    channel.send(Message("ready"))
    version = 0
    while (message := channel.receive()).kind != "quit":
        match message.kind:
            case "take" | "take_all" if fault == "die in load":
                os.kill(os.getpid(), signal.SIGKILL)
            case "take" if fault == "raise in load":
                channel.send(Message("error", {"error": "KeyError: nobody knows this weight"}))
                sys.exit(1)
            case "begin":
                pass
            case "join":
                channel.send(Message("joined"))
            case "take":
                channel.send(Message("taken"))
            case "take_all":
                for _ in start["weights"]["buckets"]:
                    channel.send(Message("taken"))
            case "commit":
                version = message.fields["version"]
                channel.send(Message("committed"))
            case "generate":
                call, requests, _ = parse_generate(message)
                for request in requests:
                    channel.send(Message("progress"))
                    if fault == "stop in generate" and request.row == 1:
                        os.kill(os.getpid(), signal.SIGSTOP)
                    length = len(request.prompt_ids)
                    logprobs = [-float(request.seed)] * length
                    sample = Sample(request.row, [request.row] * length, logprobs, ended=True, version=version)
                    channel.send(sample_message(call, sample))
            case "sleep" | "wake":
                channel.send(Message({"sleep": "asleep", "wake": "awake"}[message.kind]))
            case "abort":
                channel.send(Message("aborted", message.fields))
    if fault == "stay":
        time.sleep(60)


if __name__ == "__main__":
    main()
