"""Where long work stands: training with a live line on a terminal, plain lines in a log."""

import sys
import time
from typing import Any

from fuxi_torchrec.logging import get_logger

logger = get_logger(__name__)

_SECONDS = 10.0  # between lines of progress


class ProgressLine:
    """Shows steps, loss, speed, memory and the time left: a moving bar on a terminal."""

    def __init__(self) -> None:
        self._bar: Any = None
        self._task: Any = None
        self._first: tuple[int, float] | None = None
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import MofNCompleteColumn, Progress, TextColumn

            columns = (*Progress.get_default_columns(), MofNCompleteColumn(), TextColumn("{task.fields[about]}"))
            self._bar = Progress(*columns, console=Console(stderr=True))
            self._task = self._bar.add_task("training", total=None, about="")
            self._bar.start()

    def show(self, step: int, total: int, loss: float, events_per_second: float, memory_mb: int, epoch: int) -> None:
        """After a step, of about ``total``."""
        about = f"epoch {epoch}, loss {loss:.4f}, {events_per_second:,.0f} events/s, {memory_mb} MB"
        if self._bar is not None:
            self._bar.update(self._task, completed=step, total=total, about=about)
            return
        now = time.monotonic()
        self._first = self._first or (step, now)
        first, began = self._first
        left = "unknown time"
        if step > first:
            left = _duration((now - began) / (step - first) * max(0, total - step))
        logger.info("step %d of %d, %s, %s left", step, total, about, left)

    def close(self) -> None:
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
        far = f"{done:,} of {self.total:,} {self.unit}, {speed:,.0f} a second"
        logger.info("%s %s, %s left", self.what, far, _duration((self.total - done) / speed))


def _duration(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds >= 90 else f"{seconds:.0f} s"
