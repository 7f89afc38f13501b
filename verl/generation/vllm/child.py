"""The engine process as its rank sees it: started, watched, described when it ends, and always stopped."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from verl.generation.vllm.tree import remove_segments, session_members, shared_segments

_WORKERS_SECONDS = 10.0  # for killed workers to be gone
_DUMP_SECONDS = 0.5
_LOG_LINES = 20
_LOG_TAIL_BYTES = 65536


class Child:
    """A process in a session of its own, so that what torchrun or a terminal signals to the rank does not reach it."""

    def __init__(self, module: str, environment: Mapping[str, str], log_path: Path):
        """Runs `python -m module FD PID`: its end of a socket pair, and this process. Appends output to `log_path`."""
        # The kernel kills the child when the *thread* that made it ends, not only with the process.
        assert threading.current_thread() is threading.main_thread(), "an engine is started from the main thread"
        self.log_path = log_path
        log_path.parent.mkdir(parents=True, exist_ok=True)
        self.socket, theirs = socket.socketpair()
        with theirs, log_path.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, str(theirs.fileno()), str(os.getpid())],
                env=dict(environment),
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """Also the number of its session and process group."""
        return self._process.pid

    def wait(self, seconds: float) -> bool:
        """Has it ended within so many seconds?"""
        deadline = time.monotonic() + seconds
        while not self._ended():
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.02)
        return True

    def _ended(self) -> bool:
        # Left a zombie: as long as nobody has taken its status, no other process or group can bear its number.
        return (
            self._process.returncode is not None
            or os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        )

    def kill(self, dump_stacks: bool = False) -> str:
        """Ends the whole session, and removes what it has in /dev/shm. Says how the process had ended, if it had.

        `dump_stacks`: have it first write what its threads are at to the log, as far as it still can.
        """
        if self._process.returncode is None:
            had_ended = self._ended()
            if dump_stacks and not had_ended:
                os.kill(self.pid, signal.SIGUSR1)
                time.sleep(_DUMP_SECONDS)
            segments = shared_segments(self.pid)
            os.killpg(self.pid, signal.SIGKILL)
            returncode = self._process.wait()
            deadline = time.monotonic() + _WORKERS_SECONDS
            while session_members(self.pid) and time.monotonic() < deadline:
                time.sleep(0.02)  # until they have given back the devices' memory
            remove_segments(segments)
            self._ending = _ending(returncode) if had_ended else "was running and has been killed"
        return self._ending

    def log_tail(self) -> str:
        with self.log_path.open("rb") as log:
            size = log.seek(0, os.SEEK_END)
            log.seek(max(0, size - _LOG_TAIL_BYTES))
            lines = log.read().decode(errors="replace").splitlines()
        return "\n".join(f"    {line}" for line in lines[-_LOG_LINES:])


def _ending(returncode: int) -> str:
    if returncode >= 0:
        return f"exited with code {returncode}"
    name = signal.Signals(-returncode).name
    hint = " (perhaps the kernel for want of memory: see dmesg)" if returncode == -signal.SIGKILL else ""
    return f"was killed by signal {-returncode}, {name}{hint}"
