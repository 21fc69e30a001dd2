"""Rows of features of items, or of users, from an export's tables: as a training looks them up."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import Tensor

from fuxi_torchrec.events.database import Database
from fuxi_torchrec.events.errors import DataError
from fuxi_torchrec.events.feature_files import RawFeatures, read_features
from fuxi_torchrec.events.feature_learning import encode
from fuxi_torchrec.events.features import Feature, Owner
from fuxi_torchrec.events.histories import Ids, Ragged
from fuxi_torchrec.export.bundle import USER_ROWS, Bundle, ExportError, projection_name, values_folder
from fuxi_torchrec.export.parts import ID_TYPES, combined, read_rows, read_table
from fuxi_torchrec.serving.requests import UserId


def projection_of(bundle: Bundle, tables: Mapping[str, Tensor], owner: Owner) -> Tensor | None:
    """(D, inputs) of an owner's numbers and vectors; None if there are none."""
    name, features = projection_name(owner), bundle.manifest.features_of(owner)
    found, inputs = tables.get(name), sum(feature.inputs for feature in features)
    if inputs and (found is None or tuple(found.shape) != (bundle.manifest.dimension, inputs)):
        raise ExportError(f"{bundle.path}: {name} does not take the {owner}s' numbers: export again")
    return found


class FeatureRows:
    """Features of items, or of users, to rows.

    Args:
        tables: of the export.
        owner: whose features.
    """

    def __init__(self, bundle: Bundle, tables: Mapping[str, Tensor], owner: Owner) -> None:
        manifest = bundle.manifest
        self.features, self.dimension = manifest.features_of(owner), manifest.dimension
        self.tables = {f.name: tables[f"{owner}_feature_{f.name}"] for f in self.features if f.in_table}
        self.projection = projection_of(bundle, tables, owner)
        self.values: dict[str, pa.Array] = {}
        for feature in self.features:
            if feature.vocabulary:
                table = read_table(bundle.file(f"{values_folder(owner)}/{feature.name}.parquet"), ["value", "index"])
                self.values[feature.name] = combined(table["value"])
                if len(table) >= feature.rows or len(self.tables[feature.name]) != feature.rows:
                    raise ExportError(
                        f"{bundle.path}: {feature.name} has {len(table)} values and {feature.rows} rows: export again"
                    )

    def rows(self, raw: RawFeatures) -> tuple[Tensor, int]:
        """(n, D) of the features of each, and how many of their values the model has no row for."""
        try:
            encoded = encode(raw, self.features, self.values)
        except DataError as error:
            raise ValueError(str(error)) from None
        rows = torch.zeros(len(raw.ids), self.dimension)
        for feature in self.features:
            if feature.in_table:
                rows += pooled_rows(self.tables[feature.name], encoded.table.values[feature.name], feature)
        if self.projection is not None:
            rows += torch.from_numpy(encoded.table.inputs()) @ self.projection.T
        return rows, sum(encoded.unknown.values())


def pooled_rows(table: Tensor, column: Ids, feature: Feature) -> Tensor:
    """(n, D) rows of a feature's values; of several, their sum or mean."""
    if not isinstance(column, Ragged):
        return table[torch.from_numpy(column)]
    lengths = torch.from_numpy(np.diff(column.bounds))
    owner = torch.repeat_interleave(torch.arange(len(column)), lengths)
    pooled = table.new_zeros(len(column), table.shape[1]).index_add_(0, owner, table[torch.from_numpy(column.values)])
    return pooled / lengths.clamp(min=1).unsqueeze(1) if feature.pooling == "mean" else pooled


def read_file(bundle: Bundle, path: str | Path, owner: Owner) -> RawFeatures:
    """A Parquet or CSV file of new items, or of users with other features, read as the dataset's file was."""
    manifest = bundle.manifest
    file, kind = (
        (manifest.item_file, manifest.item_id_type) if owner == "item" else (manifest.user_file, manifest.user_id_type)
    )
    if not manifest.features_of(owner):
        raise ExportError(f"{bundle.path}: this export's model reads no features of {owner}s: it cannot take any")
    with Database(in_memory=True) as database:
        raw = read_features(database, str(path), file.id_column, file.columns)
    if raw.ids.type != ID_TYPES[kind]:
        raise ExportError(f"{raw.where}: {file.id_column} is {raw.ids.type}, the export's {owner}s are {kind}")
    return raw


class UserRows:
    """What features of users add to the encoder's output, by raw id; nothing of users that have none.

    Args:
        ids: each once.
        rows: (n, D) of these.
    """

    def __init__(self, ids: pa.Array, rows: Tensor) -> None:
        self.ids, self.table = ids, rows
        self._row: dict[UserId, int] = {user: n for n, user in enumerate(ids.to_pylist())}
        if len(self._row) != len(ids):
            raise ExportError(f"{USER_ROWS}: a user is in it twice: export again")

    @staticmethod
    def read(bundle: Bundle) -> "UserRows | None":
        """None if the model reads no features of users."""
        manifest = bundle.manifest
        if not manifest.user_features:
            return None
        parts = [read_rows(path, manifest.dimension) for path in bundle.parts(USER_ROWS)]
        ids = pa.concat_arrays([pa.array([], ID_TYPES[manifest.user_id_type]), *(ids for ids, _ in parts)])
        return UserRows(ids, torch.cat([torch.zeros(0, manifest.dimension), *(rows for _, rows in parts)]))

    def of(self, users: Sequence[UserId | None]) -> Tensor:
        """(B, D), 0 of users without features; None is nobody."""
        place = [-1 if user is None else self._row.get(user, -1) for user in users]
        found = torch.zeros(len(users), self.table.shape[1])
        there = [n for n, row in enumerate(place) if row >= 0]
        found[there] = self.table[[place[n] for n in there]]
        return found

    def without(self, users: pa.Array) -> "UserRows":
        """The same without some users."""
        kept = np.flatnonzero(~pc.is_in(self.ids, value_set=users).to_numpy(zero_copy_only=False))
        return UserRows(self.ids.take(pa.array(kept)), self.table[torch.from_numpy(kept)])

    def updated(self, ids: pa.Array, rows: Tensor) -> "UserRows":
        """With other rows of some users, or more users."""
        rest = self.without(ids)
        return UserRows(pa.concat_arrays([rest.ids, ids]), torch.cat([rest.table, rows]))
