"""What goes into an engine and what comes out: token ids, never text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn. `temperature` 0 is greedy, `top_k` 0 and `top_p` 1 are off."""

    temperature: float
    top_p: float
    top_k: int
    max_tokens: int
    stop_token_ids: tuple[int, ...]
    """Every id that ends a response, the model's own end tokens among them."""
    ignore_eos: bool = False
    """Go on to `max_tokens` whatever is drawn."""


@dataclass(frozen=True)
class Request:
    row: int
    """The sample's row in the step's global order; also its name in the engine."""
    prompt_ids: tuple[int, ...]
    seed: int
    """Of this sample alone: the draw depends on no other request and on no rank."""


@dataclass(frozen=True)
class Sample:
    row: int
    token_ids: list[int]
    """The response; the stop token that ended it is its last one."""
    logprobs: list[float]
    """Of each token, under the distribution that it was drawn from (temperature, top_k and top_p applied); of a greedy
    one, under the softmax of the logits as they are."""
    ended: bool
    """False where `max_tokens` cut it off."""
    version: int = 0
    """Of the weights that drew it; 0: a recording that does not say."""


class Backend(Protocol):
    """One rollout replica, or a rank's part of one: then all of its ranks call all methods alike."""

    def begin_load(self) -> None:
        """New weights follow: until `commit` the engine has none that may be used."""
        ...

    def take_bucket(self, number: int) -> None:
        """Begins to take in a bucket of weights that is whole in the node's memory, and returns."""
        ...

    def await_bucket(self) -> None:
        """Returns when the engine has taken it in, so that it may be overwritten."""
        ...

    def commit(self, version: int) -> None:
        """All new weights are there: the engine runs them from now on. Cached prefixes are dropped."""
        ...

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[Sample]:
        """Samples in the order in which they finish."""
        ...

    def close(self) -> None: ...
