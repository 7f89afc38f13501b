"""vLLM as a rollout backend: the engine runs in a child process of the rank that leads a replica."""
