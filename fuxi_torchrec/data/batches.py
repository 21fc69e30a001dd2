"""Batches of events as plain tensors."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fuxi_torchrec.data.reader import Reader, RowGroup
from fuxi_torchrec.data.schedule import Position, Schedule
from fuxi_torchrec.data.splits import Bounds, Part, Split
from fuxi_torchrec.events.hashing import mix
from fuxi_torchrec.events.histories import Column, Ints, bounds_of, no_values, ranges, stack, take


@dataclass(frozen=True)
class EventBatch:
    """Sequences of B users, T events in all, one after another.

    Attributes:
        items: (T,) dense indices of the input events; 0 is unknown.
        targets: (T,) index of the event after each; of weight 0 where it is not to be predicted.
        target_weights: (T,) float32.
        timestamps: (T,) int64 times of the input events.
        request_timestamps: (B,) int64, the time of the event after each sequence's last.
        offsets: (B + 1,) int64.
        features: of the input events, as arrays: they become bags.
        users: (B,) rows of the users in the dataset.
        end: where training stands after this batch, on the last micro-batch of a step; None elsewhere.
    """

    items: Tensor
    targets: Tensor
    target_weights: Tensor
    timestamps: Tensor
    request_timestamps: Tensor
    offsets: Tensor
    users: Tensor
    features: dict[str, Column] = field(default_factory=dict)
    end: Position | None = None

    def __len__(self) -> int:
        return len(self.users)

    @property
    def events(self) -> int:
        return len(self.items)


@dataclass(frozen=True)
class Items:
    """Which items a run knows; all others are index 0, in the data layer.

    Args:
        known: (items + 1,) whether the run's training split has the item; entry 0 is False.
        oov_rate: share of input items replaced by 0 in training, so that its row is trained.
        seed: decides which.
        featured: (items + 1,) items with features, which are inputs and held-out targets whether they are known or not.
    """

    known: NDArray[np.bool_]
    oov_rate: float = 0.0
    seed: int = 0
    featured: NDArray[np.bool_] | None = None

    def __post_init__(self) -> None:
        if not 0.0 <= self.oov_rate < 1.0:
            raise ValueError(f"oov_rate must be at least 0 and below 1, not {self.oov_rate}")

    @cached_property
    def seen(self) -> NDArray[np.bool_]:
        """Items that have a row: one of their own, or that of their features."""
        return self.known if self.featured is None else self.known | self.featured

    def find(self, items: Ints, trained: bool = False) -> Ints:
        """Indices as the model sees them; with ``trained`` of known items alone."""
        return np.where((self.known if trained else self.seen)[items], items, 0)

    def dropped(self, epoch: int, user: Ints, begin: Ints, length: Ints) -> NDArray[np.bool_]:
        """Which events of an epoch have their item replaced, by the row of the user and the place in its history."""
        users = np.repeat(mix(self.seed, epoch, user.astype(np.uint64)), length)
        draw = mix(ranges(begin, length).astype(np.uint64), state=users)
        return draw < np.uint64(self.oov_rate * 2.0**64)


class BatchMaker:
    """Sequences of a dataset to batches: of its split, with the items that a run knows.

    Args:
        only: (items + 1,) which items can be targets that are held out; all by default.
    """

    def __init__(self, reader: Reader, split: Split, items: Items, only: NDArray[np.bool_] | None = None) -> None:
        self.reader, self.split, self.items, self.only = reader, split, items, only

    def training(self, schedule: Schedule, chosen: Ints, epoch: int, end: Position | None = None) -> EventBatch:
        """A batch of training sequences: next item at every position."""
        most, recent = schedule.plan.max_length, schedule.plan.truncation == "recent"
        order = np.sort(chosen)  # by row, and so by block
        user, window = schedule.sequences.user[order], schedule.sequences.window[order]
        pieces = []
        for number, rows, part in self.reader.by_block(user):
            block = self.reader.block(number)
            inputs = np.maximum(self.bounds(block).train_end[rows] - 1, 0)  # the last one is only a target
            begin = np.maximum(inputs - most, 0) if recent else np.minimum(window[part] * most, inputs)
            pieces.append(_Piece(block, rows, begin, np.minimum(begin + most, inputs), user[part]))
        return self._join(pieces, epoch, end)

    def evaluation(self, users: Ints, part: Part, max_length: int) -> EventBatch:
        """The last events before each user's target; the target stands at the last position, all other weights are 0.

        Users without a target are left out.
        """
        pieces = []
        order = np.sort(users)
        for number, rows, chosen in self.reader.by_block(order):
            block = self.reader.block(number)
            target = self.bounds(block).target(part)[rows]
            has = target >= 1
            begin = np.maximum(target[has] - max_length, 0)
            pieces.append(_Piece(block, rows[has], begin, target[has], order[chosen][has]))
        batch = self._join(pieces)
        last = batch.offsets[1:] - 1
        weights = torch.zeros_like(batch.target_weights)
        weights[last] = (batch.targets[last] > 0).float()
        return replace(batch, target_weights=weights)

    def histories(self, users: Ints, max_length: int, until: int | None = None) -> tuple[EventBatch, Ints]:
        """The last events of each user, whatever the split, none after ``until``; and how many came before them.

        Users without events are left out. Nothing is a target; the request times are those of the last events.
        """
        pieces, before = [], [np.zeros(0, np.int64)]
        order = np.sort(users)
        for number, rows, chosen in self.reader.by_block(order):
            block = self.reader.block(number)
            first, end = block.offsets[rows], block.offsets[rows + 1]
            stop = end - first
            if until is not None:
                late = np.concatenate([[0], np.cumsum(block.times > until)])
                stop = stop - (late[end] - late[first])  # times rise within a history
            begin = np.maximum(stop - max_length, 0)
            pieces.append(_Piece(block, rows, begin, stop, order[chosen]))
            before.append(begin[stop > 0])
        return self._join(pieces, targets=False), np.concatenate(before)

    def bounds(self, block: RowGroup) -> Bounds:
        """The split of a block's users, kept with the block."""
        key = self.split, None if self.only is None else id(self.only)
        if key not in block.kept:
            weights = block.weights
            if self.only is not None:
                weights = self.only[block.items].astype(np.float32) * (1 if weights is None else weights)
            block.kept[key] = self.split.bounds(block.offsets, block.times, weights)
        found: Bounds = block.kept[key]
        return found

    def training_pairs(self) -> Iterator[tuple[Ints, Ints]]:
        """Neighbouring items of the training split, block by block: each event's item, and the item after it."""
        for number in range(len(self.reader.groups)):
            block = self.reader.block(number)
            train_end = self.bounds(block).train_end
            index = ranges(block.offsets[:-1], np.maximum(train_end - 1, 0))
            yield block.items[index], block.items[index + 1]

    def _join(
        self, pieces: "list[_Piece]", epoch: int | None = None, end: Position | None = None, targets: bool = True
    ) -> EventBatch:
        """A batch of the pieces; items are dropped at random in an epoch of training."""
        none = np.zeros(0, np.int64)
        items, goals, weights, times, requests, lengths, users = ([none] for _ in range(7))
        about = {feature.name: feature for feature in self.reader.dataset.info.features}
        features = {name: [no_values(about[name], 0)] for name in self.reader.features}
        for piece in pieces:
            block, some = piece.block, piece.stop > piece.begin
            rows, begin, stop, user = (each[some] for each in piece[1:])
            first, length = block.offsets[rows], stop - begin
            index = ranges(first + begin, length)
            item = self.items.find(block.items[index])
            if epoch is not None and self.items.oov_rate:
                item = np.where(self.items.dropped(epoch, user, begin, length), 0, item)
            items.append(item)
            goal = np.zeros_like(index)
            if targets:
                goal = self.items.find(block.items[index + 1], trained=epoch is not None)
            weight = np.ones(1, np.float32) if block.weights is None or not targets else block.weights[index + 1]
            goals.append(goal)
            weights.append(np.where(goal > 0, weight, 0))
            times.append(block.times[index])
            requests.append(block.times[first + stop - (0 if targets else 1)])
            lengths.append(length)
            users.append(user)
            for name, parts in features.items():
                parts.append(take(block.features[name], index))
        return EventBatch(
            items=_tensor(items),
            targets=_tensor(goals),
            target_weights=torch.from_numpy(np.concatenate(weights).astype(np.float32)),
            timestamps=_tensor(times),
            request_timestamps=_tensor(requests),
            offsets=torch.from_numpy(bounds_of(np.concatenate(lengths))),
            users=_tensor(users),
            features={name: stack(parts) for name, parts in features.items()},
            end=end,
        )


class _Piece(NamedTuple):
    """Events begin .. stop − 1 of some rows of a block."""

    block: RowGroup
    rows: Ints
    begin: Ints
    stop: Ints
    users: Ints


def _tensor(parts: list[Ints]) -> Tensor:
    return torch.from_numpy(np.concatenate(parts).astype(np.int64, copy=False))
