"""Events of several users, one user after another: what is encoded, stored and joined."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from fuxi_torchrec.events.errors import DataError
from fuxi_torchrec.events.features import Feature

Ints = NDArray[np.int64]
ITEM, TIME = "item", "timestamp"


def ranges(starts: Ints, lengths: Ints) -> Ints:
    """``start, start + 1, ...`` of each start, one after another.

    Example:
        >>> ranges(np.array([5, 0, 8]), np.array([2, 0, 3])).tolist()
        [5, 6, 8, 9, 10]
    """
    ends = lengths.cumsum()
    total = int(ends[-1]) if len(ends) else 0
    first: Ints = np.repeat(starts - (ends - lengths), lengths)
    return first + np.arange(total, dtype=np.int64)


def bounds_of(lengths: Ints) -> Ints:
    """(n + 1,) offsets of n consecutive pieces."""
    return np.concatenate((np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)))


@dataclass(frozen=True, eq=False)
class Ragged:
    """A list of values per event."""

    values: Ints
    bounds: Ints

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def take(self, at: Ints) -> "Ragged":
        lengths = np.diff(self.bounds)[at]
        return Ragged(self.values[ranges(self.bounds[at], lengths)], bounds_of(lengths))


Floats = NDArray[np.float32]
Ids = Ints | Ragged  # one of each event, or several
Column = Ids | Floats  # or (T, width) numbers, nan where they are missing
AnyColumn = TypeVar("AnyColumn", Ids, Column)


def take(column: AnyColumn, at: Ints) -> AnyColumn:
    """Of some events, in the order wanted."""
    found: AnyColumn = column.take(at) if isinstance(column, Ragged) else column[at]
    return found


def stack(columns: Sequence[AnyColumn]) -> AnyColumn:
    """Columns of one kind, one after another."""
    if isinstance(columns[0], Ragged):
        ragged = [column for column in columns if isinstance(column, Ragged)]
        lengths = np.concatenate([np.diff(column.bounds) for column in ragged])
        return Ragged(np.concatenate([column.values for column in ragged]), bounds_of(lengths))
    return np.concatenate([column for column in columns if not isinstance(column, Ragged)])


def no_values(feature: Feature, events: int) -> Column:
    """A feature that nobody gave: 0, or no values; of numbers nan."""
    if not feature.in_table:
        return np.full((events, feature.width), np.nan, np.float32)
    if feature.multiple:
        return Ragged(np.zeros(0, np.int64), np.zeros(events + 1, np.int64))
    return np.zeros(events, np.int64)


@dataclass(frozen=True, eq=False)
class Histories:
    """Histories of B users.

    Attributes:
        offsets: (B + 1,) where each user begins.
        items: (T,) dense indices.
        times: (T,).
        features: of each feature, a value per event or a list of values per event.
    """

    offsets: Ints
    items: Ints
    times: Ints
    features: dict[str, Column] = field(default_factory=dict)

    @staticmethod
    def empty(users: int, features: Sequence[Feature]) -> "Histories":
        none = np.zeros(0, np.int64)
        columns = {feature.name: no_values(feature, 0) for feature in features}
        return Histories(np.zeros(users + 1, np.int64), none, none, columns)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> Ints:
        return np.diff(self.offsets)

    def _take(self, at: Ints, lengths: Ints) -> "Histories":
        features = {name: take(column, at) for name, column in self.features.items()}
        return Histories(bounds_of(lengths), self.items[at], self.times[at], features)

    def select(self, users: Ints) -> "Histories":
        """Of some users, in the order wanted."""
        lengths = self.lengths[users]
        return self._take(ranges(self.offsets[users], lengths), lengths)

    def last(self, counts: Ints) -> "Histories":
        """The last events of each user, at most so many."""
        lengths = np.minimum(self.lengths, counts)
        return self._take(ranges(self.offsets[1:] - lengths, lengths), lengths)

    def filter(self, keep: NDArray[np.bool_]) -> "Histories":
        kept = bounds_of(keep.astype(np.int64))[self.offsets]
        return self._take(np.flatnonzero(keep), np.diff(kept))

    @staticmethod
    def stack(histories: Sequence["Histories"]) -> "Histories":
        """Users of several, one after another; at least one is needed."""
        return Histories(
            bounds_of(np.concatenate([each.lengths for each in histories])),
            np.concatenate([each.items for each in histories]),
            np.concatenate([each.times for each in histories]),
            {name: stack([each.features[name] for each in histories]) for name in histories[0].features},
        )

    def join(self, later: "Histories") -> "Histories":
        """The same users with more events each."""
        order = np.arange(2 * len(self)).reshape(2, -1).T.reshape(-1)
        mixed = Histories.stack((self, later)).select(order)
        return Histories(mixed.offsets[::2], mixed.items, mixed.times, mixed.features)

    @staticmethod
    def from_arrow(table: pa.Table, features: Sequence[Feature], where: str) -> "Histories":
        """Of list columns, a row per user; ``where`` is for messages."""
        items, lengths = _flat(table[ITEM])
        times, _ = _flat(table[TIME])
        columns = {feature.name: _feature_column(table[feature.name], feature) for feature in features}
        if any(len(column) != len(items) for column in (times, *columns.values())):
            raise DataError(f"{where}: lists of one user differ in length: the file is damaged, export again")
        return Histories(bounds_of(lengths), items, times, columns)

    def to_arrow(self) -> dict[str, pa.Array]:
        """List columns, a row per user."""
        lists, kind = (pa.ListArray, pa.int32()) if self.offsets[-1] < 2**31 else (pa.LargeListArray, pa.int64())
        columns = {ITEM: pa.array(self.items), TIME: pa.array(self.times)}
        for name, column in self.features.items():
            if isinstance(column, Ragged):
                columns[name] = pa.ListArray.from_arrays(pa.array(column.bounds, pa.int32()), pa.array(column.values))
            elif column.ndim == 2 and column.shape[1] > 1:
                ends, large = np.arange(len(column) + 1) * column.shape[1], column.size >= 2**31
                vectors = pa.LargeListArray if large else pa.ListArray
                offsets = pa.array(ends, pa.int64() if large else pa.int32())
                columns[name] = vectors.from_arrays(offsets, pa.array(column.reshape(-1)))
            else:
                columns[name] = pa.array(column.reshape(-1))
        return {name: lists.from_arrays(pa.array(self.offsets, kind), column) for name, column in columns.items()}


def _flat(lists: pa.ChunkedArray) -> tuple[Ints, Ints]:
    values = pc.list_flatten(lists).to_numpy().astype(np.int64, copy=False)
    return values, pc.fill_null(pc.list_value_length(lists), 0).to_numpy().astype(np.int64)


def _numbers(lists: pa.ChunkedArray, feature: Feature) -> Floats:
    """(T, width); of one element they may stand alone."""
    flat = pc.list_flatten(lists)
    if not pa.types.is_floating(flat.type):
        flat = pc.list_flatten(flat)
    values = flat.to_numpy().astype(np.float32, copy=False)
    if len(values) % feature.width:
        raise DataError(f"{feature.name} has vectors of another width than {feature.width}: the file is damaged")
    return values.reshape(-1, feature.width)


def _feature_column(lists: pa.ChunkedArray, feature: Feature) -> Column:
    if not feature.in_table:
        return _numbers(lists, feature)
    if not feature.multiple:
        return _flat(lists)[0]
    values, lengths = _flat(pc.list_flatten(lists))
    return Ragged(values, bounds_of(lengths))


def covered(stored: Histories, events: Histories) -> NDArray[np.bool_]:
    """Which events the stored ones of the same users have: of those at the user's last time, as many of an item as
    there are.

    Example:
        >>> stored = Histories(np.array([0, 3]), np.array([5, 6, 6]), np.array([10, 20, 20]))
        >>> events = Histories(np.array([0, 5]), np.array([5, 6, 7, 6, 6]), np.array([10, 20, 20, 20, 20]))
        >>> covered(stored, events).tolist()
        [False, True, False, True, False]
    """
    some = stored.lengths > 0
    last = np.full(len(stored), -1)
    last[some] = stored.times[stored.offsets[1:][some] - 1]
    there = events.times == np.repeat(last, events.lengths)
    user = np.repeat(np.arange(len(events)), events.lengths)
    left: dict[int, Counter[int]] = {}
    for at in np.flatnonzero(there):
        one = int(user[at])
        if one not in left:
            mine = slice(stored.offsets[one], stored.offsets[one + 1])
            left[one] = Counter(stored.items[mine][stored.times[mine] == last[one]].tolist())
        item = int(events.items[at])
        there[at] = left[one][item] > 0
        left[one][item] -= int(there[at])
    return there
