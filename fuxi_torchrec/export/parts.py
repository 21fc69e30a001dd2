"""Parts of an export's users/ and histories/: read, changed, written."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from numpy.typing import NDArray
from torch import Tensor

from fuxi_torchrec.events import parquet
from fuxi_torchrec.events.errors import DataError
from fuxi_torchrec.events.features import Feature
from fuxi_torchrec.events.histories import Histories, Ints
from fuxi_torchrec.export.bundle import ExportError

USER, EMBEDDING, ROW = "user_id", "embedding", "row"
WINDOW_ITEM, WINDOW_SCORE = "window_item", "window_score"
NO_STATE = -1
GROUP_EVENTS, GROUP_USERS = 2**16, 2**14  # of a row group of histories: what is read to find one user's
ID_TYPES = {"int64": pa.int64(), "string": pa.string()}


@dataclass(eq=False)
class Users:
    """Rows of users/.

    Attributes:
        ids: raw ids.
        embedding: (n, D) float32.
        as_of: the request time of the embedding.
        anchor_time, anchor_count: the first encoded event's time, and the events before it.
        events: encoded since the anchor.
        last_time: of the last event; 0 without events.
        state_row: in the part's states, or -1.
        window_item, window_score: (n, W) int32, the last distinct items, 0 where there are no more; and float32, what
            they score at as_of in place of inner products. W is 0 where scores have no bias.
    """

    ids: pa.Array
    embedding: NDArray[np.float32]
    as_of: Ints
    anchor_time: Ints
    anchor_count: Ints
    events: Ints
    last_time: Ints
    state_row: Ints
    window_item: NDArray[np.int32]
    window_score: NDArray[np.float32]

    def __len__(self) -> int:
        return len(self.ids)

    def select(self, rows: Ints) -> "Users":
        numbers = {name: getattr(self, name)[rows] for name in (*NUMBERS, *VECTORS)}
        return replace(self, ids=self.ids.take(pa.array(rows)), **numbers)

    @staticmethod
    def stack(parts: Sequence["Users"]) -> "Users":
        """Several as one, in this order."""
        numbers = {name: np.concatenate([getattr(part, name) for part in parts]) for name in (*NUMBERS, *VECTORS)}
        return Users(pa.concat_arrays([part.ids for part in parts]), **numbers)

    @staticmethod
    def new(ids: pa.Array, dimension: int, window: int = 0) -> "Users":
        """Users without events."""
        columns: dict[str, Any] = {name: np.zeros(len(ids), np.int64) for name in NUMBERS}
        columns["state_row"] -= 1
        widths = (dimension, window, window)
        columns |= {
            name: np.zeros((len(ids), width), kind) for (name, kind), width in zip(VECTORS.items(), widths, strict=True)
        }
        return Users(ids, **columns)


VECTORS: dict[str, Any] = {EMBEDDING: np.float32, WINDOW_ITEM: np.int32, WINDOW_SCORE: np.float32}
NUMBERS = tuple(field.name for field in fields(Users) if field.name not in ("ids", *VECTORS))


def read_users(path: Path, numbers: Sequence[str] = NUMBERS, embedding: bool = True, window: int = 0) -> Users:
    """A part of users/; columns that are not read are empty. Windows, of a width, are read with embeddings."""
    vectors = ([EMBEDDING, WINDOW_ITEM, WINDOW_SCORE] if window else [EMBEDDING]) if embedding else []
    table = read_table(path, [USER, *vectors, *numbers])
    rows = len(table)
    columns: dict[str, Any] = {name: np.zeros(0, np.int64) for name in NUMBERS}
    for name in numbers:
        columns[name] = pc.fill_null(table[name], NO_STATE if name == "state_row" else 0).to_numpy().astype(np.int64)
    for name, kind in VECTORS.items():
        columns[name] = np.zeros((rows, 0), kind)
        if name in vectors:
            flat = pc.list_flatten(table[name]).to_numpy().astype(kind)
            if rows and (len(flat) % rows or (name != EMBEDDING and len(flat) != rows * window)):
                raise ExportError(f"{path}: {name} has other widths: the file is damaged, export again")
            columns[name] = flat.reshape(rows, -1) if rows else np.zeros((0, window if name != EMBEDDING else 0), kind)
    return Users(combined(table[USER]), **columns)


def write_users(path: Path, users: Users) -> None:
    """A part of users/."""
    columns = {USER: users.ids}
    for name in VECTORS:
        values = getattr(users, name)
        if name == EMBEDDING or values.shape[1]:
            columns[name] = pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), values.shape[1])
    columns |= {name: pa.array(getattr(users, name)) for name in NUMBERS}
    parquet.write_table(path, pa.table(columns))


def write_rows(path: Path, ids: pa.Array, rows: Tensor) -> None:
    """A part of user-rows/."""
    flat = pa.array(rows.contiguous().numpy().reshape(-1))
    parquet.write_table(path, pa.table({USER: ids, ROW: pa.FixedSizeListArray.from_arrays(flat, rows.shape[1])}))


def read_rows(path: Path, dimension: int) -> tuple[pa.Array, Tensor]:
    """A part of user-rows/."""
    table = read_table(path, [USER, ROW])
    flat = pc.list_flatten(table[ROW]).to_numpy().astype(np.float32)
    if len(flat) != len(table) * dimension or not np.isfinite(flat).all():
        raise ExportError(f"{path}: rows are not {len(table)} finite vectors of width {dimension}: export again")
    return combined(table[USER]), torch.from_numpy(flat.reshape(-1, dimension))


def read_histories(path: Path, users: pa.Array, features: Sequence[Feature]) -> Histories:
    """A part of histories/; its rows must be those of ``users``."""
    table = read_table(path, [USER, "item", "timestamp", *(feature.name for feature in features)])
    if not combined(table[USER]).equals(users):
        raise ExportError(f"{path}: rows are not those of users/: the export is damaged, export again")
    return histories_of(table, features, str(path))


def histories_of(table: pa.Table, features: Sequence[Feature], where: str) -> Histories:
    """Rows of histories/ as one; ``where`` is for messages."""
    try:
        return Histories.from_arrow(table, features, where)
    except DataError as error:
        raise ExportError(str(error)) from None


def write_histories(path: Path, users: pa.Array, histories: Histories) -> None:
    """A part of histories/, in row groups small enough to look up one user."""
    group = histories.offsets[:-1] // GROUP_EVENTS * 2**32 + np.arange(len(users)) // GROUP_USERS
    firsts = [*np.flatnonzero(np.diff(group, prepend=-1)).tolist(), len(users)]
    columns = {name: _plain_lists(column) for name, column in histories.to_arrow().items()}
    table = pa.table({USER: users, **columns})
    with parquet.Writer(path, table.schema) as writer:
        for begin, end in itertools.pairwise(firsts):
            writer.write(table.slice(begin, end - begin))
        if len(firsts) == 1:
            writer.write(table)


def _plain_lists(column: pa.Array) -> pa.Array | pa.ChunkedArray:
    """One list type for all files, however many events there are."""
    if not pa.types.is_large_list(column.type):
        return column
    kind, step = pa.list_(column.type.value_type), max(1, len(column) // (len(column.values) // 2**30 + 1))
    return pa.chunked_array([column.slice(begin, step).cast(kind) for begin in range(0, len(column), step)])


def read_table(path: Path, columns: Sequence[str]) -> pa.Table:
    """Columns of a Parquet file, or an error that names it."""
    try:
        return parquet.read_table(path, columns)
    except DataError as error:
        raise ExportError(str(error)) from None


def combined(column: pa.ChunkedArray) -> pa.Array:
    """One array; text as ``string``."""
    array = pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], column.type)
    return array.cast(pa.string()) if pa.types.is_large_string(array.type) else array


def part_name(folder: str, number: int, ending: str = "parquet") -> str:
    """A part's file, as the manifest names it."""
    return f"{folder}/part-{number:05d}.{ending}"


def part_number(path: Path) -> int:
    """Of a part's file."""
    return int(path.name.removeprefix("part-").partition(".")[0])
