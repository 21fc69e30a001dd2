"""One pool for all micro-batches of all ranks in a step."""

import numpy as np

from fuxi_torchrec.events.hashing import mix
from fuxi_torchrec.tasks.base import ItemSet
from fuxi_torchrec.tasks.samplers.base import Candidates, Draw, Sampler, below

_SALT = 0x5348_4152_4544  # so that the draws have nothing in common with any other use of the same seed


class Shared(Sampler):
    """``count`` draws, with replacement, from the known items: those that came, and the log of how often."""

    def draw(self, items: ItemSet, at: Draw) -> Candidates:
        """The same for every rank and micro-batch of a step."""
        bits = mix(_SALT, at.seed, at.epoch, at.step, np.arange(self.count, dtype=np.uint64))
        ids_M, times_M = np.unique(items.ids[below(len(items.ids), bits)], return_counts=True)
        return Candidates(ids_M, np.log(times_M).astype(np.float32))

    def stands_for(self, items: ItemSet) -> float:
        return len(items.ids) / self.count

    def lookups(self, events: int, items: int) -> int:
        return self.count
