"""Columns that are features, as a command line names them."""

from dataclasses import dataclass
from typing import Literal, get_args

from fuxi_torchrec.events.errors import DataError
from fuxi_torchrec.events.features import MOST_BUCKETS, Kind
from fuxi_torchrec.schema import Record

BUCKETS = 16  # by default


@dataclass(frozen=True)
class ColumnSpec(Record):
    """A feature's column, of a log or of a file of features.

    Attributes:
        kind: of the feature; ``display`` is carried to the export and shown, not learned from; None: by the type.
        split: what stands between several ids in one text.
        buckets: how many a number is divided into.
    """

    name: str
    kind: Kind | Literal["display"] | None = None
    split: str | None = None
    buckets: int = BUCKETS

    @staticmethod
    def parse(text: str) -> "ColumnSpec":
        """From a command line: ``NAME``, ``NAME:KIND``, ``NAME:id:|`` or ``NAME:bucket:32``.

        Example:
            >>> ColumnSpec.parse("tags:id:|")
            ColumnSpec(name='tags', kind='id', split='|', buckets=16)
            >>> ColumnSpec.parse("price:bucket:8").buckets
            8
            >>> ColumnSpec.parse("price:log")
            Traceback (most recent call last):
            ...
            fuxi_torchrec.events.errors.DataError: price:log: a kind is id, bucket, number, vector or display, not 'log'
        """
        name, _, rest = text.partition(":")
        kind, _, more = rest.partition(":")
        kinds = (*get_args(Kind), "display")
        if not name or "." in name or "/" in name:
            why = "a name with a dot or a slash cannot be that of a table: rename the column"
            raise DataError(f"feature column {name!r}: {why if name else 'it has no name'}")
        if kind and kind not in kinds:
            raise DataError(f"{text}: a kind is {', '.join(kinds[:-1])} or {kinds[-1]}, not {kind!r}")
        buckets = BUCKETS
        if more and kind == "bucket":
            if not more.isdecimal() or not 2 <= int(more) <= MOST_BUCKETS:
                raise DataError(f"{text}: buckets are 2 to {MOST_BUCKETS}, not {more!r}")
            buckets = int(more)
        elif more and kind != "id":
            raise DataError(f"{text}: {more!r} says nothing of a {kind}")
        return ColumnSpec(name, kind or None, more if kind == "id" and more else None, buckets)  # type: ignore[arg-type]
