"""Event logs to a dataset: DuckDB reads, checks, filters and counts, buckets sort; all of it out of core."""

import dataclasses
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from fuxi_torchrec.data.bucket_sort import BUCKET_EVENTS, ROW_NUMBER, USER_NUMBER, BucketSort
from fuxi_torchrec.data.dataset import ITEM, ITEMS, TARGET, TIME, USER, Dataset, DatasetInfo
from fuxi_torchrec.data.event_features import learn_events, numbers_of
from fuxi_torchrec.data.owned_features import write_features
from fuxi_torchrec.data.synthetic import SyntheticConfig, generate
from fuxi_torchrec.data.writer import ROW_GROUP_EVENTS, DatasetWriter
from fuxi_torchrec.events.database import Database
from fuxi_torchrec.events.errors import DataError
from fuxi_torchrec.events.features import Owner
from fuxi_torchrec.events.histories import bounds_of
from fuxi_torchrec.events.ingestion import FEATURE, Ingestion
from fuxi_torchrec.events.log import LogSpec, OnBadRows, columns_of, quote
from fuxi_torchrec.events.sources import FeatureSource, Source
from fuxi_torchrec.events.times import DAY, PER_SECOND, now, parse_time, show_time
from fuxi_torchrec.logging import get_logger
from fuxi_torchrec.options import option

logger = get_logger(__name__)

Progress = Callable[[str, int, int], None]  # what is done, events so far, events in all
_BATCH = 2**17  # events between DuckDB and the buckets at once
_SPARSE_ROWS, _SPARSE_RATIO = 1_000_000, 100  # integers of a feature column beyond both are no rows of a table


@dataclass(frozen=True)
class PrepareOptions:
    """How to prepare, whatever the source.

    Example:
        >>> import fuxi_torchrec, pathlib, tempfile
        >>> keep = tempfile.TemporaryDirectory()
        >>> log = pathlib.Path(keep.name, "log.csv")
        >>> _ = log.write_text("user_id,item_id,timestamp\\n7,tea,1700000000\\n7,,1700000060\\n")
        >>> options = fuxi_torchrec.PrepareOptions(on_bad_rows="skip")
        >>> found = fuxi_torchrec.prepare(log, pathlib.Path(keep.name, "data"), options)
        >>> found.events, sum(found.skipped_rows.values())
        (1, 1)
    """

    memory_limit: str = option("4GB", "of DuckDB and of sorting, half each; what does not fit spills to disk")
    threads: int = option(2, "of DuckDB")
    on_bad_rows: OnBadRows = option("error", "name the first bad rows, or count and leave them out")
    accept_times: bool = option(False, "take times as they are, also if they look like those of another unit")
    extend: str | None = option(None, "an earlier dataset whose item indices are kept", metavar="PREV")
    item_features: str | None = option(None, "Parquet or CSV with a row of features per item", metavar="FILE")
    item_columns: str | None = option(
        None,
        "of that file, separated by spaces: NAME, NAME:KIND (id, bucket, number, vector, display), NAME:id:| for texts "
        "such as a|b, NAME:bucket:32; by default all, by their types",
        metavar="COLUMNS",
    )
    item_id_column: str | None = option(None, "of that file; as in the log by default", metavar="C")
    user_features: str | None = option(None, "the same of users", metavar="FILE")
    user_columns: str | None = option(None, "of that file, likewise", metavar="COLUMNS")
    user_id_column: str | None = option(None, "of that file; as in the log by default", metavar="C")
    train_until: str | None = option(
        None,
        "vocabularies and statistics of features are those of items and users with an event before this time, in the "
        "time unit or ISO: the start of what is held out; of all by default",
        metavar="T",
    )

    def features_of(self, owner: Owner, log: LogSpec) -> FeatureSource | None:
        """The file of features that the options name; None without one."""
        path, columns, column = (getattr(self, f"{owner}_{what}") for what in ("features", "columns", "id_column"))
        if path is None:
            if columns or column:
                raise DataError(f"--{owner}-columns and --{owner}-id-column belong to --{owner}-features")
            return None
        names = columns_of(getattr(log, owner))
        return FeatureSource(path, column or (names[0] if names else ""), tuple((columns or "").split()))


def prepare(
    source: Source, output: str | Path, options: PrepareOptions | None = None, progress: Progress | None = None
) -> DatasetInfo:
    """Read a source, write a dataset."""
    options = options or PrepareOptions()
    source = dataclasses.replace(
        source,
        log=dataclasses.replace(source.log, on_bad_rows=options.on_bad_rows),
        item_features=options.features_of("item", source.log) or source.item_features,
        user_features=options.features_of("user", source.log) or source.user_features,
    )
    description = {"files": [os.path.basename(name) for name in source.files]}
    with (
        DatasetWriter(output, source.log, description) as writer,
        Database(writer.scratch, options.memory_limit, options.threads) as database,
    ):
        return _Preparation(database, source, options, writer, progress or (lambda *_: None)).run()


class _Preparation:
    """One run: the steps in order, on one connection."""

    def __init__(
        self, database: Database, source: Source, options: PrepareOptions, writer: DatasetWriter, progress: Progress
    ) -> None:
        self.database, self.source, self.writer = database, source, writer
        self.progress, self.log, self.options = progress, source.log, options
        self.extended = None if options.extend is None else Dataset.open(options.extend)

    def run(self) -> DatasetInfo:
        self.progress("reading", 0, 0)
        log = Ingestion(self.database, self.source)
        self.log = self.writer.log = log.spec
        if self.extended is not None and self.extended.info.time_unit != self.log.time_unit:
            theirs, ours = self.extended.info.time_unit, self.log.time_unit
            raise DataError(f"{self.extended.path} has times in {theirs!r}, this source in {ours!r}")
        if not self.options.accept_times:
            log.check_unit()
        skipped = log.check_rows()
        self.times = (log.first or 0, log.last or 0)
        self._warn_about_future(self.times[1])
        self._filter()
        total = self._count()
        often = f"SELECT item_id, count FROM item_counts WHERE count >= {self.log.min_item_events}"
        items = self._vocabulary(ITEMS, "items", "item_id", often)
        vocabularies = self._feature_vocabularies()
        self.learned = learn_events(self.database, self.log, log.widths(), self._training, self.extended)
        self.writer.describe_event_features(tuple(self.learned.values()))
        buckets = self._fill_buckets(vocabularies, total)
        self._owned_features()
        ids, done = self.database.table("SELECT user_id FROM users ORDER BY number")["user_id"], 0
        for users in buckets.sorted():
            self.writer.write_users(ids.slice(users.first, len(users.lengths)), users.lengths, users.events)
            done += users.events.num_rows
            self.progress("sorting and writing", done, total)
        return self.writer.finish(items, skipped, frozenset(vocabularies))

    def _filter(self) -> None:
        """k-core: drop users and items with too few events until none are left (or once, if the log says so).

        Events of rare items that stay count for their users: then users are dropped once, and no items.
        """
        users, items = self.log.min_user_events, self.log.min_item_events
        keeps = self.log.rare_items == "unknown"
        least = [("item_id", 1 if keeps else items), ("user_id", users)]
        if max(number for _, number in least) <= 1:
            return
        self.progress("filtering", 0, 0)
        self.database.rows("CREATE TABLE kept AS SELECT * FROM events")
        while True:
            before = self.database.value("SELECT count(*) FROM kept")
            for column, number in least:
                if number > 1:
                    self.database.rows(
                        f"DELETE FROM kept WHERE {column} IN "
                        f"(SELECT {column} FROM kept GROUP BY {column} HAVING count(*) < {number})"
                    )
            if not self.log.iterate or keeps or self.database.value("SELECT count(*) FROM kept") == before:
                break
        self.database.rows("DROP VIEW events")
        self.database.rows("CREATE VIEW events AS SELECT * FROM kept")

    def _count(self) -> int:
        """Events in all; an error if there are none. Each item's are kept for the vocabulary."""
        self.database.rows("CREATE TABLE item_counts AS SELECT item_id, count(*) AS count FROM events GROUP BY item_id")
        total, most = self.database.row("SELECT coalesce(sum(count), 0), coalesce(max(count), 0) FROM item_counts")
        filtered = self.log.where or max(self.log.min_item_events, self.log.min_user_events) > 1
        name = f"{self.source.files[0]}{' and others' * (len(self.source.files) > 1)}"
        if not total:
            raise DataError(f"{name}: no events" + (" are left after filtering" if filtered else ""))
        if most < self.log.min_item_events:
            raise DataError(f"{name}: every item is rare: none has {self.log.min_item_events} events")
        return int(total)

    def _warn_about_future(self, last: int) -> None:
        unit = self.log.time_unit
        if last > now(unit) + DAY * PER_SECOND[unit]:
            logger.warning(
                "the last event, at %s, is in the future: a placeholder, or a clock that goes wrong? Users would be "
                "queried at that time by default: leave such rows out with --where",
                show_time(last, unit),
            )

    def _vocabulary(self, file: str, table: str, column: str, counts: str) -> int:
        """A table, and a file, of indices 1.. by falling count; and how many there are.

        If the dataset that is extended has the file, its indices come first and new values behind them.
        """
        new = f"CAST(row_number() OVER (ORDER BY count DESC, {column}) AS INTEGER)"
        if self.extended is None or file not in self.extended.info.tables:
            self.database.rows(f"CREATE TABLE {table} AS SELECT {column}, {new} AS index, count FROM ({counts})")
        else:
            previous, old = self.extended.table(file, [column, "index"]), self.extended.file(file)
            was, now = (_kind(each[column].type) for each in (previous, self.database.table(f"{counts} LIMIT 0")))
            if was != now:
                raise DataError(f"{old} has {column} as {was}, this source as {now}: they must be of one kind")
            self.database.load("previous", previous)
            top = self.database.value("SELECT coalesce(max(index), 0) FROM previous")
            self.database.rows(
                f"CREATE TABLE {table} AS WITH counts AS ({counts}) "
                f"SELECT o.{column}, o.index, coalesce(c.count, 0) AS count "
                f"FROM previous o LEFT JOIN counts c USING ({column}) UNION ALL "
                f"SELECT {column}, CAST({top} + {new} AS INTEGER), count "
                f"FROM counts WHERE {column} NOT IN (SELECT {column} FROM previous)"
            )
            self.database.rows("DROP TABLE previous")
        found = self.database.table(f"SELECT {column}, index, count FROM {table} ORDER BY index")
        self.writer.write_table(file, found)
        return int(found.num_rows)

    def _feature_vocabularies(self) -> list[str]:
        """Strings get a vocabulary, feature-NAME.parquet, indices 1.. by falling count; integers stay as they are."""
        coded = []
        previous = {} if self.extended is None else {s.name: s for s in self.extended.info.features}
        for name in self.log.features:
            if name in self.log.kinds:
                continue
            column, before = quote(FEATURE + name), previous.get(name)
            value = f"unnest({column})" if self.log.is_list(name) else column
            if before is not None:
                self.writer.reserve(name, before.rows)  # models have rows for them
                if self.extended is not None and before.vocabulary != self.log.is_text(name):
                    was, now = ("text", "integers") if before.vocabulary else ("integers", "text")
                    raise DataError(f"feature column {name} was {was} in {self.extended.path}, here it is {now}")
            if not self.log.is_text(name):
                self._check_dense(name, value, before.rows if before else 0)
                continue
            values = f"SELECT {value} AS value FROM events"
            counts = f"SELECT value, count(*) AS count FROM ({values}) WHERE value IS NOT NULL GROUP BY 1"
            size = self._vocabulary(f"feature-{name}.parquet", quote("feature_table_" + name), "value", counts)
            self.writer.reserve(name, size + 1)
            coded.append(name)
        return coded

    @property
    def _training(self) -> str:
        """SQL condition of the events that statistics are of."""
        until = self.options.train_until
        return "" if until is None else f" WHERE timestamp < {parse_time(until, self.log.time_unit)}"

    def _owned_features(self) -> None:
        """Features of items and of users, learned from those with an event in the training data."""
        before = self._training
        sources: dict[Owner, FeatureSource | None]
        sources = {"item": self.source.item_features, "user": self.source.user_features}
        for owner, source in sources.items():
            if source is None:
                if self.extended is not None and self.extended.owned(owner).there:
                    raise DataError(f"{self.extended.path} has features of {owner}s: give --{owner}-features too")
                continue
            table, column, order = ("items", "item_id", "index") if owner == "item" else ("users", "id", "number")
            found = self.database.table(
                f"SELECT {column} AS id, {column} IN (SELECT {owner}_id FROM events{before}) AS training "
                f"FROM {table} ORDER BY {order}"
            )
            ids, training = found["id"].combine_chunks(), found["training"].to_numpy().astype(bool)
            write_features(self.database, self.writer, source, owner, ids, training, self.extended)

    def _check_dense(self, name: str, value: str, rows: int) -> None:
        """Integers are rows of a table: ids spread over a wide range would make it enormous.

        A table that exists, of the dataset that is extended, may double its rows, however empty it is.
        """
        largest, distinct = self.database.row(
            f"SELECT coalesce(max(v), 0), approx_count_distinct(v) FROM (SELECT {value} AS v FROM events)"
        )
        if largest >= max(_SPARSE_ROWS, _SPARSE_RATIO * max(1, distinct), 2 * rows):
            cure = "Write them as text, which is numbered"
            if self.extended is not None and rows:
                cure = f"In {self.extended.path} it has {rows:,} rows: mend the log, or leave out rows with --where"
            raise DataError(
                f"feature column {name} has about {distinct:,} values up to {largest:,}: integers are rows of a table "
                f"as they are, and this one would be almost empty. {cure}"
            )

    def _fill_buckets(self, coded: list[str], total: int) -> BucketSort:
        """All events with items and strings as indices, in the buckets that will sort them."""
        kind = self.database.value("SELECT typeof(user_id) FROM events LIMIT 1")
        user = "user_id" if kind == "VARCHAR" else "CAST(user_id AS BIGINT)"
        self.database.rows(
            f"CREATE TABLE users AS SELECT user_id AS id, {user} AS user_id, count, "
            "CAST(row_number() OVER (ORDER BY user_id) - 1 AS INTEGER) AS number "
            "FROM (SELECT user_id, count(*) AS count FROM events GROUP BY user_id)"
        )
        counts = self.database.table("SELECT count FROM users ORDER BY number")
        rows = len(self.source.files) * self.source.rows_per_file or self.database.value("SELECT max(n) FROM log")
        time, first = _narrow("timestamp", *self.times)
        row, _ = _narrow("n", 0, rows)
        rare = self.log.rare_items == "unknown"
        columns = [f"users.number AS {USER_NUMBER}", f"{row} AS {ROW_NUMBER}"]
        columns += [f"{'coalesce(items.index, 0)' if rare else 'items.index'} AS {ITEM}", f"{time} AS {TIME}"]
        if self.log.target:
            columns.append(f"target AS {TARGET}")
        joins = f"{'LEFT ' * rare}JOIN items USING (item_id) JOIN users ON events.user_id = users.id"
        for name in self.log.features:
            column, table = quote(FEATURE + name), quote("feature_table_" + name)
            if name in coded and not self.log.is_list(name):
                columns.append(f"coalesce({table}.index, 0) AS {quote(name)}")
                joins += f" LEFT JOIN {table} ON {column} = {table}.value"
            else:
                columns.append(f"{column} AS {quote(name)}")
        lengths, at_once = counts["count"].to_numpy(), self._bucket_events(total)
        spill = os.path.join(self.database.place, "buckets")
        buckets = BucketSort(lengths, ROW_GROUP_EVENTS, at_once, self.database.budget, spill, first)
        done = 0
        lists = {name: self._values(name) for name in coded if self.log.is_list(name)}
        for batch in self.database.batches(f"SELECT {', '.join(columns)} FROM events {joins}", _BATCH):
            for name, values in lists.items():
                column = batch.schema.get_field_index(name)
                batch = batch.set_column(column, name, _indices(batch[name], values))
            for name, feature in self.learned.items():
                column = batch.schema.get_field_index(name)
                batch = batch.set_column(column, name, numbers_of(batch[name], feature))
            buckets.add(batch)
            done += batch.num_rows
            self.progress("reading", done, total)
        if done != total:
            what = f"{total:,} events were counted and {done:,} were read"
            raise DataError(f"{what}: the log changed, or its metadata lies")
        return buckets

    def _values(self, feature: str) -> pa.Array:
        """A feature's vocabulary, in the order of its indices."""
        table = quote("feature_table_" + feature)
        found = self.database.table(f"SELECT value FROM {table} ORDER BY index")
        return found["value"].combine_chunks()

    def _bucket_events(self, total: int) -> int:
        """How many events are sorted at once: few enough that a bucket is a small part of the memory."""
        lists = [quote(FEATURE + name) for name in self.log.features if self.log.is_list(name)]
        values = [self.database.value(f"SELECT coalesce(sum(len({column})), 0) FROM events") for column in lists]
        wide = sum(feature.width for feature in self.learned.values())
        each = 8 * (4 + len(self.log.features) + wide + sum(map(int, values)) / total)
        return max(1, min(BUCKET_EVENTS, int(self.database.budget / 16 / each)))


def _kind(type_: pa.DataType) -> str:
    return "text" if pa.types.is_string(type_) or pa.types.is_large_string(type_) else "integer"


def _indices(lists: pa.Array, values: pa.Array) -> pa.Array:
    """Lists of text as lists of indices, from 1."""
    found = pc.add(pc.index_in(lists.flatten(), value_set=values), 1)
    return pa.ListArray.from_arrays(bounds_of(pc.list_value_length(lists).to_numpy()).astype(np.int32), found)


def _narrow(column: str, least: int, most: int) -> tuple[str, int]:
    """A column in 32 bits if its range allows, as SQL; and what was subtracted for that."""
    if most - least < 2**32:
        return f"CAST({column} - {least} AS UINTEGER)", least
    return column, 0


def prepare_synthetic(config: SyntheticConfig, output: str | Path, progress: Progress | None = None) -> DatasetInfo:
    """The generator's histories as a dataset; users and items keep their numbers as raw ids."""
    report = progress or (lambda *_: None)
    counts = np.zeros(config.items, np.int64)
    for block in generate(config):
        counts += np.bincount(block.item, minlength=config.items)
    # as everywhere: index 1.. by falling count, then by id; items that never occur have no index
    order = np.lexsort((np.arange(config.items), -counts))[: int((counts > 0).sum())]
    index = np.zeros(config.items, np.int32)
    index[order] = np.arange(1, len(order) + 1)
    total, done = int(counts.sum()), 0
    with DatasetWriter(output, LogSpec(), {"synthetic": dataclasses.asdict(config)}) as writer:
        for block in generate(config):
            writer.write(pa.table({USER: block.user, ITEM: index[block.item], TIME: block.timestamp}))
            done += len(block.user)
            report("generating", done, total)
        table = {"item_id": order, "index": np.arange(1, len(order) + 1, dtype=np.int32), "count": counts[order]}
        writer.write_table(ITEMS, pa.table(table))
        return writer.finish(len(order), {}, frozenset())
