"""Where long work stands: training with a live line on a terminal, plain lines in a log."""

import sys
import time
from typing import Any

from fuxi_torchrec.logging import get_logger

logger = get_logger(__name__)

_SECONDS = 10.0  # between lines of progress


class ProgressLine:
    """Shows steps, loss, speed, memory and the time left.

    Args:
        total: steps in all, about.
        live: draw a moving bar; by default where standard error is a terminal.
    """

    def __init__(self, total: int, live: bool | None = None) -> None:
        self.total = total
        self._bar: Any = None
        self._task: Any = None
        self._first: tuple[int, float] | None = None
        if sys.stderr.isatty() if live is None else live:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            self._bar = Progress(
                TextColumn("training"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[about]}"),
                TimeRemainingColumn(),
                console=Console(stderr=True),
            )
            self._task = self._bar.add_task("training", total=total, about="")
            self._bar.start()

    def show(self, step: int, loss: float, events_per_second: float, memory_mb: int, epoch: int) -> None:
        """At a logged step."""
        now = time.monotonic()
        if self._first is None:
            self._first = (step, now)
        about = f"epoch {epoch}, loss {loss:.4f}, {events_per_second:,.0f} events/s, {memory_mb} MB"
        if self._bar is not None:
            self._bar.update(self._task, completed=step, about=about)
            return
        logger.info("step %d of %d, %s, %s left", step, self.total, about, self._left(step, now))

    def _left(self, step: int, now: float) -> str:
        assert self._first is not None
        first, began = self._first
        if step == first:
            return "unknown time"
        seconds = (now - began) / (step - first) * max(0, self.total - step)
        return _duration(seconds)

    def close(self) -> None:
        """At the end."""
        if self._bar is not None:
            self._bar.stop()


class ProgressLines:
    """A line now and then: how far, how fast, how long still."""

    def __init__(self, what: str, total: int, unit: str) -> None:
        self.what, self.total, self.unit = what, total, unit
        self._began = self._last = time.monotonic()

    def show(self, done: int) -> None:
        """After some work; says something only if the last line is old enough."""
        now = time.monotonic()
        if now - self._last < _SECONDS or not done:
            return
        self._last = now
        speed = done / (now - self._began)
        left = (self.total - done) / speed
        logger.info(
            "%s %s of %s %s, %s a second, %s left",
            self.what,
            f"{done:,}",
            f"{self.total:,}",
            self.unit,
            f"{speed:,.0f}",
            _duration(left),
        )


def _duration(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds >= 90 else f"{seconds:.0f} s"
