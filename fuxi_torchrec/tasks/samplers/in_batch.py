"""The targets of a rank's own micro-batch, with logQ correction."""

import numpy as np

from fuxi_torchrec.tasks.base import ItemSet
from fuxi_torchrec.tasks.samplers.base import Candidates, Draw, Sampler


class InBatch(Sampler):
    """The batch's distinct targets, and for each ``log(times it came / times expected)``.

    Weighted so, a sum over the pool estimates the sum over all items. Targets of 0 are none and left out.
    """

    needs_target_counts = True

    def draw(self, items: ItemSet, at: Draw) -> Candidates:
        assert items.target_counts is not None
        targets_P = at.targets_P
        targets_P = targets_P[targets_P > 0]
        ids_M, times_M = np.unique(targets_P, return_counts=True)
        expected_M = items.target_counts[ids_M] * (len(targets_P) / max(1, int(items.target_counts.sum())))
        return Candidates(ids_M, np.log(times_M / expected_M).astype(np.float32))

    def lookups(self, events: int, items: int) -> int:
        return 0
