"""Users divided among processes, and each process's users into batches, as every process can work out by itself."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from fuxi_torchrec.distributed import World, failing_together
from fuxi_torchrec.logging import get_logger

logger = get_logger(__name__)

Ints = NDArray[np.int64]

_USER_COST = 32  # of a user beside its events, in events
_SECONDS = 10.0  # between lines of progress
_HEARTBEAT_SECONDS = 1.0

Result = TypeVar("Result")


@dataclass(frozen=True)
class Shares:
    """Batches of every process; all have as many, some of them empty at the end.

    Attributes:
        batches: of each process, rows of users.
    """

    batches: list[list[Ints]]

    @staticmethod
    def of(users: Ints, lengths: Ints, processes: int, tokens: int, most_users: int) -> "Shares":
        """Neighbouring users to one process, about equal work to each, and batches of bounded size.

        Args:
            users: rows in order.
            lengths: events of each of them that are encoded.
            tokens: events of a batch, about.
            most_users: of a batch.
        """
        work = np.cumsum(lengths + _USER_COST)
        total = int(work[-1]) if len(work) else 0
        bounds = np.searchsorted(work, [total * n // processes for n in range(1, processes)], side="left")
        own = zip(np.split(users, bounds), np.split(lengths, bounds), strict=True)
        cut = [_batches(rows, events, tokens, most_users) for rows, events in own]
        most = max(map(len, cut))
        return Shares([batches + [np.zeros(0, np.int64)] * (most - len(batches)) for batches in cut])

    def flushes(self, users: int) -> list[bool]:
        """After which batches the processes together have gathered so many users; always after the last."""
        found, waiting = [], 0
        for number in range(len(self.batches[0])):
            waiting += sum(len(batches[number]) for batches in self.batches)
            found.append(waiting >= users or number + 1 == len(self.batches[0]))
            waiting = 0 if found[-1] else waiting
        return found


def _batches(users: Ints, lengths: Ints, tokens: int, most_users: int) -> list[Ints]:
    found, begin, events = [], 0, 0
    for number, length in enumerate(lengths.tolist()):
        if number > begin and (events + length > tokens or number - begin == most_users):
            found.append(users[begin:number])
            begin, events = number, 0
        events += length
    return [*found, users[begin:]] if len(users) else found


def on_first(world: World, what: str, work: Callable[[], Result]) -> Result | None:
    """Let process 0 do something however long it takes: the others wait as long as it lives. None on the others.

    It works in a thread, and says now and then that it still does, so that no collective meets its timeout.
    """
    done: list[Result] = []
    failed: list[Exception] = []

    def run() -> None:
        try:
            done.append(work())
        except Exception as error:
            failed.append(error)

    thread = threading.Thread(target=run, daemon=True)
    if world.rank == 0:
        thread.start()
    working = torch.ones(1)
    while working:
        if world.rank == 0:
            thread.join(_HEARTBEAT_SECONDS)
            working.fill_(float(thread.is_alive()))
        dist.broadcast(working, 0)
    with failing_together(what):
        if failed:
            raise failed[0]
    return done[0] if done else None


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
            f"{left / 60:.0f} min" if left >= 90 else f"{left:.0f} s",
        )
