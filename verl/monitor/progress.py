"""The run on the screen: a plain line a step, and below them, on a terminal, one live line."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from datetime import timedelta

from rich.console import Console
from rich.live import Live
from rich.text import Text

from verl.monitor.names import KL, RESPONSE_LENGTH, SCORE, STAGE_SECONDS, TOKENS_PER_SECOND

ETA_STEPS = 20
BAR_WIDTH = 20


class Progress:
    """Shows how far the run is, within `with Progress(...) as progress:`.

    The live line is one line high and has no thread: it is drawn when there is news. So it never moves the cursor up
    over what other ranks print to the same terminal, and a process forked from this one inherits no lock that a thread
    holds. What this process prints or warns meanwhile appears above the line, as it was written.
    """

    def __init__(
        self,
        total_steps: int,
        *,
        done: int = 0,
        enabled: bool = True,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`done` of `total_steps` lie behind. Not `enabled` (other ranks, trainer.progress=false), it says nothing."""
        self._total, self._done, self._enabled = total_steps, done, enabled
        self._clock, self._at = clock, clock()
        self._step_seconds: deque[float] = deque(maxlen=ETA_STEPS)
        self._stage: str | None = None
        self._console = console or terminal()
        self._live: Live | None = None
        if enabled and self._console.is_interactive:
            self._live = Live(
                get_renderable=self._line,
                console=self._console,
                auto_refresh=False,
                redirect_stdout=sys.stdout.isatty(),
                # where stderr is a file, rich would take the warnings out of it
                redirect_stderr=sys.stderr.isatty(),
            )

    def __enter__(self) -> Progress:
        if self._live:
            self._live.start(refresh=True)
            # rich hides it until stop(), which a process that is killed does not reach
            self._console.show_cursor(True)
        return self

    def __exit__(self, *failure: object) -> None:
        if self._live:
            self._live.stop()

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        """`step` steps are done; `metrics` are the last one's. What it lacks is not shown."""
        now = self._clock()
        if step > self._done:
            self._step_seconds.append((now - self._at) / (step - self._done))
        self._done, self._at = step, now
        self.note(" | ".join([f"step {self._count()}", *_figures(metrics), *self._eta()]))

    def stage(self, name: str | None) -> None:
        """The stage that the run is in now: a listener for `Stages`."""
        self._stage = name
        if self._live:
            self._live.refresh()

    def note(self, text: str) -> None:
        """A line that stays; the live line is drawn anew below it."""
        if self._enabled:
            self._console.print(text)
        if self._live:
            self._live.refresh()

    def _line(self) -> Text:
        full, empty = ("━", "─") if "utf" in self._console.encoding else ("#", "-")
        filled = BAR_WIDTH * self._done // max(self._total, 1)
        line = Text(no_wrap=True, overflow="crop")
        line.append(full * filled, "green").append(empty * (BAR_WIDTH - filled), "dim")
        line.append(f" {self._count()}", "bold")
        for part in [*self._eta(), *([self._stage] if self._stage else [])]:
            line.append(" | ", "dim").append(part)
        return line

    def _count(self) -> str:
        return f"{self._done}/{self._total}"

    def _eta(self) -> list[str]:
        """From the mean of the last steps, with what lay between them: validation, checkpoints."""
        if not self._step_seconds:
            return []
        left = (self._total - self._done) * sum(self._step_seconds) / len(self._step_seconds)
        return [f"eta {timedelta(seconds=round(left))}"]


def terminal() -> Console:
    """A console that writes text as it is: no markup, no wrapping; interactive only on a real terminal."""
    interactive = None if sys.stdout.isatty() else False
    return Console(soft_wrap=True, markup=False, emoji=False, highlight=False, force_interactive=interactive)


def _figures(metrics: Mapping[str, float]) -> list[str]:
    figures = []
    if SCORE in metrics:
        figures.append(f"reward {metrics[SCORE]:.3f}")
    kl = next((name for name in KL if name in metrics), None)
    if kl:
        figures.append(f"kl {metrics[kl]:.3g}")
    if f"{RESPONSE_LENGTH}/mean" in metrics:
        mean, longest = metrics[f"{RESPONSE_LENGTH}/mean"], metrics[f"{RESPONSE_LENGTH}/max"]
        figures.append(f"response {mean:.0f} tokens (max {longest:.0f})")
    if TOKENS_PER_SECOND in metrics:
        figures.append(f"{metrics[TOKENS_PER_SECOND]:,.0f} tokens/s")
    stages = [(seconds, name) for name, seconds in metrics.items() if name.startswith(STAGE_SECONDS)]
    if stages:
        slowest_first = sorted(stages, reverse=True)
        figures.append(", ".join(f"{name.removeprefix(STAGE_SECONDS)} {spent:.1f} s" for spent, name in slowest_first))
    return figures
