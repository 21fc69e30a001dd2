"""Features of events."""

from dataclasses import dataclass
from typing import Literal

from fuxi_torchrec.schema import Record


@dataclass(frozen=True)
class Feature(Record):
    """What belongs to an event beside its item and time: values, each with a row of a table, added to the item's row.

    Attributes:
        name: of the log's column.
        multiple: whether an event has a list of values, not one.
        rows: of the table; row 0 is for unknown values.
        vocabulary: whether raw values are text, with indices of their own.
        pooling: of an event's rows.
        kind, owner: its values are row ids, and belong to an event.
    """

    name: str
    multiple: bool = False
    rows: int = 0
    vocabulary: bool = False
    pooling: Literal["sum", "mean"] = "sum"
    kind: Literal["id"] = "id"
    owner: Literal["event"] = "event"
