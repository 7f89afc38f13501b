"""For every test: one thread a process, since many processes share few cores, and nothing fetched from a model hub."""

from __future__ import annotations

import os
import signal

from hypothesis import settings

# Before the first import of torch or transformers, which read them then; child processes inherit them.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# No limit on a single example: this machine may be busy. A change is judged by the same examples each time;
# `make test-all` draws new ones.
settings.register_profile("verl", deadline=None, derandomize="VERL_TEST_NEW_EXAMPLES" not in os.environ)
settings.load_profile("verl")

# A shell that starts the tests in the background makes them ignore SIGINT, and nohup SIGHUP; so would every process
# that they start.
signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, lambda number, frame: None)  # goes on here; a program that is started has the default
