"""The one rule on how far apart two log-probabilities may be before their difference is exponentiated."""

from __future__ import annotations

from torch import Tensor

MAX_LOG_RATIO = 20.0
"""e**20 is 4.9e8, far past every clip, while e**89 is no float32 any more and turns a gradient into NaN."""


def bounded_log_ratio(logprobs: Tensor, base_logprobs: Tensor) -> Tensor:
    """log(p / base) of each token, at most MAX_LOG_RATIO, to be exponentiated; the shape of the arguments.

    The bound is on the upper side alone: below, exp goes to 0 by itself. Past the bound the gradient is 0. Log-ratios
    that are not exponentiated are never bounded.
    """
    return (logprobs - base_logprobs).clamp(max=MAX_LOG_RATIO)
