"""Items that an export does not have: their rows from their features.

A new item has the row of unknown items plus its features: what training with ``features.id_dropout`` is for.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fuxi_torchrec.events.errors import DataError
from fuxi_torchrec.events.feature_files import RawFeatures, of_records
from fuxi_torchrec.export.bundle import ITEM_TABLE, Bundle, ExportError
from fuxi_torchrec.export.parts import ID_TYPES
from fuxi_torchrec.serving.feature_rows import FeatureRows
from fuxi_torchrec.serving.store import Row


@dataclass(frozen=True)
class AddedItems:
    """What became of items.

    Attributes:
        added: recommendable from now on.
        replaced: that were added before, and have the row of these features now.
        known: that the export has; they stay as they are until a training or an export has them anew.
        unknown_values: of features, that the model has no row for.
    """

    added: int = 0
    replaced: int = 0
    known: int = 0
    unknown_values: int = 0


class ItemComposer:
    """Rows of items from their features alone, as a full export would have them."""

    def __init__(self, bundle: Bundle, tables: Mapping[str, Tensor]) -> None:
        self.manifest, self.file = bundle.manifest, bundle.manifest.item_file
        self.features, self.unknown_row = FeatureRows(bundle, tables, "item"), tables[ITEM_TABLE][:1].clone()

    def read(self, records: Sequence[Mapping[str, Any]]) -> RawFeatures:
        """Items as dictionaries; a ValueError if there is something wrong with one."""
        if not self.manifest.item_features:
            raise ExportError("this export's model reads no features of items: it cannot take new ones")
        kind = ID_TYPES[self.manifest.item_id_type]
        try:
            raw = of_records(self.file, records, kind, "new items")
        except DataError as error:
            raise ValueError(str(error)) from None
        if len(raw.ids.unique()) < len(raw.ids):
            seen: dict[Any, Mapping[str, Any]] = {}
            for record in records:
                if seen.setdefault(record[self.file.id_column], record) != record:
                    raise ValueError(f"new items: {record[self.file.id_column]!r} is there twice, with other features")
            return self.read(list(seen.values()))
        return raw

    def rows(self, raw: RawFeatures) -> tuple[Tensor, int]:
        """(n, D) of items, and how many of their values the model has no row for."""
        rows, unknown = self.features.rows(raw)
        return self.unknown_row + rows, unknown


def latest(rows: Iterable[Row], id_column: str) -> dict[Any, Row]:
    """Of each item the row of what was said last, in the order in which they first came."""
    found: dict[Any, Row] = {}
    for row in rows:
        found[(row.event().features or {}).get(id_column)] = row
    return found
