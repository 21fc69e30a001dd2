"""What a model must beat: popular items, the user's latest and most frequent ones, what usually follows the last one.

Each is an order of all known items, so a target has exactly one rank: items with equal scores stand by popularity, and
items of equal popularity by index; a user's equally frequent items by how lately they came. *Frequent and recent items*
are the user's own by how often each came, over how many events ago it last did, the last event being the first.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from fuxi_torchrec.data.batches import BatchMaker, EventBatch
from fuxi_torchrec.events.histories import Ints
from fuxi_torchrec.tasks.rank_metrics import UNRANKED

NAMES = ("popularity", "recent items", "frequent items", "frequent and recent items", "transitions")


_Pairs = tuple[Ints, Ints]  # pairs of neighbouring items, each as one number, in order; and how often they came


def _merged(parts: Sequence[_Pairs]) -> _Pairs:
    codes, where = np.unique(np.concatenate([codes for codes, _ in parts]), return_inverse=True)
    times = np.concatenate([times for _, times in parts])
    return codes, np.bincount(where, weights=times, minlength=len(codes)).astype(np.int64)


class Rules(Protocol):
    """Ranks of targets without a model."""

    @property
    def names(self) -> tuple[str, ...]:
        """Of the rules."""

    def ranks(self, histories: EventBatch, targets: Sequence[int], filter_seen: bool) -> dict[str, torch.Tensor]:
        """By each rule."""


class Baselines:
    """Ranks of targets by rules that need no model.

    Args:
        maker: the dataset with its split.
        known: (items + 1,) which items are candidates.
        counts: (items + 1,) training events of each.
    """

    names = NAMES

    def __init__(self, maker: BatchMaker, known: NDArray[np.bool_], counts: Ints) -> None:
        self.known = known
        order = np.lexsort((np.arange(len(counts)), -counts))
        self._by_popularity = order[known[order]]
        self._place = np.full(len(counts), len(counts), np.int64)  # of each item among all by popularity
        self._place[self._by_popularity] = np.arange(len(self._by_popularity))
        # where each item's successors in the training split begin; and these, most frequent first
        self._first, self._successors = self._count_transitions(maker)

    def _count_transitions(self, maker: BatchMaker) -> tuple[Ints, Ints]:
        items, none = len(self.known), np.zeros(0, np.int64)
        merged, waiting = (none, none), list[_Pairs]()
        for before, after in maker.training_pairs():
            keep = self.known[before] & self.known[after]
            waiting.append(np.unique(before[keep] * items + after[keep], return_counts=True))
            if sum(len(codes) for codes, _ in waiting) >= len(merged[0]):  # few merges, of as much again each
                merged, waiting = _merged([merged, *waiting]), []
        codes, times = _merged([merged, *waiting])
        before, after = codes // items, codes % items
        order = np.lexsort((self._place[after], -times, before))
        return np.searchsorted(before[order], np.arange(items + 1)), after[order]

    def ranks(self, histories: EventBatch, targets: Sequence[int], filter_seen: bool) -> dict[str, torch.Tensor]:
        """Ranks by each rule; UNRANKED for unknown targets.

        Args:
            histories: everything before the targets, whose ids are 0 if unknown.
            filter_seen: leave the user's own items out of the candidates; the target stays.
        """
        items, offsets = histories.items.numpy(), histories.offsets.numpy()
        ranks: dict[str, list[int]] = {name: [] for name in NAMES}
        for number, target in enumerate(targets):
            history = items[offsets[number] : offsets[number + 1]]
            for name, rank in zip(NAMES, self._of_user(history, target, filter_seen), strict=True):
                ranks[name].append(rank)
        return {name: torch.tensor(found, dtype=torch.int64) for name, found in ranks.items()}

    def _of_user(self, history: Ints, target: int, filter_seen: bool) -> list[int]:
        if target == 0:
            return [UNRANKED] * len(NAMES)
        distinct, back, times = np.unique(history[::-1], return_index=True, return_counts=True)
        known = self.known[distinct]
        distinct, back, times = distinct[known], back[known], times[known]
        recent = distinct[np.argsort(back)]  # latest first
        frequent, both = distinct[np.lexsort((back, -times))], distinct[np.lexsort((back, -times / (back + 1)))]
        after = recent[:0]
        if len(history):
            after = self._successors[self._first[history[-1]] : self._first[history[-1] + 1]]
        left_out = recent[recent != target] if filter_seen else recent[:0]
        if filter_seen:
            recent = frequent = both = recent[:0]  # none of them is a candidate
            after = after[~np.isin(after, left_out)]
        rules = (recent[:0], recent, frequent, both, after)
        return [self._rank(first, target, left_out) for first in rules]

    def _rank(self, first: Ints, target: int, left_out: Ints) -> int:
        """The target's place when ``first`` come first, then all others by popularity."""
        found = np.flatnonzero(first == target)
        if len(found):
            return int(found[0]) + 1
        better = self._place[np.concatenate([first, left_out])] < self._place[target]
        return len(first) + int(self._place[target]) - int(better.sum()) + 1
