"""Sorting events by user, time and row, out of core, knowing how many events each user has.

Neighbouring users share a bucket. A first pass moves every event into its bucket, in memory or, beyond a budget, in a
file; then each bucket is sorted by itself. Both passes are radix sorts of small numbers, and what a log is sorted by
already, times mostly, costs next to nothing.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from fuxi_torchrec.data.dataset import TIME
from fuxi_torchrec.events.batching import batch_ends
from fuxi_torchrec.events.histories import Ints, bounds_of

# columns of the events beside the dataset's: the user's number in the order of ids, and the event's place in the log
USER_NUMBER, ROW_NUMBER = "__user", "__row"
BUCKET_EVENTS = 2**18


@dataclass(frozen=True)
class SortedUsers:
    """Whole users, one after another: the first one's number, the events of each, the sorted events."""

    first: int
    lengths: Ints
    events: pa.RecordBatch


class BucketSort:
    """Takes events in any order, gives them back by user, time and row.

    Args:
        lengths: events of each user, in the order of their numbers.
        group_events: users come in groups of about so many events, or one user.
        bucket_events: events sorted at once, about; a bucket is at least one group.
        budget: bytes held in memory before all are moved to the file.
        spill: the file; made when it is needed.
        first_time: was subtracted from the times, and is added again.
    """

    def __init__(
        self, lengths: Ints, group_events: int, bucket_events: int, budget: int, spill: str, first_time: int = 0
    ) -> None:
        self._total = bounds_of(lengths)
        self._groups = np.array([0, *batch_ends(lengths, group_events)])
        self._first = self._groups[[0, *batch_ends(np.diff(self._total[self._groups]), bucket_events)]]
        kind = np.min_scalar_type(len(self._first))
        self._local = np.min_scalar_type(int(np.diff(self._first).max(initial=1)) - 1)  # of few bits: radix sort
        self._bucket = np.repeat(np.arange(len(self._first) - 1, dtype=kind), np.diff(self._first))
        self._budget, self._held, self._spill, self._first_time = budget, 0, spill, first_time
        self._pieces: list[list[pa.RecordBatch]] = [[] for _ in self._first[:-1]]
        self._spilled: list[list[tuple[int, int]]] = [[] for _ in self._first[:-1]]
        self._schema: pa.Schema | None = None

    def add(self, batch: pa.RecordBatch) -> None:
        number = batch[USER_NUMBER].to_numpy()
        bucket = self._bucket[number]
        batch = _with(batch, USER_NUMBER, (number - self._first[bucket]).astype(self._local))
        if len(self._pieces) > 1:
            batch = _take(batch, np.argsort(bucket, kind="stable"))
        self._schema = batch.schema
        begin = 0
        counts = np.bincount(bucket, minlength=len(self._pieces))
        for found in np.flatnonzero(counts).tolist():
            self._pieces[found].append(batch.slice(begin, int(counts[found])))
            begin += int(counts[found])
        self._held += batch.nbytes
        if self._held > self._budget:
            self._empty()

    def _empty(self) -> None:
        """Move what is in memory to the file."""
        with open(self._spill, "ab") as file:
            for number, pieces in enumerate(self._pieces):
                if pieces:
                    message = _joined(pieces).serialize()
                    self._spilled[number].append((file.tell(), file.write(message)))
                    pieces.clear()
        self._held = 0

    def sorted(self) -> Iterator[SortedUsers]:
        """All events, in groups of whole users; once."""
        for number, (first, stop) in enumerate(zip(self._first[:-1], self._first[1:], strict=True)):
            pieces, self._pieces[number] = [*self._read(number), *self._pieces[number]], []
            bucket = _joined(pieces)
            keys = [bucket[name].to_numpy() for name in (ROW_NUMBER, TIME, USER_NUMBER)]
            names = [name for name in bucket.schema.names if name not in (ROW_NUMBER, USER_NUMBER)]
            events = _take(bucket.select(names), np.lexsort(keys))
            events = _with(events, TIME, events[TIME].to_numpy().astype(np.int64) + self._first_time)
            edges = self._groups[(self._groups >= first) & (self._groups <= stop)]
            for a, b in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
                begin = int(self._total[a] - self._total[first])
                part = events.slice(begin, int(self._total[b] - self._total[a]))
                yield SortedUsers(a, np.diff(self._total[a : b + 1]), part)

    def _read(self, number: int) -> Iterator[pa.RecordBatch]:
        if self._spilled[number]:
            with open(self._spill, "rb") as file:
                for offset, size in self._spilled[number]:
                    message = pa.py_buffer(os.pread(file.fileno(), size, offset))
                    yield pa.ipc.read_record_batch(message, self._schema)


def _with(batch: pa.RecordBatch, name: str, values: NDArray[Any]) -> pa.RecordBatch:
    return batch.set_column(batch.schema.get_field_index(name), name, pa.array(values))


def _take(batch: pa.RecordBatch, order: Ints) -> pa.RecordBatch:
    """Some rows; in memory of the system, whose pages, unlike those of Arrow's own pool, are mostly used before."""
    rows, pool = pa.array(order), pa.system_memory_pool()
    columns = [pc.take(column, rows, boundscheck=False, memory_pool=pool) for column in batch.columns]
    return pa.RecordBatch.from_arrays(columns, schema=batch.schema)


def _joined(pieces: list[pa.RecordBatch]) -> pa.RecordBatch:
    return pa.concat_batches(pieces, memory_pool=pa.system_memory_pool()) if len(pieces) > 1 else pieces[0]
