"""verl: PPO post-training of language models, launched by plain torchrun."""

__version__ = "0.2.0a0"
