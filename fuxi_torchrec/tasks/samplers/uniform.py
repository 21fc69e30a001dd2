"""Candidates of its own for each position."""

import numpy as np

from fuxi_torchrec.events.hashing import GOLDEN, mix, scramble
from fuxi_torchrec.tasks.base import ItemSet
from fuxi_torchrec.tasks.samplers.base import Candidates, Draw, Sampler, below

_SALT = 0x554E_4946_4F52_4D  # so that the draws have nothing in common with any other use of the same seed
_BLOCK = 2**15  # draws at a time, few enough to stay in the cache


class Uniform(Sampler):
    """``count`` draws, with replacement, from the known items for each position."""

    per_position = True
    grows = True

    def draw(self, items: ItemSet, at: Draw) -> Candidates:
        """(P, count), which follow from the position's user, the start of its sequence and its place there."""
        place = [x.astype(np.uint64) for x in at.places()]
        state_P1 = mix(_SALT, at.seed, at.epoch, at.step, *place)[:, None]
        stride_K = np.arange(1, self.count + 1, dtype=np.uint64) * GOLDEN
        drawn_PK = np.empty((len(place[0]), self.count), np.int64)
        size = max(_BLOCK // max(self.count, 1), 1)
        for begin in range(0, len(drawn_PK), size):
            part = slice(begin, begin + size)
            drawn_PK[part] = items.ids[below(len(items.ids), scramble(state_P1[part] + stride_K))]
        return Candidates(drawn_PK)

    def stands_for(self, items: ItemSet) -> float:
        return len(items.ids) / self.count

    def lookups(self, events: int, items: int) -> int:
        return events * self.count
