"""Events that came since an export: CSV or Parquet logs, or a Recommender's own append log."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from fuxi_torchrec.events.errors import DataError
from fuxi_torchrec.events.features import SideTable
from fuxi_torchrec.events.histories import Column, Histories, Ints, Ragged, bounds_of, of_events, take
from fuxi_torchrec.events.sources import FILE, INTEGERS, csv_options, find_logs, literal, quote, read_files, time_sql
from fuxi_torchrec.events.times import bounds, check_time, last_event
from fuxi_torchrec.export.bundle import ITEMS, SIDES, Bundle, Manifest
from fuxi_torchrec.export.parts import ID_TYPES, combined
from fuxi_torchrec.logging import get_logger
from fuxi_torchrec.serving.append_log import LOG_FILE, read_log, settled
from fuxi_torchrec.serving.catalogue import UNKNOWN, Vocabulary, side_values

logger = get_logger(__name__)

SIDE = "side_"  # before the names of side features, one of which may be "user" or "time"


@dataclass(frozen=True)
class LogColumns:
    """Names of a log's columns; side features have their own names."""

    user: str = "user_id"
    item: str = "item_id"
    time: str = "timestamp"


@dataclass(frozen=True, eq=False)
class NewEvents:
    """Events by user, in time; events of one time in the order in which they were read.

    Attributes:
        users: raw ids, each once.
        histories: their new events.
        unknown_items: events of items that the model does not know.
        bad_rows: left out, by reason.
        digest: of users, items, times and sides as they were read.
        forgotten: users of whom nothing before these events is to stay, of a Recommender's log.
    """

    users: pa.Array
    histories: Histories
    unknown_items: int
    bad_rows: dict[str, int]
    digest: str
    forgotten: pa.Array

    def __len__(self) -> int:
        return len(self.histories.items)


def read_events(
    path: str | Path,
    bundle: Bundle,
    columns: LogColumns | None = None,
    on_bad_rows: Literal["error", "skip"] = "error",
) -> NewEvents:
    """Read a file, the files below a directory, those of a glob, or the log directory of a Recommender.

    Times are in the export's unit, or timestamps. Side features are columns of their names, with the text values that
    the export knows, or with dense indices. The export's files that this needs are checked first.
    """
    bundle.check(ITEMS, SIDES)
    manifest, values = bundle.manifest, side_values(bundle)
    forgotten, files = pa.array([], ID_TYPES[manifest.user_id_type]), list[str]()
    if (Path(path) / LOG_FILE).exists():
        table, forgotten = _own_log(Path(path), manifest, values)
    else:
        table, files = _load(str(path), columns or LogColumns(), manifest, values)
    table, bad = _without_bad_rows(table, str(path), files, on_bad_rows, manifest)
    users, raw_items, times = combined(table["user"]), combined(table["item"]), table["time"].to_numpy()
    items = Vocabulary.read(bundle).find(raw_items)
    rows = bundle.side_rows()
    sides = {
        side.name: _side(table[SIDE + side.name], side, str(path), values.get(side.name), rows[side.name])
        for side in manifest.sides
    }
    encoded = users.dictionary_encode()
    user = encoded.indices.to_numpy().astype(np.int64)
    order = np.lexsort((times, user))  # stable: ties keep the order of the log
    histories = of_events(
        len(encoded.dictionary),
        user[order],
        items[order],
        times[order].astype(np.int64),
        {name: take(column, order) for name, column in sides.items()},
    )
    unknown, digest = int((items == UNKNOWN).sum()), _digest(table, forgotten)
    return NewEvents(encoded.dictionary, histories, unknown, bad, digest, forgotten)


def _digest(table: pa.Table, forgotten: pa.Array) -> str:
    """Of the events, whatever files they are in, and of who was forgotten."""
    plain = table.combine_chunks().take(pa.array(np.arange(len(table))))  # buffers that hold nothing else
    plain = plain.rename_columns([name.removeprefix(SIDE) for name in plain.column_names])  # as earlier exports have it
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, plain.schema) as writer:
        writer.write_table(plain)
    digest = hashlib.sha256(sink.getvalue())
    if len(forgotten):
        digest.update(json.dumps(sorted(forgotten.to_pylist())).encode())
    return digest.hexdigest()


# --- logs ------------------------------------------------------------------------------------------------------------


Values = dict[str, dict[str, int]]  # of side features with text values: value to index


def _load(path: str, columns: LogColumns, manifest: Manifest, values: Values) -> tuple[pa.Table, list[str]]:
    """Columns user, item, time and those of side features, in the order of the files; and these."""
    import duckdb

    files, kind = find_logs(path)
    with duckdb.connect(":memory:", config={"threads": 2}) as connection:
        try:
            reader = _reader(files, kind, columns, manifest, values)
            types = {row[0]: row[1] for row in connection.execute(f"DESCRIBE SELECT * FROM {reader}").fetchall()}
            types.pop(FILE)
            numbers = dict.fromkeys((columns.user, columns.item, columns.time), "BIGINT")
            numbers |= {s.name: "BIGINT" + "[]" * s.multiple for s in manifest.sides if s.name not in values}
            for name in numbers.keys() & types.keys():
                # a CSV column without values is text to DuckDB
                empty = f"SELECT count(*) FROM {reader} WHERE {quote(name)} IS NOT NULL"
                if types[name] == "VARCHAR" and connection.execute(empty).fetchall() == [(0,)]:
                    types[name] = numbers[name]
            query = _query(types, columns, manifest, values, files[0])
            found: pa.Table = connection.sql(f"SELECT {query} FROM {reader}").to_arrow_table()
        except duckdb.Error as error:
            raise DataError(f"{path}: {str(error).split(chr(10))[0]}") from None
    return found, files


def _place(row: int, files: Sequence[str]) -> str:
    """A row of all files together, as one of a file: counted from 1."""
    import duckdb

    if len(files) < 2:
        return f"row {row + 1}"
    how = ("read_parquet",) if files[0].endswith(".parquet") else ("read_csv", f", {csv_options(files)}")
    with duckdb.connect(":memory:", config={"threads": 2}) as connection:
        for name in files:
            ((count,),) = connection.execute(f"SELECT count(*) FROM {read_files([name], *how)}").fetchall()
            if row < count:
                break
            row -= count
    return f"row {row + 1} of {name}"


def _reader(files: Sequence[str], kind: str, columns: LogColumns, manifest: Manifest, values: Values) -> str:
    if kind == "parquet":
        for name in files:
            try:
                pq.ParquetFile(name).close()
            except Exception as error:
                raise DataError(f"{name}: not a readable Parquet file, perhaps cut short: {error}") from None
        return read_files(files, "read_parquet", ", union_by_name = true")
    # text stays as it is written: 007 is not 7
    ids = ((columns.user, manifest.user_id_type), (columns.item, manifest.item_id_type))
    text = [f"{literal(name)}: 'VARCHAR'" for name in (*(name for name, kind in ids if kind == "string"), *values)]
    types = f", types = {{{', '.join(text)}}}" if text else ""
    return read_files(files, "read_csv", f", {csv_options(files)}{types}")


def _query(types: dict[str, str], columns: LogColumns, manifest: Manifest, values: Values, file: str) -> str:
    """What is selected: our names, our types."""
    sides = [side.name for side in manifest.sides]
    missing = [name for name in (columns.user, columns.item, columns.time, *sides) if name not in types]
    if missing:
        raise DataError(f"{file}: no column {', '.join(missing)}; the columns are {', '.join(types)}")
    wanted = []
    for ours, name, kind in (
        ("user", columns.user, manifest.user_id_type),
        ("item", columns.item, manifest.item_id_type),
    ):
        if types[name] not in (*INTEGERS, "VARCHAR") or (kind == "int64" and types[name] == "VARCHAR"):
            raise DataError(f"{file}: column {name} is {types[name]}, the export has {ours} ids of type {kind}")
        wanted.append(f'CAST({quote(name)} AS {"BIGINT" if kind == "int64" else "VARCHAR"}) AS "{ours}"')
    time = time_sql(quote(columns.time), types[columns.time], manifest.time_unit)
    if time is None:
        raise DataError(
            f"{file}: column {columns.time} is {types[columns.time]}: times must be integers in the export's unit, "
            f"{manifest.time_unit}, or timestamps"
        )
    wanted.append(f'{time} AS "time"')
    for side in manifest.sides:
        if side.name in values:
            wanted.append(f"CAST({quote(side.name)} AS VARCHAR) AS {quote(SIDE + side.name)}")
            continue
        kind = types[side.name].removesuffix("[]")
        if kind not in INTEGERS or types[side.name].endswith("[]") != side.multiple:
            shape = "lists of dense indices" if side.multiple else "dense indices"
            raise DataError(f"{file}: side column {side.name} is {types[side.name]}: the export needs {shape}")
        wanted.append(f"CAST({quote(side.name)} AS BIGINT{'[]' * side.multiple}) AS {quote(SIDE + side.name)}")
    return ", ".join(wanted)


def _own_log(directory: Path, manifest: Manifest, texts: Values) -> tuple[pa.Table, pa.Array]:
    """Events of a Recommender's log and who was forgotten; events before that are not among them."""
    records = list(settled(read_log(directory).records))
    forgotten = [user for record in records for user in record.get("forgotten", ())]
    rows = [event for record in records for event in record.get("events", ())]
    columns = {
        "user": pa.array([row[0] for row in rows], ID_TYPES[manifest.user_id_type]),
        "item": pa.array([row[1] for row in rows], ID_TYPES[manifest.item_id_type]),
        "time": pa.array([row[2] for row in rows], pa.int64()),
    }
    for side in manifest.sides:
        kind = pa.string() if side.name in texts else pa.list_(pa.int64()) if side.multiple else pa.int64()
        found = [(row[3] if len(row) > 3 else {}).get(side.name) for row in rows]
        columns[SIDE + side.name] = pa.array(found, kind)
    return pa.table(columns), pa.array(forgotten, ID_TYPES[manifest.user_id_type])


# --- rows ------------------------------------------------------------------------------------------------------------


def _check_unit(times: Ints, path: str, manifest: Manifest) -> None:
    """Refuse times that cannot be meant, most likely of another unit; a few of them are bad rows."""
    if not len(times):
        return
    try:
        check_time(int(np.median(times)), manifest.as_of, manifest.time_unit)
    except ValueError as error:
        raise DataError(f"{path}: {error}") from None


def _without_bad_rows(
    table: pa.Table, path: str, files: Sequence[str], on_bad_rows: str, manifest: Manifest
) -> tuple[pa.Table, dict[str, int]]:
    times = pc.fill_null(table["time"], -1).to_numpy()
    bad = {f"{name} is null": pc.is_null(table[name]).to_numpy() for name in ("user", "item", "time")}
    bad["time is negative"] = (times < 0) & ~bad["time is null"]
    _check_unit(times[~np.logical_or.reduce([*bad.values()])], path, manifest)
    first, _ = bounds(manifest.as_of, manifest.time_unit)
    bad["time is too early"] = (times >= 0) & (times < first)
    bad["time is yet to come"] = times > last_event(manifest.as_of, manifest.time_unit)
    counts = {reason: int(mask.sum()) for reason, mask in bad.items() if mask.any()}
    if not counts:
        return table, {}
    any_bad = np.logical_or.reduce([*bad.values()])
    said = "; ".join(f"{count:,} rows: {reason}" for reason, count in counts.items())
    if on_bad_rows == "error":
        place = _place(int(np.flatnonzero(any_bad)[0]), files)
        raise DataError(
            f"{path}: bad rows: {said}; the first is {place}. Mend the log, or leave them out with --on-bad-rows skip"
        )
    logger.warning("%s: bad rows left out: %s", path, said)
    return table.filter(pa.array(~any_bad)), counts


def _side(column: pa.ChunkedArray, side: SideTable, path: str, known: dict[str, int] | None, rows: int) -> Column:
    """A missing value is 0, or no values; one that the model has no row for is 0."""
    if known is not None:
        return np.array([known.get(value, 0) for value in column.to_pylist()], np.int64)
    if not side.multiple:
        values: Ints = pc.fill_null(column, 0).to_numpy().astype(np.int64)
    else:
        lengths = pc.fill_null(pc.list_value_length(column), 0).to_numpy().astype(np.int64)
        values = pc.fill_null(pc.list_flatten(column), 0).to_numpy().astype(np.int64)
    if values.min(initial=0) < 0:
        raise DataError(f"{path}: side column {side.name} has negative values: they must be dense indices")
    unknown = values >= rows
    if unknown.any():
        said = "%s: side column %s has %d values beyond %d, which the model does not know: they count as 0"
        logger.warning(said, path, side.name, unknown.sum(), rows - 1)
        values = np.where(unknown, 0, values)
    return Ragged(values, bounds_of(lengths)) if side.multiple else values
