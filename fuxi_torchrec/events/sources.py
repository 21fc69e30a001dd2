"""Where events come from: each source is a SQL query over files, with columns user, item, time, and what it adds.

A source says what the columns mean; everything after that (checks, filters, vocabulary, sorting) is the same for all.
"""

import glob
import os
import tempfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pyarrow.parquet as pq

from fuxi_torchrec.events.errors import DataError
from fuxi_torchrec.events.times import TimeUnit


@dataclass(frozen=True)
class Source:
    """Event logs as SQL sees them.

    Attributes:
        files: in the order that decides ties.
        reader: SQL table over the files: the columns below, the file's name, and perhaps the order of the rows.
        user, item, time: column names or SQL expressions.
        time_unit: of the time expression.
        columns: columns that must exist.
        where: SQL condition on the log's own columns.
        target: SQL expression, the event's weight as a target.
        sides: columns kept as side features.
        min_user_events, min_item_events: iterative k-core.
        rows_per_file: if the reader numbers the rows: what the numbers of neighbouring files differ by.
    """

    files: tuple[str, ...]
    reader: str
    user: str
    item: str
    time: str
    time_unit: TimeUnit
    columns: tuple[str, ...]
    where: str | None = None
    target: str | None = None
    sides: tuple[str, ...] = ()
    min_user_events: int = 1
    min_item_events: int = 1
    iterate: bool = True
    check_time_type: bool = False
    rows_per_file: int = 0


# DuckDB's types that fit into 64 bits, signed
INTEGERS = ("TINYINT", "SMALLINT", "INTEGER", "BIGINT", "UTINYINT", "USMALLINT", "UINTEGER")
_TIMESTAMP = {"s": "epoch", "ms": "epoch_ms", "us": "epoch_us"}
# endings of logs
LOGS = (".parquet", ".csv", ".csv.gz", ".tsv")


def time_sql(column: str, kind: str, unit: str) -> str | None:
    """SQL for a column's times in a unit: integers are in it already; None if the type cannot be used."""
    if kind in (*INTEGERS, "UBIGINT"):
        return f"CAST({column} AS BIGINT)"
    if kind.startswith("TIMESTAMP") or kind == "DATE":
        return f"CAST(floor({_TIMESTAMP[unit]}({column})) AS BIGINT)"
    return None


def quote(name: str) -> str:
    """An SQL identifier."""
    return '"' + name.replace('"', '""') + '"'


def literal(text: str) -> str:
    """An SQL string."""
    return "'" + text.replace("'", "''") + "'"


def read_files(files: Sequence[str], kind: str, options: str = "") -> str:
    """SQL table over files, whose names are names and no patterns, with the file's name as a column."""
    names = ", ".join(literal(glob.escape(name)) for name in files)
    return f"{kind}([{names}], filename = {literal(FILE)}{options})"


def _parquet(files: Sequence[str], rows_per_file: int) -> str:
    """Parquet files that number their rows, by file and by place in it: sorting needs no pass to do so."""
    parts = [
        f"SELECT * EXCLUDE (file_row_number), {n * rows_per_file} + file_row_number AS {ROW} "
        f"FROM {read_files([name], 'read_parquet', ', file_row_number = true')}"
        for n, name in enumerate(files)
    ]
    return f"({' UNION ALL BY NAME '.join(parts)})"


# columns that a reader adds to the log's own
FILE, ROW = "__source_file", "__source_row"
# columns of a dataset that no side feature can be named like
RESERVED = ("user_id", "item", "timestamp", "target")


def find_files(path: str, endings: Sequence[str]) -> list[str]:
    """Files of a path: itself, those below a directory, or those of a glob; in sorted order."""
    if os.path.isdir(path):
        found = [str(p) for p in Path(path).rglob("*") if p.is_file() and p.name.endswith(tuple(endings))]
        hint = f"no file ending in {', '.join(endings)} below it"
    elif os.path.exists(path):
        found, hint = [path], ""
    else:
        found, hint = [name for name in glob.glob(path, recursive=True) if os.path.isfile(name)], "no such file"
    if not found:
        raise DataError(f"{path}: {hint}")
    return sorted(found)


def find_logs(path: str) -> tuple[list[str], Literal["parquet", "csv"]]:
    """Files of a log, all of one kind and none empty."""
    files = find_files(path, LOGS)
    parquet = [name.endswith(".parquet") for name in files]
    if any(parquet) and not all(parquet):
        raise DataError(f"{path}: both Parquet and CSV files; name one kind with a glob")
    tabs = [name.endswith(".tsv") for name in files]
    if any(tabs) and not all(tabs):  # read together they would have one delimiter
        raise DataError(f"{path}: both .csv and .tsv files; name one kind with a glob")
    for name in files:
        if os.path.getsize(name) == 0 and not any(parquet):
            raise DataError(f"{name}: the file is empty, not even a header")
    return files, "parquet" if all(parquet) else "csv"


def csv_options(files: Sequence[str]) -> str:
    """How DuckDB reads them: the whole file decides a column's type, so nothing is rounded or refused half-way."""
    delimiter = "\t" if all(name.endswith(".tsv") for name in files) else ","
    return f"header = true, union_by_name = true, sample_size = -1, delim = {literal(delimiter)}"


def _most_rows(files: Sequence[str]) -> int:
    """Rows of the longest of Parquet files, all of which can be read."""
    most = 1
    for name in files:
        try:
            most = max(most, pq.read_metadata(name).num_rows)
        except Exception as error:
            raise DataError(f"{name}: not a readable Parquet file, perhaps cut short: {error}") from None
    return most


def events(
    path: str,
    user_column: str,
    item_column: str,
    time_column: str,
    time_unit: TimeUnit,
    side_columns: Sequence[str] = (),
    target_expression: str | None = None,
    where: str | None = None,
    min_user_events: int = 1,
    min_item_events: int = 1,
) -> Source:
    """CSV or Parquet logs with named columns."""
    for name in side_columns:
        if not name or "." in name or "/" in name:
            raise DataError(
                f"side column {name!r}: a name with a dot or a slash cannot be that of a table: rename the column"
            )
        if name in RESERVED or list(side_columns).count(name) > 1:
            raise DataError(
                f"side column {name} is named twice, or like one of the dataset's own: {', '.join(RESERVED)}"
            )
    files, kind = find_logs(path)
    rows_per_file = 0
    if kind == "parquet":
        most = _most_rows(files)
        reader = read_files(files, "read_parquet", ", union_by_name = true")
        if not any("file_row_number" in pq.read_schema(name).names for name in files):
            reader, rows_per_file = _parquet(files, most), most
    else:
        reader = read_files(files, "read_csv", f", {csv_options(files)}")
    return Source(
        tuple(files),
        reader,
        *(quote(user_column), quote(item_column), quote(time_column)),
        time_unit,
        columns=(user_column, item_column, time_column, *side_columns),
        where=where,
        target=target_expression,
        sides=tuple(side_columns),
        min_user_events=min_user_events,
        min_item_events=min_item_events,
        check_time_type=True,
        rows_per_file=rows_per_file,
    )


def published_file(path: str, name: str, into: str) -> str:
    """A file of a published data set: given itself, or in a directory, or in a zip, which is unpacked."""
    if os.path.isdir(path):
        found = sorted(p for p in Path(path).rglob(name) if p.is_file())
        if found:
            return str(found[0])
        archives = sorted(Path(path).rglob("*.zip"))
        if not archives:
            raise DataError(f"{path}: no {name} below it, and no zip")
        path = str(archives[0])
    if not os.path.exists(path):
        raise DataError(f"{path}: no such file or directory")
    if not zipfile.is_zipfile(path):
        return path
    with zipfile.ZipFile(path) as archive:
        members = [member for member in archive.namelist() if member.rsplit("/", 1)[-1] == name]
        if not members:
            raise DataError(f"{path}: no {name} in this zip")
        return archive.extract(members[0], tempfile.mkdtemp(dir=into))


def ml_1m(path: str, scratch: str) -> Source:
    """MovieLens-1M's ``ratings.dat``: UserID::MovieID::Rating::Timestamp."""
    file = published_file(path, "ratings.dat", scratch)
    columns = "{'user': 'BIGINT', 'item': 'BIGINT', 'rating': 'BIGINT', 'time': 'BIGINT'}"
    reader = read_files([file], "read_csv", f", delim = '::', header = false, auto_detect = false, columns = {columns}")
    return Source((file,), reader, "user", "item", "time", "s", ("user", "item", "time"))


def ml_20m(path: str, scratch: str) -> Source:
    """MovieLens-20M's ``ratings.csv``: userId, movieId, rating, timestamp."""
    file = published_file(path, "ratings.csv", scratch)
    reader = read_files([file], "read_csv", ", header = true")
    return Source((file,), reader, '"userId"', '"movieId"', '"timestamp"', "s", ("userId", "movieId", "timestamp"))


def kuairand_27k(path: str, keep_negative: bool = False, min_item_events: int = 101) -> Source:
    """KuaiRand-27K's standard logs, in milliseconds, without negative feedback, items of more than 100 interactions."""
    pattern = "log_standard_*_27k_part*.csv"
    files = sorted(str(p) for p in Path(path).rglob(pattern)) if os.path.isdir(path) else sorted(glob.glob(path))
    if not files:
        raise DataError(f"{path}: no {pattern} below it")
    names = ("user_id", "video_id", "time_ms", "is_hate")
    return Source(
        tuple(files),
        read_files(files, "read_csv", ", header = true, union_by_name = true"),
        *("user_id", "video_id", "time_ms"),
        "ms",
        names,
        where=None if keep_negative else "is_hate = 0",
        min_item_events=min_item_events,
        iterate=False,
    )


def kuairec(path: str, scratch: str, min_events: int = 5) -> Source:
    """KuaiRec's ``big_matrix.csv``: timestamps are seconds with a fraction, kept as milliseconds; 5-core."""
    file = published_file(path, "big_matrix.csv", scratch)
    names = ("user_id", "video_id", "timestamp")
    return Source(
        (file,),
        read_files([file], "read_csv", ", header = true"),
        *("user_id", "video_id", "CAST(round(timestamp * 1000) AS BIGINT)"),
        "ms",
        names,
        min_user_events=min_events,
        min_item_events=min_events,
    )
