"""Where the engine process begins: `python -m verl.generation.vllm.entry FD PARENT_PID`, run by child.py.

It imports nothing heavy, so that whatever the rank dies of, and however early, no process is left over.
"""

import faulthandler
import os
import signal
import sys

from verl.processes import die_with

if __name__ == "__mp_main__":
    # A tensor-parallel worker: multiprocessing has just started it, and has it import this module before anything else.
    # Its parent is the engine process, which leads the session.
    die_with(os.getsid(0), signal.SIGKILL)
elif __name__ == "__main__":
    die_with(int(sys.argv[2]), signal.SIGKILL)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)  # Child.dump_stacks
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # its rank stops it
    from verl.generation.vllm.server import serve

    serve(descriptor=int(sys.argv[1]))
