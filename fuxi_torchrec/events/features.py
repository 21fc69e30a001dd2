"""Features of events."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Feature:
    """What belongs to an event beside its item and time: values, each with a row of a table, added to the item's row.

    Attributes:
        name: of the log's column.
        multiple: whether an event has a list of values, not one.
        rows: values are below it; 0 is "a value I do not know".
        vocabulary: whether raw values are text, with indices of their own.
        pooling: of an event's rows.
        kind: of the values: ``id``, rows of a table.
        owner: whose it is: the ``event``'s.
    """

    name: str
    multiple: bool = False
    rows: int = 0
    vocabulary: bool = False
    pooling: Literal["sum", "mean"] = "sum"
    kind: Literal["id"] = "id"
    owner: Literal["event"] = "event"
