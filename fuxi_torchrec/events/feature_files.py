"""Files of features of items or users: which columns, of which kind, read and checked.

Preparation, refresh and the service read them in this one way, so that an item that comes later gets the row that a
training with it would look up.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from fuxi_torchrec.events.columns import ColumnSpec
from fuxi_torchrec.events.database import Database
from fuxi_torchrec.events.errors import DataError
from fuxi_torchrec.events.features import MOST_WIDTH
from fuxi_torchrec.events.log import INTEGERS, literal, quote
from fuxi_torchrec.events.pages import rows_and_columns
from fuxi_torchrec.events.sources import FILE, csv_options, find_logs, read_files
from fuxi_torchrec.schema import Record

_NUMBERS = ("FLOAT", "DOUBLE", "HUGEINT", "UBIGINT")


@dataclass(frozen=True)
class FeatureFile(Record):
    """How a file of features is read: part of a dataset and of an export.

    Attributes:
        id_column: of items or users.
        columns: as they were found, each with its kind.
    """

    id_column: str = ""
    columns: tuple[ColumnSpec, ...] = ()

    @property
    def display(self) -> list[str]:
        return [column.name for column in self.columns if column.kind == "display"]

    @property
    def learned(self) -> list[ColumnSpec]:
        return [column for column in self.columns if column.kind != "display"]


@dataclass(frozen=True)
class RawFeatures:
    """Rows of a file, one for each id."""

    where: str  # for messages
    file: FeatureFile
    ids: pa.Array
    columns: dict[str, pa.Array]
    repeated: int = 0  # rows that said the same of an id again


def read_features(database: Database, path: str, id_column: str, columns: Sequence[ColumnSpec] = ()) -> RawFeatures:
    """Read Parquet or CSV files; all columns if none are named."""
    files = find_logs(path)
    database.about = files[0]
    if files[0].endswith(".parquet"):
        for file in files:
            _, names = rows_and_columns(file, [])
            rows_and_columns(file, [id_column, *(spec.name for spec in columns)] if columns else names)
        reader = read_files(files, "read_parquet", ", union_by_name = true")
    else:
        reader = read_files(files, "read_csv", f", {csv_options(files)}")
    types = {row[0]: row[1] for row in database.rows(f"DESCRIBE SELECT * FROM {reader}") if row[0] != FILE}
    if id_column not in types:
        raise DataError(f"{files[0]}: no id column {id_column!r}; the columns are {', '.join(types)}")
    specs = list(columns) or [ColumnSpec(name) for name in types if name != id_column and "." not in name]
    if missing := [spec.name for spec in specs if spec.name not in types]:
        raise DataError(f"{files[0]}: no column {', '.join(missing)}; the columns are {', '.join(types)}")
    if len({spec.name for spec in specs}) < len(specs):
        raise DataError(f"{files[0]}: a feature column is named twice: {', '.join(spec.name for spec in specs)}")
    specs = [_resolved(spec, types[spec.name], files[0]) for spec in specs]
    chosen = ", ".join(f"{_expression(spec, types[spec.name])} AS {quote(spec.name)}" for spec in specs)
    what = f"{quote(id_column)} AS __id" + (f", {chosen}" if chosen else "")
    if types[id_column] not in (*INTEGERS, "VARCHAR"):
        raise DataError(f"{files[0]}: column {id_column} is {types[id_column]}: ids must be integers or text")
    nulls = database.value(f"SELECT count(*) FROM {reader} WHERE {quote(id_column)} IS NULL")
    if nulls:
        raise DataError(f"{files[0]}: {nulls:,} rows have no {id_column}: leave them out")
    rows = database.value(f"SELECT count(*) FROM {reader}")
    table = database.table(f"SELECT DISTINCT {what} FROM {reader} ORDER BY __id")
    ids = _plain(_one(table["__id"]))
    again = pc.equal(ids[1:], ids[:-1]) if len(ids) else pa.array([], pa.bool_())
    if pc.any(again).as_py():
        at = int(np.flatnonzero(again.to_numpy(zero_copy_only=False))[0])
        told = [f"{n} {table[n][at].as_py()!r} and {table[n][at + 1].as_py()!r}" for n in table.column_names[1:]]
        differ = next((each for n, each in enumerate(told) if table[n + 1][at] != table[n + 1][at + 1]), told[0])
        raise DataError(
            f"{files[0]}: {id_column} {ids[at].as_py()!r} is there twice, with {differ}: say which is right"
        )
    raw = RawFeatures(
        files[0],
        FeatureFile(id_column, tuple(specs)),
        ids,
        {spec.name: _one(table[spec.name]) for spec in specs},
        int(rows) - len(ids),
    )
    for spec in raw.file.learned:
        if spec.kind in ("number", "bucket", "vector"):
            _check_finite(raw, spec)
    return raw


def of_records(file: FeatureFile, records: Sequence[Mapping[str, Any]], ids: pa.DataType, where: str) -> RawFeatures:
    """The same of dictionaries: the id by the name of its column, features by theirs; what is not there is missing."""
    known = {file.id_column, *(spec.name for spec in file.columns)}
    for record in records:
        if file.id_column not in record:
            raise DataError(f"{where}: an item without {file.id_column!r}")
        if odd := sorted(record.keys() - known):
            raise DataError(f"{where}: {', '.join(odd)} is no feature; there are {', '.join(sorted(known))}")
    columns = {}
    for spec in file.columns:
        values = [record.get(spec.name) for record in records]
        try:
            columns[spec.name] = _from_python(spec, values)
        except (pa.ArrowInvalid, pa.ArrowTypeError, ValueError, TypeError) as error:
            raise DataError(f"{where}: {spec.name} is no {spec.kind}: {error}") from None
    try:
        own = pa.array([record[file.id_column] for record in records], ids)
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        raise DataError(f"{where}: {file.id_column} must be {ids}: {error}") from None
    if own.null_count:
        raise DataError(f"{where}: {file.id_column} is null")
    raw = RawFeatures(where, file, own, columns)
    for spec in file.learned:
        if spec.kind in ("number", "bucket", "vector"):
            _check_finite(raw, spec)
    return raw


def _from_python(spec: ColumnSpec, values: list[Any]) -> pa.Array:
    if spec.kind in ("number", "bucket"):
        return pa.array(values, pa.float64())
    if spec.kind == "vector":
        return pa.array(values, pa.list_(pa.float32()))
    if spec.kind == "display":
        return pa.array([None if value is None else str(value) for value in values], pa.string())
    if spec.split is not None:
        values = [v.split(spec.split) if isinstance(v, str) else v for v in values]
        values = [None if v is None else [text for each in v if (text := str(each).strip())] for v in values]
    several = any(isinstance(value, list | tuple) for value in values)
    texts = [None if v is None else [str(e) for e in v] if isinstance(v, list | tuple) else str(v) for v in values]
    return pa.array(texts, pa.list_(pa.string()) if several or spec.split else pa.string())


def _resolved(spec: ColumnSpec, type_: str, where: str) -> ColumnSpec:
    """With the kind that a column of this type has by default; an error if it cannot be what it was declared."""
    inner, is_list = type_.removesuffix("[]").partition("[")[0], type_.endswith("]")
    decimal = inner.startswith("DECIMAL") or inner in _NUMBERS
    if spec.kind is None:
        kind: Any = ("vector" if is_list else "number") if decimal else "id"
        spec = ColumnSpec(spec.name, kind, spec.split, spec.buckets)
    number = decimal or inner in INTEGERS or inner == "BOOLEAN"
    fits = {
        "id": inner in (*INTEGERS, "VARCHAR", "BOOLEAN") and not (spec.split and (is_list or inner != "VARCHAR")),
        "bucket": number and not is_list,
        "number": number and not is_list,
        "vector": number and is_list,
        "display": True,
    }
    if not fits[str(spec.kind)]:
        raise DataError(f"{where}: column {spec.name} is {type_}: that is no feature of kind {spec.kind}")
    return spec


def _expression(spec: ColumnSpec, type_: str) -> str:
    column = quote(spec.name)
    if spec.kind in ("number", "bucket"):
        return f"CAST({column} AS DOUBLE)"
    if spec.kind == "vector":
        return f"CAST({column} AS FLOAT[])"
    if spec.kind == "display":
        return f"CAST({column} AS VARCHAR)"
    if spec.split is not None:
        values = f"list_transform(string_split({column}, {literal(spec.split)}), lambda x: trim(x))"
        return f"list_filter({values}, lambda x: x <> '')"
    return f"CAST({column} AS {'VARCHAR[]' if type_.endswith(']') else 'VARCHAR'})"


def _check_finite(raw: RawFeatures, spec: ColumnSpec) -> None:
    """Missing is null: what is not finite is an error, and so are vectors of several widths."""
    column = raw.columns[spec.name]
    owner = np.arange(len(column))
    if spec.kind == "vector":
        lengths = pc.list_value_length(column)
        widths = pc.unique(lengths.drop_null()).to_pylist()
        if len(widths) > 1 or any(not 0 < width <= MOST_WIDTH for width in widths):
            odd = (
                next(n for n in range(len(column)) if lengths[n].as_py() not in (None, lengths.drop_null()[0].as_py()))
                if len(widths) > 1
                else 0
            )
            raise DataError(
                f"{raw.where}: {spec.name} of {raw.ids[odd].as_py()!r} has {lengths[odd].as_py()} elements, others "
                f"have {widths[0]}: a vector has one width, 1 to {MOST_WIDTH}"
            )
        owner = np.repeat(owner, pc.fill_null(lengths, 0).to_numpy(zero_copy_only=False))
        column = column.flatten()
        if column.null_count:
            at = owner[int(np.flatnonzero(column.is_null().to_numpy(zero_copy_only=False))[0])]
            raise DataError(f"{raw.where}: {spec.name} of {raw.ids[int(at)].as_py()!r} has a null in it")
    bad = pc.fill_null(pc.invert(pc.is_finite(column)), False).to_numpy(zero_copy_only=False)
    if bad.any():
        at = int(np.flatnonzero(bad)[0])
        raise DataError(
            f"{raw.where}: {spec.name} of {raw.ids[int(owner[at])].as_py()!r} is {column[at].as_py()}: a number that "
            "is missing is null, every other one finite"
        )


def _one(column: pa.ChunkedArray) -> pa.Array:
    found = pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], column.type)
    return found.cast(pa.string()) if pa.types.is_large_string(found.type) else found


def _plain(ids: pa.Array) -> pa.Array:
    return ids.cast(pa.int64() if pa.types.is_integer(ids.type) else pa.string())
