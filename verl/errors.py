"""Mistakes of the user: printed once, without a traceback, and the process ends with EXIT_CODE."""

from __future__ import annotations

EXIT_CODE = 2


class UserError(ValueError):
    """What the user got wrong and can put right. Each problem is one message: place, values, remedy."""

    def __init__(self, *problems: str) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


class SharedError(UserError):
    """A mistake that all ranks of a job raise alike, wherever it was found."""


class ConfigError(UserError):
    """A setting, or a combination of settings, that cannot work."""


class MeshError(UserError):
    """A device mesh that cannot be read, or that this job cannot hold."""
