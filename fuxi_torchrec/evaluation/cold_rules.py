"""What a model must beat on items that nobody has had before: the most popular categories first.

Such items have no counts of their own, only their categories do. For every feature of items with one id there are two
rules: new items by how often the user has had their category, where that is equal by how often everybody has; and by
how often everybody has, the same list for all users. A rule knows which items are new and takes these alone; within a
category they are in an order that knows nothing of them.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from fuxi_torchrec.data.batches import EventBatch
from fuxi_torchrec.events.feature_table import FeatureTable
from fuxi_torchrec.events.hashing import mix
from fuxi_torchrec.events.histories import Ints, Ragged
from fuxi_torchrec.tasks.rank_metrics import UNRANKED


class ColdRules:
    """Ranks of new items among the new items.

    Args:
        table: features of all items; each one with ids of one value is a rule.
        cold: (items + 1,) which items have no event in training.
        counts: (items + 1,) training events of each.
    """

    def __init__(self, table: FeatureTable, cold: NDArray[np.bool_], counts: Ints) -> None:
        columns = {name: column for name, column in table.values.items() if not isinstance(column, Ragged)}
        self.categories: dict[str, Ints] = {f"new items by {name}": column for name, column in columns.items()}
        self.popular: dict[str, NDArray[np.float64]] = {
            name: np.bincount(values, counts, int(values.max(initial=0)) + 1).astype(np.float64)
            for name, values in self.categories.items()
        }
        self.cold = np.flatnonzero(cold)
        # their indices are by how often they will be bought: an order that knows nothing instead
        self.place = np.argsort(np.argsort(mix(0, self.cold.astype(np.uint64))))
        self.names = (*self.categories, *(f"{name}, of everybody" for name in self.categories))

    def ranks(self, histories: EventBatch, targets: Sequence[int], filter_seen: bool) -> dict[str, torch.Tensor]:
        """Ranks by each rule; UNRANKED for targets that are not new."""
        items, offsets = histories.items.numpy(), histories.offsets.numpy()
        found: dict[str, list[int]] = {name: [] for name in self.names}
        for number, target in enumerate(targets):
            history = items[offsets[number] : offsets[number + 1]]
            place = int(np.searchsorted(self.cold, target))
            known = place < len(self.cold) and self.cold[place] == target
            for name, values in self.categories.items():
                everybody = self.popular[name]
                own = np.bincount(values[history], minlength=len(everybody)) + everybody / (1 + everybody.sum())
                for title, scores in ((name, own), (f"{name}, of everybody", everybody)):
                    found[title].append(self._rank(scores[values[self.cold]], place) if known else UNRANKED)
        return {name: torch.tensor(ranks, dtype=torch.int64) for name, ranks in found.items()}

    def _rank(self, scores: NDArray[np.float64], place: int) -> int:
        tied = (scores == scores[place]) & (self.place < self.place[place])
        return 1 + int((scores > scores[place]).sum()) + int(tied.sum())
