"""Events that came since an export: CSV or Parquet logs, or a Recommender's store."""

import hashlib
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from fuxi_torchrec.events.database import Database
from fuxi_torchrec.events.errors import DataError
from fuxi_torchrec.events.feature_learning import buckets
from fuxi_torchrec.events.features import Feature
from fuxi_torchrec.events.histories import Column, Histories, Ints, Ragged, bounds_of, take
from fuxi_torchrec.events.ingestion import FEATURE, Ingestion
from fuxi_torchrec.events.log import OnBadRows, quote
from fuxi_torchrec.events.sources import FILE, ROW, Source, of_log
from fuxi_torchrec.events.times import bounds, check_time, last_event
from fuxi_torchrec.export.bundle import Bundle, Manifest
from fuxi_torchrec.export.parts import ID_TYPES, combined
from fuxi_torchrec.logging import get_logger
from fuxi_torchrec.serving.catalogue import LEFT_OUT, UNKNOWN, ItemIds, feature_values
from fuxi_torchrec.serving.store import STORE_FILE, Content, about_of, read_store

logger = get_logger(__name__)

Values = dict[str, dict[str, int]]  # of features with text values: value to index
Since = Literal["export", "before", "unknown"]
_OWN = "own_log"
_USER, _ITEM, _TIME = "__user", "__item", "__time"  # columns of a Recommender's events; features have their own names


@dataclass(frozen=True)
class LogColumns:
    """Names of a log's columns where they are not those of the dataset's log."""

    user: str | None = None
    item: str | None = None
    time: str | None = None


@dataclass(frozen=True, eq=False)
class NewEvents:
    """Events by user, in time; events of one time in the order in which they were read.

    Attributes:
        users: raw ids, each once.
        histories: their new events.
        unknown_items: events of items that the model does not know.
        rare_items: events left out, of items that the dataset would not have.
        bad_rows: left out, by reason.
        digest: of users, items, times and features as they were read.
        forgotten: users of whom nothing before these events is to stay, of a Recommender's store.
        since: where they begin: with the export, or before it, as in the store of a Recommender on another one; or
            nobody knows.
    """

    users: pa.Array
    histories: Histories
    unknown_items: int
    rare_items: int
    bad_rows: dict[str, int]
    digest: str
    forgotten: pa.Array
    since: Since

    def __len__(self) -> int:
        return len(self.histories.items)

    @staticmethod
    def none(manifest: Manifest) -> "NewEvents":
        """Nothing happened."""
        nobody = pa.array([], ID_TYPES[manifest.user_id_type])
        return NewEvents(nobody, Histories.empty(0, manifest.features), 0, 0, {}, "", nobody, "export")


def stored(path: str | Path) -> Content | None:
    """What the store of a Recommender has; None if the path is none."""
    return read_store(Path(path)) if (Path(path) / STORE_FILE).exists() else None


def read_events(
    path: str | Path,
    bundle: Bundle,
    columns: LogColumns | None = None,
    on_bad_rows: OnBadRows | None = None,
    content: Content | None = None,
) -> NewEvents:
    """Read a file, the files below a directory, those of a glob, or the store of a Recommender, by the rules of the log
    that the export was made from.

    The export's files that this needs are checked first.

    Args:
        content: of the store, see :func:`stored`; None if it is none.
    """
    manifest, values = bundle.manifest, feature_values(bundle)
    log = manifest.log.with_columns(**vars(columns or LogColumns()))
    log = replace(
        log, features=tuple(feature.name for feature in manifest.features), on_bad_rows=on_bad_rows or log.on_bad_rows
    )
    forgotten = pa.array([], ID_TYPES[manifest.user_id_type])
    since: Since = "unknown"
    with Database(in_memory=True) as database:
        if content is not None:
            since = "export" if content.about == about_of(manifest) else "before"
            table, forgotten = _stored_events(content, str(path), manifest, values)
            database.load(_OWN, table)
            log = replace(log, user=_USER, item=_ITEM, time=_TIME, where=None, target=None, split={}, columns={})
            source = Source((str(path),), _OWN, log, len(table) + 1)
        else:
            source = of_log(str(path), log)
        ingestion = Ingestion(database, source, keep=True)
        widths = {feature.name: feature.width for feature in manifest.features if feature.kind == "vector"}
        bad = ingestion.check_rows(_implausible(database, str(path), manifest), widths)
        names = ["user_id", "item_id", "timestamp", *(quote(FEATURE + feature.name) for feature in manifest.features)]
        table = database.table(f"SELECT {', '.join(names)} FROM events ORDER BY n")
    ours = ["user", "item", "time", *(feature.name for feature in manifest.features)]
    kinds = [ID_TYPES[manifest.user_id_type], ID_TYPES[manifest.item_id_type], pa.int64()]
    table = pa.table([*(c.cast(k) for c, k in zip(table.columns, kinds, strict=False)), *table.columns[3:]], ours)
    return _by_user(table, forgotten, bundle, values, bad, since)


def _by_user(
    table: pa.Table, forgotten: pa.Array, bundle: Bundle, values: Values, bad: dict[str, int], since: Since
) -> NewEvents:
    digest = _digest(table, forgotten)
    items = ItemIds.read(bundle).find(combined(table[1]))
    kept = np.flatnonzero(items != LEFT_OUT)
    rare, items = len(items) - len(kept), items[kept]
    if rare:
        table = table.take(pa.array(kept))
    encoded, times = combined(table[0]).dictionary_encode(), table[2].to_numpy()
    rows = bundle.feature_rows()
    features = {
        feature.name: _feature(table[3 + n], feature, values.get(feature.name), rows.get(feature.name, 0))
        for n, feature in enumerate(bundle.manifest.features)
    }
    user = encoded.indices.to_numpy().astype(np.int64)
    order = np.lexsort((times, user))  # stable: ties keep the order of the log
    features = {name: take(column, order) for name, column in features.items()}
    offsets = bounds_of(np.bincount(user, minlength=len(encoded.dictionary)))
    histories = Histories(offsets, items[order], times[order].astype(np.int64), features)
    unknown = int((items == UNKNOWN).sum())
    return NewEvents(encoded.dictionary, histories, unknown, rare, bad, digest, forgotten, since)


def _digest(table: pa.Table, forgotten: pa.Array) -> str:
    """Of the events, whatever files they are in, and of who was forgotten."""
    plain = table.combine_chunks().take(pa.array(np.arange(len(table))))  # buffers that hold nothing else
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, plain.schema) as writer:
        writer.write_table(plain)
    digest = hashlib.sha256(sink.getvalue())
    if len(forgotten):
        digest.update(json.dumps(sorted(forgotten.to_pylist())).encode())
    return digest.hexdigest()


def _stored_events(content: Content, path: str, manifest: Manifest, texts: Values) -> tuple[pa.Table, pa.Array]:
    """Events of a Recommender's store, in the order in which they came, and who was forgotten; events before that are
    not among them. It has taken no other events than the dataset's log would have.
    """
    events = [row.event() for row in content.events if row.live]
    columns = {
        _USER: pa.array([event.user_id for event in events], ID_TYPES[manifest.user_id_type]),
        _ITEM: pa.array([event.item_id for event in events], ID_TYPES[manifest.item_id_type]),
        _TIME: pa.array([event.timestamp for event in events], pa.int64()),
        FILE: pa.array([path] * len(events), pa.string()),
        ROW: pa.array(range(len(events)), pa.int64()),
    }
    for feature in manifest.features:
        kind, values = pa.string() if feature.name in texts else pa.int64(), [event.features or {} for event in events]
        found = [given.get(feature.name) for given in values]
        if feature.kind != "id":
            kind = pa.list_(pa.float32()) if feature.kind == "vector" else pa.float64()
        elif feature.multiple:  # one value may stand alone
            kind = pa.list_(kind)
            found = [value if value is None or isinstance(value, list | tuple) else [value] for value in found]
        columns[feature.name] = pa.array(found, kind)
    return pa.table(columns), pa.array([row.user for row in content.forgotten], ID_TYPES[manifest.user_id_type])


def _implausible(database: Database, path: str, manifest: Manifest) -> dict[str, str]:
    """Conditions of times that are implausible. Most of them being so, most likely of another unit, is an error."""
    middle = database.value("SELECT quantile_disc(timestamp, 0.5) FROM log WHERE timestamp >= 0")
    if middle is not None:
        try:
            check_time(middle, manifest.as_of, manifest.time_unit)
        except ValueError as error:
            raise DataError(f"{path}: {error}") from None
    first, _ = bounds(manifest.as_of, manifest.time_unit)
    return {
        "time is too early": f"timestamp >= 0 AND timestamp < {first}",
        "time is in the future": f"timestamp > {last_event(manifest.as_of, manifest.time_unit)}",
    }


def _feature(column: pa.ChunkedArray, feature: Feature, known: dict[str, int] | None, rows: int) -> Column:
    """A missing value is 0, or no values; one that the model has no row for is 0. Of numbers a missing one is nan."""
    if feature.kind == "bucket":
        return buckets(feature, column.to_numpy(zero_copy_only=False).astype(np.float64))
    if feature.kind == "number":
        return column.to_numpy(zero_copy_only=False).astype(np.float32).reshape(-1, 1)
    if feature.kind == "vector":
        rows_of = np.full((len(column), feature.width), np.nan, np.float32)
        there = column.is_valid().to_numpy(zero_copy_only=False)
        rows_of[there] = pc.list_flatten(column).to_numpy().reshape(-1, feature.width)
        return rows_of
    flat = pc.list_flatten(column) if feature.multiple else column
    values: Ints
    if known is not None:
        values = np.array([known.get(value, 0) for value in flat.to_pylist()], np.int64)
    else:
        values = flat.to_numpy().astype(np.int64)
    unknown = values >= rows
    if unknown.any():
        said = "feature column %s has %d values beyond %d, which the model does not know: they count as 0"
        logger.warning(said, feature.name, unknown.sum(), rows - 1)
        values = np.where(unknown, 0, values)
    if not feature.multiple:
        return values
    return Ragged(values, bounds_of(pc.list_value_length(column).to_numpy().astype(np.int64)))
