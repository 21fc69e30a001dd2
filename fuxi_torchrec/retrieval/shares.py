"""Users divided among processes, and each process's users into batches, as every process can work out by itself."""

import time
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fuxi_torchrec.logging import get_logger

logger = get_logger(__name__)

Ints = NDArray[np.int64]

_USER_COST = 32  # of a user beside its events, in events
_SECONDS = 10.0  # between lines of progress


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
