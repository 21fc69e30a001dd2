"""A log's files to events, as SQL: the same columns, types, conditions and bad rows for whoever reads one."""

from collections.abc import Mapping
from dataclasses import replace

from fuxi_torchrec.events.database import Database
from fuxi_torchrec.events.errors import DataError
from fuxi_torchrec.events.log import INTEGERS, kind_of, literal, quote, shown
from fuxi_torchrec.events.sources import FILE, ROW, Source
from fuxi_torchrec.events.times import NAMES, last_time, likely_unit, year_of
from fuxi_torchrec.logging import get_logger

logger = get_logger(__name__)

FEATURE = "feature_"  # before names of features, one of which may be "n" or "target"
NUMBERS = ("FLOAT", "DOUBLE", "HUGEINT", "UBIGINT")
_SAMPLE = 10_000  # rows
_TIMESTAMP = {"s": "epoch", "ms": "epoch_ms", "us": "epoch_us"}


class Ingestion:
    """A log in a database.

    The view or table ``log`` has a row for every row that the log's condition keeps: user_id, item_id, timestamp,
    target if there is one, feature_NAME, source_file, and n, the order in which events were read: it decides ties.
    :meth:`check_rows` adds ``events``, without source_file and bad rows.

    Args:
        database: where.
        source: the log. Types of columns that its spec names are those that the log gets.
        keep: read the files once and keep the rows in the database; else Parquet is read again by each query. The
            spec may then be somebody else's: what it says is done to these rows, where no file can be read or written.

    Attributes:
        spec: the source's, with the types found.
        first, last: times of the log, None without rows; after :meth:`check_rows`.
    """

    def __init__(self, database: Database, source: Source, keep: bool = False) -> None:
        self.database, self.source = database, source
        self._name = database.about = source.files[0]
        found = {row[0]: row[1] for row in database.rows(f"DESCRIBE SELECT * FROM {source.reader}")}
        self._numbered = ROW in found
        for ours in (FILE, ROW):
            found.pop(ours, None)
        missing = [name for name in source.log.needed() if name not in found]
        if missing:
            raise DataError(f"{self._name}: no column {', '.join(missing)}; the columns are {', '.join(found)}")
        if keep:
            read = {*source.log.read(), *source.log.columns}
            names = [*(quote(name) for name in found if name in read), FILE, *([ROW] if self._numbered else [])]
            database.rows(f"CREATE TABLE kept AS SELECT {', '.join(names)} FROM {source.reader}")
            database.rows("SET enable_external_access = false")
            self.source = source = replace(source, reader="kept")
        reader, types = self._typed(found)
        self.spec = replace(source.log, columns=types)
        self.first: int | None = None
        self.last: int | None = None
        columns = [*self._columns(reader), f"{FILE} AS source_file", f"{ROW} AS n"]
        where = f" WHERE {source.log.where}" if source.log.where else ""
        # Parquet numbers its rows itself; text is parsed once and numbered then
        if not self._numbered:
            reader = f"(SELECT *, row_number() OVER () AS {ROW} FROM {reader})"
        kind = "TABLE" if keep or not self._numbered else "VIEW"
        database.rows(f"CREATE {kind} log AS SELECT {', '.join(columns)} FROM {reader}{where}")

    def _typed(self, found: dict[str, str]) -> tuple[str, dict[str, str]]:
        """The reader with the types that the spec has written down, and those of all columns that it reads."""
        log, casts = self.source.log, []
        types = {name: kind_of(found[name]) for name in log.read() if name in found}
        for name, wanted in log.columns.items():
            kind = types.get(name, wanted)
            plain = kind != "VARCHAR" and wanted != "VARCHAR"
            if kind == wanted or (plain and (name not in log.features or name in log.kinds)):
                continue
            if kind == "VARCHAR":  # so is a CSV column without values
                self._check_text(name, wanted)
            elif kind not in INTEGERS or wanted != "VARCHAR":
                what = f"column {name} is {found[name]}: it must be {wanted}, as in the dataset's log"
                raise DataError(f"{self._name}: {what}")
            casts.append(f"CAST({quote(name)} AS {wanted}) AS {quote(name)}")
            types[name] = wanted
        reader = f"(SELECT * REPLACE ({', '.join(casts)}) FROM {self.source.reader})" if casts else self.source.reader
        return reader, types

    def _check_text(self, name: str, wanted: str) -> None:
        column = quote(name)
        other = self.database.rows(
            f"SELECT {column} FROM {self.source.reader} "
            f"WHERE {column} IS NOT NULL AND TRY_CAST({column} AS {wanted}) IS NULL LIMIT 1"
        )
        if other:
            what = f"column {name} is VARCHAR, for example {other[0][0]!r}: in the dataset's log it is {wanted}"
            raise DataError(f"{self._name}: {what}")

    def _columns(self, reader: str) -> list[str]:
        log = self.source.log
        described = self.database.rows(f"DESCRIBE SELECT {log.user}, {log.item}, {log.time} FROM {reader}")
        user, item, time = (row[1] for row in described)
        for what, kind in ((log.user, user), (log.item, item)):
            if kind not in (*INTEGERS, "VARCHAR"):
                allowed = "integers of at most 64 bits, signed, or text"
                raise DataError(f"{self._name}: column {shown(what)} is {kind}: ids must be {allowed}")
        columns = [f"{log.user} AS user_id", f"{log.item} AS item_id", f"{self._time(time, reader)} AS timestamp"]
        if log.target:
            columns.append(f"CAST({log.target} AS FLOAT) AS target")
        return columns + [f"{self._feature(name)} AS {quote(FEATURE + name)}" for name in log.features]

    def _time(self, kind: str, reader: str) -> str:
        """Times in the unit: integers are in it already."""
        time, unit = self.source.log.time, self.source.log.time_unit
        if kind in (*INTEGERS, "UBIGINT"):
            return f"CAST({time} AS BIGINT)"
        if kind.startswith("TIMESTAMP") or kind == "DATE":
            return f"CAST(floor({_TIMESTAMP[unit]}({time})) AS BIGINT)"
        example = self.database.rows(f"SELECT {time} FROM {reader} LIMIT 1")
        if not example:
            raise DataError(f"{self._name}: no events")
        raise DataError(
            f"{self._name}: column {shown(time)} is {kind}, for example {example[0][0]!r}: times must be integers "
            "(seconds, milliseconds or microseconds since 1970) or timestamps; mixed kinds count as VARCHAR"
        )

    def _feature(self, name: str) -> str:
        """Values of a feature: text or null, an integer, 0 if it is missing, or a list without nulls."""
        kind, column = self.spec.columns[name], quote(name)
        if (wanted := self.spec.kinds.get(name)) is not None:
            inner, is_list = kind.removesuffix("[]").partition("[")[0], kind.endswith("]")
            number = inner == "BIGINT" or inner in NUMBERS or inner.startswith("DECIMAL")
            if not number or is_list != (wanted == "vector"):
                raise DataError(f"{self._name}: column {name} is {kind}: that is no feature of kind {wanted}")
            return f"CAST({column} AS {'FLOAT[]' if is_list else 'DOUBLE'})"
        if name in self.spec.split:
            if kind != "VARCHAR":
                raise DataError(f"{self._name}: feature column {name} is {kind}: only text can be split")
            values = f"list_transform(string_split({column}, {literal(self.spec.split[name])}), lambda x: trim(x))"
            return f"coalesce(list_filter({values}, lambda x: x <> ''), [])"
        if kind == "VARCHAR":
            return column
        if kind == "VARCHAR[]":
            return f"coalesce(list_filter({column}, lambda x: x IS NOT NULL), [])"
        if kind == "BIGINT":
            return f"CAST(coalesce({column}, 0) AS BIGINT)"
        if kind == "BIGINT[]":
            return f"coalesce(list_filter(CAST({column} AS BIGINT[]), lambda x: x IS NOT NULL), [])"
        raise DataError(
            f"{self._name}: feature column {name} is {kind}: an id is text or an integer, or a list of them; say "
            f"{name}:number, {name}:bucket or {name}:vector of numbers"
        )

    def check_unit(self) -> None:
        """An error if the log's times, by its first rows, are most likely of another unit."""
        first, unit = f"SELECT timestamp FROM log LIMIT {_SAMPLE}", self.spec.time_unit
        middle = self.database.value(f"SELECT quantile_disc(timestamp, 0.5) FROM ({first})")
        other = None if middle is None else likely_unit(middle, unit)
        if other is not None:
            raise DataError(
                f"{self._name}: times look like {NAMES[other]}: {middle} in {NAMES[unit]} would be in the year "
                f"{year_of(middle, unit)}. Say --time-unit {other}, or insist with --accept-times"
            )

    def widths(self) -> dict[str, int]:
        """Elements of each vector, by its first event that has one; none of one that nobody has."""
        found: dict[str, int] = {}
        for name in (name for name, kind in self.spec.kinds.items() if kind == "vector"):
            column = quote(FEATURE + name)
            rows = self.database.rows(f"SELECT len({column}) FROM log WHERE {column} IS NOT NULL ORDER BY n LIMIT 1")
            if rows:
                found[name] = int(rows[0][0])
        return found

    def check_rows(
        self, more: Mapping[str, str] | None = None, widths: Mapping[str, int] | None = None
    ) -> dict[str, int]:
        """Count bad rows by reason; name the first ones, or leave them out.

        Args:
            more: reasons of the caller's own, with their conditions on columns of ``log``.
            widths: elements that vectors must have; those of the log's first by default.
        """
        widths = {**self.widths(), **(widths or {})}
        last = last_time(self.spec.time_unit)
        conditions = {  # these five are told by Parquet's metadata
            "user is null": "user_id IS NULL",
            "item is null": "item_id IS NULL",
            "time is null": "timestamp IS NULL",
            "time is negative": "timestamp < 0",
            "time is after the year 2200": f"timestamp > {last}",
        }
        if self.spec.target:
            bad = "target IS NULL OR target < 0 OR NOT isfinite(target)"
            conditions["target weight is null, negative or not finite"] = bad
        for name in self.spec.features:
            column = quote(FEATURE + name)
            if (kind := self.spec.kinds.get(name)) is not None:
                value = f"list_sum({column})" if kind == "vector" else column  # null is missing
                odd = (
                    f" OR len({column}) <> {widths[name]} OR list_count({column}) < len({column})"
                    if name in widths
                    else ""
                )
                said = f"feature {name} is not finite" + (f", or no {widths[name]} elements" if odd else "")
                conditions[said] = f"coalesce(NOT isfinite({value}){odd}, false)"
            elif not self.spec.is_text(name):
                value = f"list_min({column})" if self.spec.is_list(name) else column
                conditions[f"feature {name} is negative"] = f"coalesce({value}, 0) < 0"
        conditions |= more or {}
        every = " OR ".join(f"({condition})" for condition in conditions.values())
        # Parquet answers this from its metadata
        rows, *numbers, self.first, self.last = self.database.row(
            "SELECT count(*), count(user_id), count(item_id), count(timestamp), min(timestamp), max(timestamp) FROM log"
        )
        skipped = {}
        plausible = self.first is None or self.last is None or (self.first >= 0 and self.last <= last)
        if len(conditions) > 5 or min(numbers) < rows or not plausible:
            bad = ", ".join(f"count(*) FILTER (WHERE {condition})" for condition in conditions.values())
            found = zip(conditions, self.database.row(f"SELECT {bad} FROM log"), strict=True)
            skipped = {reason: int(count) for reason, count in found if count}
        where = f" WHERE NOT coalesce(({every}), true)" if skipped else ""
        self.database.rows(f"CREATE VIEW events AS SELECT * EXCLUDE (source_file) FROM log{where}")
        if not plausible:
            self.first, self.last = self.database.row("SELECT min(timestamp), max(timestamp) FROM events")
        if skipped:
            lines = "; ".join(f"{count:,} rows: {reason}" for reason, count in skipped.items())
            if self.spec.on_bad_rows == "error":
                raise DataError(
                    f"bad rows: {lines}. {self._first_bad_rows(every, conditions)}. Mend the log, or leave them out "
                    "with --on-bad-rows skip"
                )
            logger.warning("bad rows left out: %s", lines)
        return skipped

    def _first_bad_rows(self, every: str, conditions: dict[str, str]) -> str:
        """File, row and reason of the first bad rows; rows count from 1 within their file."""
        if self._numbered:
            row, firsts = f"n % {self.source.rows_per_file} + 1", "SELECT DISTINCT source_file FROM log"
        else:
            numbered = f"SELECT {FILE} AS source_file, row_number() OVER () AS row FROM {self.source.reader}"
            row, firsts = "n - first + 1", f"SELECT source_file, min(row) AS first FROM ({numbered}) GROUP BY 1"
        case = " ".join(f"WHEN {condition} THEN {literal(reason)}" for reason, condition in conditions.items())
        rows = self.database.rows(
            f"SELECT source_file, {row}, CASE {case} END "
            f"FROM (SELECT * FROM log WHERE {every} ORDER BY n LIMIT 3) "
            f"JOIN ({firsts}) USING (source_file) ORDER BY n"
        )
        return "First: " + "; ".join(f"{name} row {row}: {reason}" for name, row, reason in rows)
