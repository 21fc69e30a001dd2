"""Which of a few events the condition of an export's log keeps."""

import json
from collections.abc import Sequence
from typing import Any

import duckdb
import pyarrow as pa

from fuxi_torchrec.events.log import LogSpec, columns_of, quote
from fuxi_torchrec.events.times import PER_SECOND
from fuxi_torchrec.serving.requests import Event

_PYTHON: dict[str, type | tuple[type, ...]] = {"BIGINT": int, "DOUBLE": (int, float), "BOOLEAN": bool, "VARCHAR": str}


class LogFilter:
    """``where`` of a log, for events that come one by one.

    What it reads of a log is the event's own user, item, time and features; all other columns come with the event. An
    event may have more columns than that.

    Attributes:
        columns: names and DuckDB's types of the other columns.
    """

    def __init__(self, log: LogSpec) -> None:
        self.log, self._reason = log, f"events are those where {log.where}"
        plain = {"user_id": log.user, "item_id": log.item, "timestamp": log.time}
        read_by = {ours: columns_of(expression) for ours, expression in plain.items()}
        self._own = {names[0]: ours for ours, names in read_by.items() if _is_column(plain[ours], names)}
        read = log.read_by_where()
        self.columns = {name: log.columns[name] for name in read if name not in (*self._own, *log.features)}
        self._features = [name for name in read if name in log.features and name not in self._own]
        columns = ", ".join(f"{self._cast(n, name)} AS {quote(name)}" for n, name in enumerate(read)) or "1"
        self._read = read
        self._query = f"SELECT coalesce(({log.where}), false) FROM (SELECT {columns} FROM given)"
        # an export may be somebody else's: its condition reads the events and no file
        self._connection = duckdb.connect(config={"threads": 1, "enable_external_access": False})

    def _cast(self, number: int, name: str) -> str:
        """A column of the log from the text that stands for it."""
        given, kind = f"column_{number}", self.log.columns[name]
        if self._own.get(name) == "timestamp" and kind != "BIGINT":
            given = f"make_timestamp(CAST({given} AS BIGINT) * {1_000_000 // PER_SECOND[self.log.time_unit]})"
        return f"CAST({f'CAST({given} AS JSON)' if kind.endswith('[]') else given} AS {kind})"

    def check(self, events: Sequence[Event]) -> None:
        """A ValueError that names the event and the column if something is missing or of another type."""
        for n, event in enumerate(events):
            given = event.columns or {}
            for name, kind in self.columns.items():
                if name not in given:
                    raise ValueError(f"event {n}: column {name!r} is missing: {self._reason}")
                if given[name] is not None and not self._fits(given[name], kind):
                    raise ValueError(f"event {n}: column {name!r} must be {kind}, not {given[name]!r}")
            for name in self._features:
                if name not in (event.features or {}):
                    raise ValueError(f"event {n}: feature {name!r} is missing: {self._reason}")

    def _fits(self, value: Any, kind: str) -> bool:
        if kind in _PYTHON:
            fits = isinstance(value, _PYTHON[kind]) and isinstance(value, bool) == (kind == "BOOLEAN")
            return fits and (kind != "BIGINT" or -(2**63) <= int(value) < 2**63)
        cast = "TRY_CAST(TRY_CAST(? AS JSON) AS {})" if kind.endswith("[]") else "TRY_CAST(? AS {})"
        found = self._connection.cursor().execute(f"SELECT {cast.format(kind)} IS NOT NULL", [_text(value)])
        return bool(found.fetchall()[0][0])

    def keep(self, events: Sequence[Event]) -> list[bool]:
        """Of checked events, in one query."""
        if not events:
            return []
        texts = [pa.array([self._value(event, name) for event in events], pa.string()) for name in self._read]
        columns = {f"column_{n}": text for n, text in enumerate(texts)}
        given = pa.table({"row": range(len(events)), **columns})
        with self._connection.cursor() as cursor:
            cursor.register("given", given)
            try:
                return [row[0] for row in cursor.execute(self._query).fetchall()]
            except duckdb.Error as error:
                raise ValueError(f"{self._reason}: {str(error).split(chr(10))[0]}") from None

    def _value(self, event: Event, name: str) -> str | None:
        if name in self._own:
            return _text(getattr(event, self._own[name]))
        return _text(((event.features if name in self._features else event.columns) or {}).get(name))


def _is_column(expression: str, names: Sequence[str]) -> bool:
    return len(names) == 1 and expression in (names[0], quote(names[0]))


def _text(value: Any) -> str | None:
    """As DuckDB reads it."""
    return value if value is None or isinstance(value, str) else json.dumps(value)
