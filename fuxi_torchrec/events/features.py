"""What belongs to an event, an item or a user beside ids and times: one description for all of them."""

import math
from dataclasses import dataclass
from typing import Literal

from fuxi_torchrec.schema import Record

Kind = Literal["id", "bucket", "number", "vector"]
Owner = Literal["event", "item", "user"]
OWNERS: tuple[Owner, ...] = ("event", "item", "user")
MOST_BUCKETS, MOST_WIDTH = 2**16, 2**14


@dataclass(frozen=True)
class Feature(Record):
    """A feature: an ``id`` or a ``bucket`` is a row of a table, or several; a ``number`` or a ``vector`` is projected.

    Attributes:
        name: of the log's or the file's column.
        multiple: whether there is a list of values, not one.
        rows: of the table; row 0 is for unknown values. 0 if there is no table.
        vocabulary: whether raw values have indices of their own; else they are row ids.
        pooling: of several rows.
        owner: whose it is.
        width: elements of a vector, 1 of a number.
        boundaries: of a bucket: value v is in bucket 1 + the number of boundaries that are at most v.
        mean, deviation: of a number in training data, by which it is standardised.
    """

    name: str
    multiple: bool = False
    rows: int = 0
    vocabulary: bool = False
    pooling: Literal["sum", "mean"] = "sum"
    kind: Kind = "id"
    owner: Owner = "event"
    width: int = 0
    boundaries: tuple[float, ...] = ()
    mean: float = 0.0
    deviation: float = 1.0

    def __post_init__(self) -> None:
        if not all(math.isfinite(value) for value in (self.mean, self.deviation, *self.boundaries)):
            raise ValueError(f"feature {self.name}: statistics must be finite")
        if self.deviation <= 0:
            raise ValueError(f"feature {self.name}: deviation must be positive, not {self.deviation}")
        if any(a >= b for a, b in zip(self.boundaries, self.boundaries[1:], strict=False)):
            raise ValueError(f"feature {self.name}: boundaries must rise")
        if self.kind == "bucket" and self.rows < len(self.boundaries) + 2:
            raise ValueError(
                f"feature {self.name}: {self.rows} rows for {len(self.boundaries) + 1} buckets and unknown"
            )
        if self.in_table != (self.width == 0) or not 0 <= self.width <= MOST_WIDTH:
            raise ValueError(f"feature {self.name}: width = {self.width} does not fit a feature of kind {self.kind}")
        if self.multiple and not self.kind == "id":
            raise ValueError(f"feature {self.name}: only ids can be several, not a {self.kind}")

    @property
    def in_table(self) -> bool:
        """Whether its values are rows of a table."""
        return self.kind in ("id", "bucket")

    @property
    def inputs(self) -> int:
        """Columns of the projection: its elements, and whether it is missing."""
        return self.width + 1 if self.width else 0
