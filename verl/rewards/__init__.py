"""Rule-based rewards: the built-in functions, how a user's function is found, and the processes that run them.

Worker processes import this package, so it stays light: no torch, no transformers.
"""
