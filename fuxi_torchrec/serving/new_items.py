"""Items that an export does not have: their rows from their features.

A new item has the row of unknown items plus its features: what training with ``features.id_dropout`` is for.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from fuxi_torchrec.events.errors import DataError
from fuxi_torchrec.events.feature_files import RawFeatures, of_records
from fuxi_torchrec.events.feature_learning import encode
from fuxi_torchrec.events.features import Feature
from fuxi_torchrec.events.histories import Column, Ragged
from fuxi_torchrec.export.bundle import ITEM_FEATURES, ITEM_PROJECTION, ITEM_TABLE, Bundle, ExportError
from fuxi_torchrec.export.parts import ID_TYPES, combined, read_table
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
        self.manifest, self.features = bundle.manifest, bundle.manifest.item_features
        self.file, self.unknown_row = bundle.manifest.item_file, tables[ITEM_TABLE][:1].clone()
        self.tables = {f.name: tables[f"item_feature_{f.name}"] for f in self.features if f.in_table}
        self.projection = tables.get(ITEM_PROJECTION)
        inputs = sum(feature.inputs for feature in self.features)
        if inputs and (self.projection is None or tuple(self.projection.shape) != (self.unknown_row.shape[1], inputs)):
            raise ExportError(f"{bundle.path}: {ITEM_PROJECTION} does not take the items' numbers: export again")
        self.values: dict[str, pa.Array] = {}
        for feature in self.features:
            if feature.vocabulary:
                table = read_table(bundle.file(f"{ITEM_FEATURES}/{feature.name}.parquet"), ["value", "index"])
                self.values[feature.name] = combined(table["value"])
                if len(table) >= feature.rows + 1 or len(self.tables[feature.name]) != feature.rows:
                    raise ExportError(
                        f"{bundle.path}: {feature.name} has {len(table)} values and {feature.rows} rows: export again"
                    )

    def read(self, records: Sequence[Mapping[str, Any]]) -> RawFeatures:
        """Items as dictionaries; a ValueError if there is something wrong with one."""
        if not self.features:
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
        try:
            encoded = encode(raw, self.features, self.values)
        except DataError as error:
            raise ValueError(str(error)) from None
        rows = self.unknown_row.repeat(len(raw.ids), 1)
        for feature in self.features:
            if feature.in_table:
                rows += pooled_rows(self.tables[feature.name], encoded.table.values[feature.name], feature)
        if self.projection is not None:
            rows += torch.from_numpy(encoded.table.inputs()) @ self.projection.T
        return rows, sum(encoded.unknown.values())


def pooled_rows(table: Tensor, column: Column, feature: Feature) -> Tensor:
    """(n, D) rows of a feature's values; of several, their sum or mean."""
    if not isinstance(column, Ragged):
        return table[torch.from_numpy(column)]
    lengths = torch.from_numpy(np.diff(column.bounds))
    owner = torch.repeat_interleave(torch.arange(len(column)), lengths)
    pooled = table.new_zeros(len(column), table.shape[1]).index_add_(0, owner, table[torch.from_numpy(column.values)])
    return pooled / lengths.clamp(min=1).unsqueeze(1) if feature.pooling == "mean" else pooled


def latest(rows: Iterable[Row], id_column: str) -> dict[Any, Row]:
    """Of each item the row of what was said last, in the order in which they first came."""
    found: dict[Any, Row] = {}
    for row in rows:
        found[(row.event().features or {}).get(id_column)] = row
    return found
