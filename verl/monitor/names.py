"""Names of the metrics that are read again: by the progress display, the summary and the benchmarks."""

from __future__ import annotations

VALIDATION_SCORE = "val/score/mean"
"""Mean score of all validation prompts: how good a model is."""
SCORE = "critic/score/mean"
"""Mean score of a step's responses."""
KL = ("actor/reward_kl_penalty", "actor/kl_loss", "actor/ppo_kl")
"""What is shown as the KL: the first of these that a run has."""
RESPONSE_LENGTH = "response_length"
"""A spread (/mean, /max, /min) of response lengths in tokens."""
STAGE_SECONDS = "timing_s/"
"""Prefix of the seconds that a step spent in each stage."""
STEP_TOKENS = "perf/total_num_tokens"
"""Prompt and response tokens of a step, over all devices."""
STEP_SECONDS = "perf/time_per_step"
"""Wall time of a step."""
TOKENS_PER_SECOND = "perf/tokens_per_s"
SAMPLES_PER_SECOND = "perf/samples_per_s"
DEVICE_THROUGHPUT = "perf/throughput"
"""Tokens per second and device."""


def throughput(num_tokens: float, num_samples: float, seconds: float, num_devices: int) -> dict[str, float]:
    """The speed of one step. `num_tokens` (prompt and response) and `num_samples` are over all devices."""
    return {
        STEP_TOKENS: num_tokens,
        STEP_SECONDS: seconds,
        TOKENS_PER_SECOND: num_tokens / seconds,
        SAMPLES_PER_SECOND: num_samples / seconds,
        DEVICE_THROUGHPUT: num_tokens / seconds / num_devices,
    }
