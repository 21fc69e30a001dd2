"""Users divided among processes, and each process's users into batches, as every process can work out by itself."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]

_USER_COST = 32  # of a user beside its events, in events


@dataclass(frozen=True)
class Shares:
    """Batches of every process; all have as many, some of them empty at the end.

    Attributes:
        batches: of each process, rows of users.
    """

    batches: list[list[Ints]]

    @staticmethod
    def of(users: Ints, lengths: Ints, processes: int, batch_events: int, most_users: int) -> "Shares":
        """Neighbouring users to one process, about equal work to each, and batches of bounded size.

        Args:
            users: rows in order.
            lengths: events of each of them that are encoded.
            batch_events: events of a batch, about.
            most_users: of a batch.
        """
        work = np.cumsum(lengths + _USER_COST)
        total = int(work[-1]) if len(work) else 0
        bounds = np.searchsorted(work, [total * n // processes for n in range(1, processes)], side="left")
        own = zip(np.split(users, bounds), np.split(lengths, bounds), strict=True)
        cut = [_batches(rows, events, batch_events, most_users) for rows, events in own]
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


def _batches(users: Ints, lengths: Ints, batch_events: int, most_users: int) -> list[Ints]:
    found, begin, events = [], 0, 0
    for number, length in enumerate(lengths.tolist()):
        if number > begin and (events + length > batch_events or number - begin == most_users):
            found.append(users[begin:number])
            begin, events = number, 0
        events += length
    return [*found, users[begin:]] if len(users) else found
