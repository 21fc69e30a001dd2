"""Raw item ids, and values of features, and dense indices, both ways."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from fuxi_torchrec.events import parquet
from fuxi_torchrec.events.errors import DataError

UNKNOWN = 0
COLUMNS = ("item_id", "index", "count")


class Vocabulary:
    """Items 1 .. n, as an ``items.parquet`` has them; index 0 is an unknown item.

    Args:
        raw: (n,) raw ids, integers or strings, in the order of their indices.
        counts: (n,) events of each item.
    """

    def __init__(self, raw: pa.Array, counts: NDArray[np.int64]) -> None:
        self.ids, self.counts = raw, counts

    @staticmethod
    def read(path: str) -> "Vocabulary":
        return Vocabulary.of(parquet.read_table(path, COLUMNS), path)

    @staticmethod
    def of(table: pa.Table, path: str) -> "Vocabulary":
        """Of the table in a file, whose name is for messages."""
        index = table["index"].to_numpy()
        if not np.array_equal(index, np.arange(1, len(index) + 1)):
            raise DataError(f"{path}: indices must be 1, 2, 3, ... in order")
        return Vocabulary(table["item_id"].combine_chunks(), table["count"].to_numpy())

    def __len__(self) -> int:
        return len(self.ids)

    def index(self, raw: Sequence[Any] | NDArray[Any] | pa.Array) -> NDArray[np.int64]:
        """Indices of raw ids, 0 for unknown ones."""
        try:
            values = pa.array(raw, type=self.ids.type)
        except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
            raise DataError(f"item ids must be {self.ids.type}, as in the dataset: {error}") from None
        found = pc.index_in(values, value_set=self.ids)
        return pc.fill_null(pc.add(found, 1), UNKNOWN).to_numpy(zero_copy_only=False).astype(np.int64)

    def raw(self, index: Sequence[int] | NDArray[np.int64]) -> list[Any]:
        """Raw ids of indices 1 .. n; None for 0."""
        places = np.asarray(index, dtype=np.int64)
        if len(places) and (places.min() < 0 or places.max() > len(self)):
            raise DataError(f"item indices must be 0 to {len(self)}, not {places.min()} to {places.max()}")
        found: list[Any] = self.ids.take(pa.array(places - 1, mask=places == UNKNOWN)).to_pylist()
        return found
