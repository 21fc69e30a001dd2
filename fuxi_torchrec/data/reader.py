"""Parquet list rows to flat arrays, one row group at a time, through Arrow's offsets: nothing is done per event."""

from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from fuxi_torchrec import machine
from fuxi_torchrec.data.dataset import ITEM, TARGET, TIME, USER, Dataset
from fuxi_torchrec.events import parquet
from fuxi_torchrec.events.errors import DataError
from fuxi_torchrec.events.histories import Histories, Ints, Ragged, bounds_of
from fuxi_torchrec.events.times import last_time
from fuxi_torchrec.logging import get_logger

logger = get_logger(__name__)

CACHE_BYTES = 2**29
_LARGEST = float(np.finfo(np.float32).max)


@dataclass(frozen=True, eq=False)
class RowGroup(Histories):
    """One row group: users in row order, their events one after another, perhaps with weights as targets."""

    weights: NDArray[np.float32] | None = None
    kept: dict[Any, Any] = field(default_factory=dict)  # what others computed from the block

    @property
    def nbytes(self) -> int:
        arrays: list[NDArray[Any]] = [self.offsets, self.items, self.times]
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
            there = ", ".join(sorted(known)) or "none"
            raise DataError(f"{dataset.path}: no feature {', '.join(missing)}; there are {there}")
        if cache_bytes > machine.memory_bytes():
            most = machine.memory_bytes() // 2**20
            raise DataError(f"data.cache_mib = {cache_bytes // 2**20}: this machine has {most} MiB of memory in all")
        self.dataset, self.features = dataset, tuple(features)
        self._numbers = {feature.name for feature in dataset.info.features if not feature.in_table}
        self._names = [ITEM, TIME, *([TARGET] if dataset.info.has_target else []), *features]
        self.on_bad_rows, self.cache_bytes = on_bad_rows, cache_bytes
        self.bad_rows: dict[int, int] = {}  # by block
        self._files: dict[int, Any] = {}
        self._cache: OrderedDict[int, RowGroup] = OrderedDict()
        self.groups: list[tuple[int, int]] = []  # file and row group of each block
        users = []
        for number, file in enumerate(dataset.info.files):
            metadata = self._file(number).metadata
            if metadata.num_rows != file.users:
                what = f"{metadata.num_rows} users where dataset.json says {file.users}"
                raise DataError(f"{dataset.file(file.name)}: {what}: the dataset was changed after it was prepared")
            for group in range(metadata.num_row_groups):
                self.groups.append((number, group))
                users.append(metadata.row_group(group).num_rows)
        # of each block, the row of its first user; one more at the end
        self.first_user = bounds_of(np.array(users, np.int64))

    def __getstate__(self) -> dict[str, Any]:
        """Loader workers open their own files."""
        return {**self.__dict__, "_files": {}, "_cache": OrderedDict()}

    @property
    def users(self) -> int:
        return int(self.first_user[-1])

    @property
    def block_of_user(self) -> Ints:
        return np.repeat(np.arange(len(self.groups)), np.diff(self.first_user))

    def lengths(self) -> Ints:
        """Events of each user, from one column alone."""
        parts = [np.zeros(0, np.int64)]
        for number in range(len(self.groups)):
            parts.append(np.maximum(_lengths(self._columns(number, [TIME])[TIME]), 0))
        return np.concatenate(parts)

    def block_bytes(self) -> Ints:
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
        self._cache.clear()

    def block(self, number: int) -> RowGroup:
        """A block, from memory if it was read lately."""
        if number in self._cache:
            self._cache.move_to_end(number)
            return self._cache[number]
        block = self._read(number)
        self._cache[number] = block
        held = sum(kept.nbytes for kept in self._cache.values())
        while held > self.cache_bytes and len(self._cache) > 1:
            held -= self._cache.popitem(last=False)[1].nbytes
        return block

    def ids_of(self, users: Ints) -> pa.Array:
        """Raw ids of some users, by their rows in rising order."""
        type_ = self._file(0).schema_arrow.field(USER).type if self.groups else pa.int64()
        parts = [pa.array([], type_)]
        for number, rows, _ in self.by_block(users):
            ids = self._columns(number, [USER])[USER]
            parts.append(ids.take(pa.array(rows)).cast(type_))
        ids = pa.concat_arrays(parts)
        if ids.null_count or len(ids.unique()) < len(ids):
            raise DataError(f"{self.dataset.path}: users without an id, or with one id: prepare the dataset again")
        return ids

    def by_block(self, users: Ints) -> Iterator[tuple[int, Ints, slice]]:
        """Of users in rising order: each block's number, the rows in it, and their place among the users."""
        numbers = np.searchsorted(self.first_user, users, side="right") - 1
        for number in np.unique(numbers).tolist():
            a, b = np.searchsorted(numbers, [number, number + 1]).tolist()
            yield number, users[a:b] - self.first_user[number], slice(a, b)

    def _file(self, number: int) -> Any:
        if number not in self._files:
            info = self.dataset.info.files[number]
            path = self.dataset.file(info.name)
            file = parquet.open_file(path, info.crc32)
            wanted = [USER, *self._names]
            parquet.check_columns(path, file, wanted)
            for field in map(file.schema_arrow.field, wanted):
                if not _fits(field.name, field.type, self._numbers):
                    raise DataError(f"{path}: column {field.name} is {field.type}: prepare the dataset again")
            self._files[number] = file
        return self._files[number]

    def _columns(self, number: int, names: Sequence[str]) -> dict[str, pa.Array]:
        number, group = self.groups[number]
        table = self._file(number).read_row_group(group, columns=list(names))
        return {name: table[name].combine_chunks() for name in names}

    def _read(self, number: int) -> RowGroup:
        columns = self._without_bad_rows(self._columns(number, self._names), number)
        weights = columns[TARGET].flatten().to_numpy().astype(np.float32) if TARGET in columns else None
        features = [feature for feature in self.dataset.info.features if feature.name in self.features]
        found = Histories.from_arrow(pa.table(columns), features, self.dataset.path)
        return RowGroup(found.offsets, found.items, found.times, found.features, weights)

    def _without_bad_rows(self, columns: dict[str, pa.Array], number: int) -> dict[str, pa.Array]:
        """Check every user; a bad one is an error, or is emptied."""
        lengths = [_lengths(column) for column in columns.values()]
        least, largest = int(self.dataset.info.log.rare_items == "drop"), self.dataset.info.items
        last = last_time(self.dataset.info.time_unit)
        reasons = {  # the first that holds is told
            "a list is null": np.any([length < 0 for length in lengths], axis=0),
            "lists differ in length": np.any([length != lengths[0] for length in lengths], axis=0),
            "a value is null": np.any([_with_null(column) for column in columns.values()], axis=0),
            "times are not in order": _unsorted(columns[TIME]),
            f"a time is not in 0 .. {last}": _outside(columns[TIME], 0, last),
            f"an item is not in {least} .. {largest}": _outside(columns[ITEM], least, largest),
        }
        if TARGET in columns:
            reasons["a target weight is negative or not finite"] = _outside(columns[TARGET], 0, _LARGEST)
        for feature in self.dataset.info.features:
            if feature.name in columns and not feature.in_table:
                reasons[f"{feature.name} is infinite, or has not {feature.width} elements"] = _unfit(
                    columns[feature.name], feature.width
                )
            elif feature.name in columns:
                bound = feature.rows - 1
                reasons[f"{feature.name} is not in 0 .. {bound}"] = _outside(columns[feature.name], 0, bound)
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


def _fits(name: str, kind: pa.DataType, numbers: Collection[str]) -> bool:
    """Whether a column is of the kind that it must be: numbers are never rounded to fit."""
    if name == USER:
        return bool(pa.types.is_integer(kind) or pa.types.is_string(kind))
    while pa.types.is_list(kind):
        kind = kind.value_type
    return bool(pa.types.is_floating(kind) if name == TARGET or name in numbers else pa.types.is_integer(kind))


def _lengths(column: pa.Array) -> Ints:
    """Of each list, −1 for null."""
    return pc.fill_null(pc.list_value_length(column), -1).to_numpy(zero_copy_only=False).astype(np.int64)


def _holding(column: pa.Array, marked: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Rows of a list column that hold a marked value."""
    found = np.zeros(len(column), dtype=bool)
    if marked.any():
        found[pc.list_parent_indices(column).to_numpy()[marked]] = True
    return found


def _with_null(column: pa.Array) -> NDArray[np.bool_]:
    """Rows with an event that is null or holds a null."""
    values = column.flatten()
    marked = np.zeros(len(values), dtype=bool)
    if values.null_count:
        marked = values.is_null().to_numpy(zero_copy_only=False)
    if pa.types.is_list(values.type):
        marked |= _with_null(values)
    return _holding(column, marked)


def _plain(values: pa.Array, missing: int) -> NDArray[Any]:
    if values.null_count:
        values = pc.fill_null(values, missing)
    plain: NDArray[Any] = values.to_numpy()
    return plain


def _outside(column: pa.Array, least: int, most: float) -> NDArray[np.bool_]:
    """Rows with a value, of an event or in its list, that is out of range or no number."""
    values = column.flatten()
    if pa.types.is_list(values.type):
        return _holding(column, _outside(values, least, most))
    plain = _plain(values, least)
    return _holding(column, ~((plain >= least) & (plain <= most)))


def _unfit(column: pa.Array, width: int) -> NDArray[np.bool_]:
    """Rows with a number that is infinite, or a vector of another width; nan is missing."""
    values = column.flatten()
    if pa.types.is_list(values.type):
        return _holding(column, (_lengths(values) != width) | _unfit(values, 1))
    return _holding(column, np.isinf(_plain(values, 0))) if width == 1 else np.ones(len(column), bool)


def _unsorted(column: pa.Array) -> NDArray[np.bool_]:
    values = _plain(column.flatten(), 0)
    falls = np.zeros(len(values) + 1, dtype=bool)
    falls[1:-1] = values[1:] < values[:-1]
    falls[bounds_of(np.maximum(_lengths(column), 0))] = False  # where users begin
    return _holding(column, falls[:-1])


def _emptied(column: pa.Array, rows: NDArray[np.bool_]) -> pa.Array:
    """The same with empty lists in some rows."""
    empty = pa.array([[]], type=column.type)
    chosen = np.where(rows, len(column), np.arange(len(column)))
    return pa.concat_arrays([column, empty]).take(pa.array(chosen))
