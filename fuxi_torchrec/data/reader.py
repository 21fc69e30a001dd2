"""Parquet list rows to flat arrays, one row group at a time, through Arrow's offsets: nothing is done per event."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from fuxi_torchrec.data.dataset import ITEM, TARGET, TIME, USER, Dataset
from fuxi_torchrec.events.errors import DataError
from fuxi_torchrec.events.filesystem import resolve
from fuxi_torchrec.events.histories import Column, Histories, Ragged
from fuxi_torchrec.logging import get_logger

logger = get_logger(__name__)

CACHE_BYTES = 2**29


@dataclass(frozen=True, eq=False)
class Block(Histories):
    """One row group: users in row order, their events one after another.

    Attributes:
        weights: of events as targets.
        kept: what others computed from the block, as long as it is held.
    """

    weights: NDArray[np.float32] | None = None
    kept: dict[Any, Any] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """Bytes held."""
        arrays = [self.offsets, self.items, self.times]
        for column in self.features.values():
            arrays += [column.values, column.bounds] if isinstance(column, Ragged) else [column]
        return sum(array.nbytes for array in arrays) + (0 if self.weights is None else self.weights.nbytes)


class Reader:
    """A dataset's blocks, with the last ones kept in memory.

    Args:
        dataset: what to read.
        features: names of those wanted; none by default.
        on_bad_rows: ``error``, or ``skip``: bad users count as users without events.
        cache_bytes: decoded blocks kept; a loader divides it among its worker processes.
    """

    def __init__(
        self,
        dataset: Dataset,
        features: Sequence[str] = (),
        on_bad_rows: Literal["error", "skip"] = "error",
        cache_bytes: int = CACHE_BYTES,
    ) -> None:
        known = {feature.name for feature in dataset.info.features}
        missing = [name for name in features if name not in known]
        if missing:
            raise DataError(
                f"{dataset.path}: no feature {', '.join(missing)}; there are {', '.join(sorted(known)) or 'none'}"
            )
        self.dataset, self.features, self.on_bad_rows, self.cache_bytes = (
            dataset,
            tuple(features),
            on_bad_rows,
            cache_bytes,
        )
        self.bad_rows: dict[int, int] = {}  # by block
        self._files: dict[int, Any] = {}
        self._cache: OrderedDict[int, Block] = OrderedDict()
        groups, users = [], []
        for number, file in enumerate(dataset.info.files):
            metadata = self._file(number).metadata
            if metadata.num_rows != file.users:
                raise DataError(
                    f"{dataset.file(file.name)}: {metadata.num_rows} users where dataset.json says {file.users}: "
                    "the dataset was changed after it was prepared"
                )
            for group in range(metadata.num_row_groups):
                groups.append((number, group))
                users.append(metadata.row_group(group).num_rows)
        self.groups: list[tuple[int, int]] = groups
        # of each block, the row of its first user; one more at the end
        self.first_user = np.concatenate([[0], np.cumsum(users)]).astype(np.int64)

    def __getstate__(self) -> dict[str, Any]:
        """Loader workers open their own files."""
        return {**self.__dict__, "_files": {}, "_cache": OrderedDict()}

    @property
    def users(self) -> int:
        """Users in all."""
        return int(self.first_user[-1])

    @property
    def block_of_user(self) -> NDArray[np.int64]:
        """The block of each user."""
        return np.repeat(np.arange(len(self.groups)), np.diff(self.first_user))

    def lengths(self) -> NDArray[np.int64]:
        """Events of each user, from one column alone."""
        parts = [np.zeros(0, np.int64)]
        for number, group in self.groups:
            column = self._column(number, group, TIME)
            parts.append(pc.fill_null(pc.list_value_length(column), 0).to_numpy(zero_copy_only=False).astype(np.int64))
        return np.concatenate(parts)

    def block_bytes(self) -> NDArray[np.int64]:
        """Bytes of each block in memory, from the files' metadata alone."""
        sizes = []
        multiple = {feature.name for feature in self.dataset.info.features if feature.multiple}
        for number, group in self.groups:
            metadata = self._file(number).metadata.row_group(group)
            columns = (metadata.column(n) for n in range(metadata.num_columns))
            values = {column.path_in_schema.split(".")[0]: column.num_values for column in columns}
            events = values.get(ITEM, 0)
            size = 8 * (metadata.num_rows + 1) + 16 * events + 4 * values.get(TARGET, 0)
            size += sum(8 * (values.get(name, 0) + (events + 1) * (name in multiple)) for name in self.features)
            sizes.append(size)
        return np.asarray(sizes, np.int64)

    def forget(self) -> None:
        """Keep no block."""
        self._cache.clear()

    def block(self, number: int) -> Block:
        """A block, from memory if it was read lately."""
        if number in self._cache:
            self._cache.move_to_end(number)
            return self._cache[number]
        block = self._read(number)
        self._cache[number] = block
        held = sum(kept.size for kept in self._cache.values())
        while held > self.cache_bytes and len(self._cache) > 1:
            held -= self._cache.popitem(last=False)[1].size
        return block

    def user_ids(self, number: int) -> list[Any]:
        """Raw ids of a block's users."""
        file, group = self.groups[number]
        ids: list[Any] = self._column(file, group, USER).to_pylist()
        return ids

    def ids_of(self, users: NDArray[np.int64]) -> pa.Array:
        """Raw ids of some users, by their rows in rising order."""
        numbers = np.searchsorted(self.first_user, users, side="right") - 1
        type_ = self._file(0).schema_arrow.field(USER).type if self.groups else pa.int64()
        parts = [pa.array([], type_)]
        for number in np.unique(numbers).tolist():
            rows, (file, group) = users[numbers == number] - self.first_user[number], self.groups[number]
            parts.append(self._column(file, group, USER).take(pa.array(rows)).cast(type_))
        return pa.concat_arrays(parts)

    def _file(self, number: int) -> Any:
        if number not in self._files:
            path = self.dataset.file(self.dataset.info.files[number].name)
            filesystem, inside = resolve(path)
            try:
                self._files[number] = pq.ParquetFile(inside, filesystem=filesystem)
            except Exception as error:
                raise DataError(f"{path}: not a readable Parquet file, perhaps cut short: {error}") from None
        return self._files[number]

    def _table(self, file: int, group: int, columns: Sequence[str]) -> pa.Table:
        path = self.dataset.file(self.dataset.info.files[file].name)
        present = self._file(file).schema_arrow.names
        missing = [name for name in columns if name not in present]
        if missing:
            raise DataError(f"{path}: no column {', '.join(missing)}; the columns are {', '.join(present)}")
        try:
            return self._file(file).read_row_group(group, columns=list(columns))
        except Exception as error:
            raise DataError(f"{path}: row group {group} cannot be read: {error}") from None

    def _column(self, file: int, group: int, name: str) -> pa.Array:
        column = self._table(file, group, [name])[name].combine_chunks()
        return column.chunk(0) if isinstance(column, pa.ChunkedArray) else column

    def _read(self, number: int) -> Block:
        file, group = self.groups[number]
        names = [ITEM, TIME, *([TARGET] if self.dataset.info.has_target else []), *self.features]
        table = self._table(file, group, names)
        columns = {}
        for name in names:
            column = table[name].combine_chunks()
            columns[name] = column.chunk(0) if isinstance(column, pa.ChunkedArray) else column
        columns = self._without_bad_rows(columns, number)
        offsets = _offsets(columns[ITEM])
        weights = _values(columns[TARGET]).astype(np.float32) if TARGET in columns else None
        features = {name: _feature(columns[name].flatten()) for name in self.features}
        items, times = _values(columns[ITEM]).astype(np.int64), _values(columns[TIME]).astype(np.int64)
        return Block(offsets, items, times, features, weights)

    def _without_bad_rows(self, columns: dict[str, pa.Array], number: int) -> dict[str, pa.Array]:
        """Check every user; a bad one is an error, or is emptied."""
        rows = len(columns[ITEM])
        reasons: dict[str, NDArray[np.bool_]] = {}
        lengths = {
            n: pc.fill_null(pc.list_value_length(c), -1).to_numpy(zero_copy_only=False) for n, c in columns.items()
        }
        reasons["a list is null"] = np.any([length < 0 for length in lengths.values()], axis=0)
        differ = np.any([length != lengths[ITEM] for length in lengths.values()], axis=0)
        reasons["lists differ in length"] = differ & ~reasons["a list is null"]
        reasons["a value is null"] = _with_nulls(columns, rows)
        reasons["times are not in order"] = _unsorted(columns[TIME])
        reasons["a time is negative"] = _any_in_row(columns[TIME], lambda v: v < 0)
        least, largest = int(self.dataset.info.log.rare_items == "drop"), self.dataset.info.items
        outside = _any_in_row(columns[ITEM], lambda v: (v < least) | (v > largest))
        reasons[f"an item is not in {least} .. {largest}"] = outside
        for feature in self.dataset.info.features:
            if feature.name in columns:
                outside = _outside(columns[feature.name], feature.rows)
                reasons[f"{feature.name} is not in 0 .. {feature.rows - 1}"] = outside
        bad = np.any(list(reasons.values()), axis=0)
        if not bad.any():
            return columns
        file, _ = self.groups[number]
        path = self.dataset.file(self.dataset.info.files[file].name)
        first = int(np.flatnonzero(bad)[0])
        row = first + int(self.first_user[number] - self.first_user[[f for f, _ in self.groups].index(file)])
        reason = next(name for name, rows in reasons.items() if rows[first])
        message = f"{path}: {int(bad.sum())} bad rows, the first is row {row}: {reason}"
        if self.on_bad_rows == "error":
            raise DataError(f"{message}. Prepare the dataset again, or leave such users out with on_bad_rows: skip")
        if number not in self.bad_rows:
            logger.warning("%s; such users are left out", message)
        self.bad_rows[number] = int(bad.sum())
        return {name: _emptied(column, bad) for name, column in columns.items()}


def _offsets(column: pa.Array) -> NDArray[np.int64]:
    offsets: NDArray[np.int64] = column.offsets.to_numpy().astype(np.int64)
    return offsets - offsets[0]


def _values(column: pa.Array) -> NDArray[Any]:
    values: NDArray[Any] = column.flatten().to_numpy(zero_copy_only=False)
    return values


def _feature(events: pa.Array) -> Column:
    """Values of a feature: one of each event, or a list of each."""
    if pa.types.is_list(events.type):
        return Ragged(_values(events).astype(np.int64), _offsets(events))
    values: NDArray[np.int64] = events.to_numpy(zero_copy_only=False).astype(np.int64)
    return values


def _rows(column: pa.Array) -> NDArray[np.int64]:
    """The row of each value of a list column."""
    return pc.list_parent_indices(column).to_numpy().astype(np.int64)


def _has_null(column: pa.Array) -> NDArray[np.bool_]:
    """Which events are null, or hold a null."""
    values = column.flatten()
    found: NDArray[np.bool_] = values.is_null().to_numpy(zero_copy_only=False)
    if pa.types.is_list(values.type):
        found = found.copy()
        found[_rows(values)[values.flatten().is_null().to_numpy(zero_copy_only=False)]] = True
    return found


def _with_nulls(columns: dict[str, pa.Array], rows: int) -> NDArray[np.bool_]:
    found = np.zeros(rows, dtype=bool)
    for column in columns.values():
        values = column.flatten()
        if values.null_count or (pa.types.is_list(values.type) and values.flatten().null_count):
            found[_rows(column)[_has_null(column)]] = True
    return found


def _any_in_row(column: pa.Array, test: Any) -> NDArray[np.bool_]:
    values = column.flatten()
    found = np.zeros(len(column), dtype=bool)
    marked = test(pc.fill_null(values, 1).to_numpy(zero_copy_only=False))
    if marked.any():
        found[_rows(column)[marked]] = True
    return found


def _outside(column: pa.Array, below: int) -> NDArray[np.bool_]:
    """Rows with a value of a feature that its table has no row for."""
    values, rows = column.flatten(), _rows(column)
    if pa.types.is_list(values.type):
        values, rows = values.flatten(), rows[_rows(values)]
    plain = pc.fill_null(values, 0).to_numpy(zero_copy_only=False)
    found = np.zeros(len(column), dtype=bool)
    found[rows[(plain < 0) | (plain >= below)]] = True
    return found


def _unsorted(column: pa.Array) -> NDArray[np.bool_]:
    values = pc.fill_null(column.flatten(), 0).to_numpy(zero_copy_only=False)
    found = np.zeros(len(column), dtype=bool)
    falls = np.flatnonzero(values[1:] < values[:-1])
    if len(falls):
        rows = _rows(column)
        found[rows[falls][rows[falls] == rows[falls + 1]]] = True
    return found


def _emptied(column: pa.Array, rows: NDArray[np.bool_]) -> pa.Array:
    """The same with empty lists in some rows."""
    empty = pa.array([[]], type=column.type)
    chosen = np.where(rows, len(column), np.arange(len(column)))
    return pa.concat_arrays([column, empty]).take(pa.array(chosen))
