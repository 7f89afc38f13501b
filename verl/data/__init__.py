"""Prompts: files of chat messages or strings in, batches of token ids out. Nothing here communicates."""
