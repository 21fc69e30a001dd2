"""Users partitioned over ranks, and each rank's users into batches, as every rank can work out by itself."""

from dataclasses import dataclass

import numpy as np

from fuxi_torchrec.events.batching import batch_ends
from fuxi_torchrec.events.histories import Ints

_USER_COST = 32  # of a user beside its events, in events


@dataclass(frozen=True)
class UserPartition:
    """Batches of every rank; all have as many, some of them empty at the end."""

    batches: list[list[Ints]]  # of each rank, rows of users

    @staticmethod
    def of(users: Ints, lengths: Ints, ranks: int, batch_events: int, most_users: int) -> "UserPartition":
        """Neighbouring users to one rank, about equal work to each, in batches of bounded size.

        ``users`` are rows in order, ``lengths`` the events of each that are encoded, ``batch_events`` those of a batch.
        """
        work = np.cumsum(lengths + _USER_COST)
        total = int(work[-1]) if len(work) else 0
        bounds = np.searchsorted(work, [total * n // ranks for n in range(1, ranks)], side="left")
        own = zip(np.split(users, bounds), np.split(lengths, bounds), strict=True)
        ends = ((rows, batch_ends(events, batch_events, most_users)) for rows, events in own)
        cut = [np.split(rows, each[:-1]) if each else [] for rows, each in ends]
        most = max(map(len, cut))
        return UserPartition([batches + [np.zeros(0, np.int64)] * (most - len(batches)) for batches in cut])

    def flushes(self, users: int) -> list[bool]:
        """After which batches the ranks together have gathered so many users; always after the last."""
        found, waiting = [], 0
        for number in range(len(self.batches[0])):
            waiting += sum(len(batches[number]) for batches in self.batches)
            found.append(waiting >= users or number + 1 == len(self.batches[0]))
            waiting = 0 if found[-1] else waiting
        return found
