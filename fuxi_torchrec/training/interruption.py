"""Being preempted, and being stuck."""

import faulthandler
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class StopRequest:
    """Whether somebody wants the job to end: schedulers send SIGTERM before they take a machine away."""

    def __init__(self) -> None:
        self.requested = False

    @contextmanager
    def listening(self) -> Iterator["StopRequest"]:
        """Take SIGTERM as a request while the body runs; the main thread only."""

        def note(number: int, frame: FrameType | None) -> None:
            self.requested = True

        before = signal.signal(signal.SIGTERM, note)
        try:
            yield self
        finally:
            signal.signal(signal.SIGTERM, before)


class Watchdog:
    """Shows where every thread of this process stands when nothing has moved for some seconds."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def moved(self) -> None:
        faulthandler.dump_traceback_later(self.seconds, repeat=False, file=sys.__stderr__ or sys.stderr)

    def stop(self) -> None:
        faulthandler.cancel_dump_traceback_later()
