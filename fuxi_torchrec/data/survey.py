"""What is known of all users and items before any batch is made: one pass over the dataset."""

from dataclasses import dataclass

import numpy as np

from fuxi_torchrec.data.batches import BatchMaker
from fuxi_torchrec.data.reader import RowGroup
from fuxi_torchrec.data.splits import LeaveOneOut, Part
from fuxi_torchrec.events.histories import Ints, bounds_of, ranges


@dataclass(frozen=True)
class Survey:
    """Of all users in row order, and of all items.

    Attributes:
        lengths: events of each user.
        train_lengths: those of them that are for training.
        users_with: rows of the users that have a target to evaluate.
        item_counts: (items + 1,) training events of each item; empty unless asked for.
        target_counts: (items + 1,) those that are targets of training, likewise.
    """

    lengths: Ints
    train_lengths: Ints
    users_with: Ints
    item_counts: Ints
    target_counts: Ints


def survey(maker: BatchMaker, part: Part = "valid", items: bool = False) -> Survey:
    """Read the dataset once, or its lengths alone where they decide.

    Args:
        maker: the dataset and its split.
        part: whose targets ``users_with`` is about.
        items: count items too.
    """
    reader, none = maker.reader, np.zeros(0, np.int64)
    counts = np.zeros((2, reader.dataset.info.items + 1 if items else 0), np.int64)
    by_lengths = isinstance(maker.split, LeaveOneOut) and not reader.dataset.info.has_target and maker.only is None
    if not items and by_lengths:
        own = reader.lengths()
        bounds = maker.split.bounds(bounds_of(own), none, None)
        return Survey(own, bounds.train_end, np.flatnonzero(bounds.target(part) >= 0), *counts)
    lengths, train_lengths, targets = [none], [none], [none]
    for number in range(len(reader.groups)):
        block = reader.block(number)
        bounds = maker.bounds(block)
        lengths.append(block.lengths)
        train_lengths.append(bounds.train_end)
        targets.append(bounds.target(part))
        if items:
            counts += _counts(block, bounds.train_end, counts.shape[1])
    users_with = np.flatnonzero(np.concatenate(targets) >= 0)
    return Survey(np.concatenate(lengths), np.concatenate(train_lengths), users_with, *counts)


def _counts(block: RowGroup, train_end: Ints, size: int) -> Ints:
    """(2, size) training events of each item, and those that are targets: not a user's first, and of some weight."""
    first = block.offsets[:-1]
    index = ranges(first, train_end)
    later = ranges(first + np.minimum(train_end, 1), np.maximum(train_end - 1, 0))
    if block.weights is not None:
        later = later[block.weights[later] > 0]
    return np.stack([np.bincount(block.items[some], minlength=size) for some in (index, later)])
