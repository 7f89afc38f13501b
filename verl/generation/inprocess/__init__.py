"""The `torch` rollout backend: generation in the rank's own process, with the model's own Hugging Face code."""

from verl.generation.inprocess.engine import TorchEngine

__all__ = ["TorchEngine"]
