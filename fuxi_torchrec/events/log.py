"""How a log of events is read: which columns, which rows, and what becomes of them. Part of a dataset and of an export,
so that events that come later are read as those before were.
"""

import json
import re
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Literal

import duckdb

from fuxi_torchrec.events.errors import DataError
from fuxi_torchrec.events.features import Kind
from fuxi_torchrec.events.times import TimeUnit
from fuxi_torchrec.schema import Record

# DuckDB's types that fit into 64 bits, signed
INTEGERS = ("TINYINT", "SMALLINT", "INTEGER", "BIGINT", "UTINYINT", "USMALLINT", "UINTEGER")
OnBadRows = Literal["error", "skip"]


def quote(name: str) -> str:
    """An SQL identifier."""
    return '"' + name.replace('"', '""') + '"'


def literal(text: str) -> str:
    """An SQL string."""
    return "'" + text.replace("'", "''") + "'"


def kind_of(type_: str) -> str:
    """A DuckDB type without the width of integers.

    Example:
        >>> kind_of("INTEGER"), kind_of("UTINYINT[]"), kind_of("DOUBLE")
        ('BIGINT', 'BIGINT[]', 'DOUBLE')
    """
    inner = type_.removesuffix("[]")
    return "BIGINT" + type_[len(inner) :] if inner in INTEGERS else type_


@lru_cache
def columns_of(expression: str) -> tuple[str, ...]:
    """Columns that an SQL expression names; its lambdas' variables are among them.

    Example:
        >>> columns_of("weight > 0 AND lower(action) <> 'buy'")
        ('weight', 'action')
    """
    with duckdb.connect() as connection:
        (row,) = connection.execute("SELECT json_serialize_sql(?)", [f"SELECT {expression}"]).fetchall()
    plan = json.loads(row[0])
    if plan["error"]:
        raise DataError(f"{expression}: {plan['error_message']}")
    found: dict[str, None] = {}

    def walk(node: Any) -> None:
        if isinstance(node, dict):
            if node.get("class") == "COLUMN_REF":
                found[node["column_names"][0]] = None
            node = list(node.values())
        for child in node if isinstance(node, list) else ():
            walk(child)

    walk(plan)
    return tuple(found)


@dataclass(frozen=True)
class LogSpec(Record):
    """How a log is read.

    Attributes:
        user, item, time: SQL expressions of the log's columns, mostly a column's name.
        time_unit: of the times.
        where: SQL condition: other rows are no events.
        target: SQL expression, the event's weight as a target.
        features: columns that are features of events.
        split: of features of text with several values in one: what stands between them.
        kinds: of features that are not ids: ``bucket``, ``number`` or ``vector``.
        buckets: of each ``bucket``, how many its numbers are divided into.
        min_user_events: users with fewer are not in the dataset. It says whom a model is trained on: whoever comes
            later is served.
        min_item_events: items with fewer are rare.
        iterate: filter users and items until nobody has too few, in place of once.
        rare_items: ``drop``: events of rare items are left out; ``unknown``: they stay, with index 0.
        on_bad_rows: ``error``, or ``skip``: they are counted and left out.
        columns: DuckDB's types of the columns that this reads, as they were found; of integers BIGINT.
    """

    user: str = "user_id"
    item: str = "item_id"
    time: str = "timestamp"
    time_unit: TimeUnit = "s"
    where: str | None = None
    target: str | None = None
    features: tuple[str, ...] = ()
    split: dict[str, str] = field(default_factory=dict)
    kinds: dict[str, Kind] = field(default_factory=dict)
    buckets: dict[str, int] = field(default_factory=dict)
    min_user_events: int = 1
    min_item_events: int = 1
    iterate: bool = True
    rare_items: Literal["drop", "unknown"] = "drop"
    on_bad_rows: OnBadRows = "error"
    columns: dict[str, str] = field(default_factory=dict)

    @property
    def drops_rare_items(self) -> bool:
        """Whether an item that the dataset does not have is left out of histories, not part of them as index 0."""
        return self.rare_items == "drop" and self.min_item_events > 1

    def needed(self) -> list[str]:
        """Columns that a log must have, those of conditions aside."""
        expressions = (self.user, self.item, self.time)
        return list(dict.fromkeys([*(name for each in expressions for name in columns_of(each)), *self.features]))

    def __post_init__(self) -> None:
        for name, delimiter in self.split.items():
            if name not in self.features or not delimiter:
                raise ValueError(f"split {name!r} at {delimiter!r}: not a feature, or nothing to split at")

        if odd := sorted((self.kinds.keys() | self.buckets.keys()) - set(self.features)):
            raise ValueError(f"kinds: {', '.join(odd)} is no feature")

    def is_text(self, feature: str) -> bool:
        """Whether the values of a feature are text, with a vocabulary; of a dataset's or an export's spec."""
        return feature not in self.kinds and self.columns[feature].startswith("VARCHAR")

    def is_list(self, feature: str) -> bool:
        """Whether an event has several ids of a feature, likewise."""
        return feature not in self.kinds and (feature in self.split or self.columns[feature].endswith("[]"))

    def read(self) -> list[str]:
        """Columns that are read, if the log has them: those needed, and those of conditions."""
        conditions = [name for each in (self.where, self.target) if each for name in columns_of(each)]
        return list(dict.fromkeys([*self.needed(), *conditions]))

    def read_by_where(self) -> list[str]:
        """The log's columns that ``where`` reads; of a dataset's or an export's spec."""
        return [name for name in columns_of(self.where) if name in self.columns] if self.where else []

    def with_columns(self, user: str | None = None, item: str | None = None, time: str | None = None) -> "LogSpec":
        """The same with other names of columns."""
        changed, columns = self, dict(self.columns)
        for what, name in (("user", user), ("item", item), ("time", time)):
            if name is not None:
                before = columns_of(getattr(self, what))
                if len(before) == 1 and before[0] in columns:
                    columns[name] = columns[before[0]]
                changed = replace(changed, **{what: quote(name)})  # type: ignore[arg-type]
        return replace(changed, columns=columns)


def shown(expression: str) -> str:
    """An expression for messages: a column's name without quotes."""
    return expression[1:-1].replace('""', '"') if re.fullmatch('"([^"]|"")*"', expression) else expression
