"""A reward worker: a process that imports the reward function once and then scores one sample after another.

It is the child of a guard, which ends with it and with its rank, and takes along what the function has started.
It speaks with its rank over a socket: a length and that many bytes. What comes in is pickled (the rank made it), what
goes out is JSON, since the function is the user's. The function's own output goes to the standard error stream.
"""

from __future__ import annotations

import faulthandler
import json
import math
import os
import pickle
import signal
import socket
import struct
import sys
import traceback
from collections.abc import Callable
from typing import Any

from verl.rewards.guard import guarded
from verl.rewards.resolve import FunctionSpec, resolve

BOOTSTRAP = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from verl.rewards.worker import main; main()"
"""What a worker's interpreter runs: `python -c BOOTSTRAP PATH SOCKET PARENT`, with the rank's `sys.path` as JSON, the
number of the worker's socket and the rank's process id. So the rank's own packages are found, installed or not, and its
main module is left alone (`multiprocessing` would import it, and torch with it)."""

HEADER = struct.Struct("!Q")
TRACEBACK_LIMIT = 20_000
"""Characters of a traceback that are sent; its end is kept."""


def send(connection: socket.socket, payload: bytes) -> None:
    connection.sendall(HEADER.pack(len(payload)))
    connection.sendall(payload)


def main() -> None:
    """Runs a worker until the rank closes the socket. Its arguments are in `sys.argv`, see `BOOTSTRAP`."""
    guarded(rank=int(sys.argv[3]), connection=int(sys.argv[2]))
    _ignore_signals()
    faulthandler.enable()
    _free_stdout()
    connection = socket.socket(fileno=int(sys.argv[2]))
    connection.set_inheritable(False)  # what the function starts must not hold the socket open
    order = _receive(connection)
    if order is None:
        return
    spec: FunctionSpec = pickle.loads(order)
    try:
        function = resolve(spec)
    except ValueError as error:
        send(connection, json.dumps({"refused": str(error)}).encode())
        return
    send(connection, json.dumps({"ready": True}).encode())
    while (payload := _receive(connection)) is not None:
        send(connection, json.dumps(_score(function, pickle.loads(payload))).encode())


def _ignore_signals() -> None:
    """A worker ends with its rank or by its rank, not by a signal to all of the job's processes.

    A handler that does nothing, not SIG_IGN: that would be inherited by programs which the function starts.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)


def _free_stdout() -> None:
    """What the function prints, and what its C code and its own children print, goes to the standard error stream."""
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    sys.stdout = sys.stderr


def _receive(connection: socket.socket) -> bytes | None:
    """One message, or None once the rank has closed the socket."""
    header = _receive_exactly(connection, HEADER.size)
    return None if header is None else _receive_exactly(connection, HEADER.unpack(header)[0])


def _receive_exactly(connection: socket.socket, size: int) -> bytes | None:
    data = bytearray()
    while len(data) < size:
        part = connection.recv(min(size - len(data), 1 << 20))
        if not part:
            return None
        data += part
    return bytes(data)


def _score(function: Callable[..., Any], arguments: dict[str, Any]) -> dict[str, Any]:
    """The reply to one sample: `score` and `extra`, or `error`."""
    try:
        return checked_result(function(**arguments))
    except BaseException:  # sys.exit() in a user's function is that sample's error too
        return {"error": traceback.format_exc()[-TRACEBACK_LIMIT:]}


def checked_result(result: Any) -> dict[str, Any]:
    """What a function returned, as `score` and `extra`, or as `error` if it holds no finite score.

    Of a dict's other values the finite numbers are kept.
    """
    if isinstance(result, dict) and "score" not in result:
        return {"error": f"the function returned a dict without 'score': {_shown(result)}"}
    returned = result if isinstance(result, dict) else {"score": result}
    score = _as_finite(returned["score"])
    if score is None:
        return {"error": f"the function returned {_shown(result)}, which holds no finite number as the score"}
    numbers = ((str(key), _as_finite(value)) for key, value in returned.items() if key != "score")
    return {"score": score, "extra": {key: number for key, number in numbers if number is not None}}


def _as_finite(value: Any) -> float | None:
    """A finite float of a number of any kind (NumPy's and torch's scalars too), or None."""
    if isinstance(value, str | bytes | bytearray):
        return None
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # RuntimeError: a tensor of several numbers
        return None
    return number if math.isfinite(number) else None


def _shown(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= 200 else shown[:200] + "..."
