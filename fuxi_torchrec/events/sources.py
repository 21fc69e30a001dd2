"""Where events come from: files, how they are read, and what their columns mean.

Everything after that (checks, filters, vocabulary, sorting) is the same for all.
"""

import glob
import os
import tempfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import duckdb
import pyarrow.parquet as pq

from fuxi_torchrec.events.errors import DataError
from fuxi_torchrec.events.log import LogSpec, literal, quote
from fuxi_torchrec.events.times import TimeUnit


@dataclass(frozen=True)
class Source:
    """Files of a log as SQL sees them.

    Attributes:
        files: in the order that decides ties.
        reader: SQL table over the files: the log's own columns, the file's name, and perhaps the order of the rows.
        log: what the columns mean.
        rows_per_file: if the reader numbers the rows: what the numbers of neighbouring files differ by.
    """

    files: tuple[str, ...]
    reader: str
    log: LogSpec
    rows_per_file: int = 0


# endings of logs
LOGS = (".parquet", ".csv", ".csv.gz", ".tsv")


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
# columns of a dataset that no feature can be named like
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


def csv_options(files: Sequence[str], sample: int = -1) -> str:
    """How DuckDB reads them: the whole file decides a column's type, so nothing is rounded or refused half-way."""
    delimiter = "\t" if all(name.endswith(".tsv") for name in files) else ","
    return f"header = true, union_by_name = true, sample_size = {sample}, delim = {literal(delimiter)}"


def _most_rows(files: Sequence[str]) -> int:
    """Rows of the longest of Parquet files, all of which can be read."""
    most = 1
    for name in files:
        try:
            most = max(most, pq.read_metadata(name).num_rows)
        except Exception as error:
            raise DataError(f"{name}: not a readable Parquet file, perhaps cut short: {error}") from None
    return most


def of_log(path: str, log: LogSpec) -> Source:
    """CSV or Parquet logs with the columns of a spec. Text columns of a CSV stay as they are written: 007 is not 7."""
    files, kind = find_logs(path)
    if kind == "csv":
        text = [name for name, type_ in log.columns.items() if type_ == "VARCHAR"]
        there = _header(files) if text else []
        types = ", ".join(f"{literal(name)}: 'VARCHAR'" for name in text if name in there)
        options = csv_options(files) + (f", types = {{{types}}}" if types else "")
        return Source(tuple(files), read_files(files, "read_csv", f", {options}"), log)
    most = _most_rows(files)
    if any("file_row_number" in pq.read_schema(name).names for name in files):
        return Source(tuple(files), read_files(files, "read_parquet", ", union_by_name = true"), log)
    return Source(tuple(files), _parquet(files, most), log, most)


def _header(files: Sequence[str]) -> list[str]:
    """Names of all columns of CSV files."""
    reader = read_files(files, "read_csv", f", {csv_options(files, sample=1)}, all_varchar = true")
    try:
        with duckdb.connect() as connection:
            return [row[0] for row in connection.execute(f"DESCRIBE SELECT * FROM {reader}").fetchall()]
    except duckdb.Error as error:
        raise DataError(f"{files[0]}: {str(error).split(chr(10))[0]}") from None


def events(
    path: str,
    user_column: str,
    item_column: str,
    time_column: str,
    time_unit: TimeUnit,
    event_features: Sequence[str] = (),
    target_expression: str | None = None,
    where: str | None = None,
    min_user_events: int = 1,
    min_item_events: int = 1,
    rare_items: Literal["drop", "unknown"] = "drop",
) -> Source:
    """CSV or Parquet logs with named columns."""
    for name in event_features:
        if not name or "." in name or "/" in name:
            raise DataError(
                f"feature column {name!r}: a name with a dot or a slash cannot be that of a table: rename the column"
            )
        if name in RESERVED or list(event_features).count(name) > 1:
            raise DataError(
                f"feature column {name} is named twice, or like one of the dataset's own: {', '.join(RESERVED)}"
            )
    log = LogSpec(
        *(quote(user_column), quote(item_column), quote(time_column)),
        time_unit,
        where=where,
        target=target_expression,
        features=tuple(event_features),
        min_user_events=min_user_events,
        min_item_events=min_item_events,
        rare_items=rare_items,
    )
    return of_log(path, log)


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
    columns = "{'user_id': 'BIGINT', 'item_id': 'BIGINT', 'rating': 'BIGINT', 'timestamp': 'BIGINT'}"
    reader = read_files([file], "read_csv", f", delim = '::', header = false, auto_detect = false, columns = {columns}")
    return Source((file,), reader, LogSpec())


def ml_20m(path: str, scratch: str) -> Source:
    """MovieLens-20M's ``ratings.csv``: userId, movieId, rating, timestamp."""
    file = published_file(path, "ratings.csv", scratch)
    return Source((file,), read_files([file], "read_csv", ", header = true"), LogSpec('"userId"', '"movieId"'))


def kuairand_27k(path: str, keep_negative: bool = False, min_item_events: int = 101) -> Source:
    """KuaiRand-27K's standard logs, in milliseconds, without negative feedback, items of more than 100 interactions."""
    pattern = "log_standard_*_27k_part*.csv"
    files = sorted(str(p) for p in Path(path).rglob(pattern)) if os.path.isdir(path) else sorted(glob.glob(path))
    if not files:
        raise DataError(f"{path}: no {pattern} below it")
    log = LogSpec(
        item="video_id",
        time="time_ms",
        time_unit="ms",
        where=None if keep_negative else "is_hate = 0",
        min_item_events=min_item_events,
        iterate=False,
    )
    return Source(tuple(files), read_files(files, "read_csv", ", header = true, union_by_name = true"), log)


def kuairec(path: str, scratch: str, min_events: int = 5) -> Source:
    """KuaiRec's ``big_matrix.csv``: timestamps are seconds with a fraction, kept as milliseconds; 5-core."""
    file = published_file(path, "big_matrix.csv", scratch)
    log = LogSpec(
        item="video_id",
        time="CAST(round(timestamp * 1000) AS BIGINT)",
        time_unit="ms",
        min_user_events=min_events,
        min_item_events=min_events,
    )
    return Source((file,), read_files([file], "read_csv", ", header = true"), log)
