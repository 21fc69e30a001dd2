"""Features of all items, or of all users: a column each, a row per dense index; row 0 is of nobody and has nothing."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from fuxi_torchrec.events.errors import DataError
from fuxi_torchrec.events.features import Feature
from fuxi_torchrec.events.histories import Column, Floats, Ids, Ints, Ragged, bounds_of, stack, take

FILLED = "filled"  # the column that says which rows the file has


def projection_inputs(features: Sequence[Feature], numbers: Mapping[str, Column]) -> Floats:
    """(n, inputs) of numbers and vectors: each standardised, 0 if it is missing, and whether it is.

    Example:
        >>> price = Feature("price", kind="number", width=1, mean=2.0, deviation=4.0)
        >>> projection_inputs([price], {"price": np.array([[4.0], [np.nan]], np.float32)}).tolist()
        [[0.5, 0.0], [0.0, 1.0]]
    """
    parts = []
    for feature in features:
        values = numbers[feature.name]
        assert not isinstance(values, Ragged)
        missing = np.isnan(values).any(1, keepdims=True)
        scaled = (values.astype(np.float32) - np.float32(feature.mean)) / np.float32(feature.deviation)
        parts += [np.where(missing, 0, scaled), missing.astype(np.float32)]
    return np.concatenate(parts, axis=1).astype(np.float32)


@dataclass(frozen=True, eq=False)
class FeatureTable:
    """Values of n rows.

    Attributes:
        features: in the order of the model.
        values: row ids of features that are rows of tables, one or a list for each row.
        numbers: (n, width) of the others; nan where it is missing.
        filled: (n,) which rows have features at all.
    """

    features: tuple[Feature, ...]
    values: dict[str, Ids]
    numbers: dict[str, Floats]
    filled: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.filled)

    @staticmethod
    def empty(features: Sequence[Feature], rows: int) -> "FeatureTable":
        """Rows without features."""
        values: dict[str, Ids] = {}
        for feature in features:
            if feature.multiple:
                values[feature.name] = Ragged(np.zeros(0, np.int64), np.zeros(rows + 1, np.int64))
            elif feature.in_table:
                values[feature.name] = np.zeros(rows, np.int64)
        numbers = {f.name: np.full((rows, f.width), np.nan, np.float32) for f in features if not f.in_table}
        return FeatureTable(tuple(features), values, numbers, np.zeros(rows, bool))

    def take(self, rows: Ints) -> "FeatureTable":
        """Some rows, in the order wanted."""
        values = {name: take(column, rows) for name, column in self.values.items()}
        numbers = {name: column[rows] for name, column in self.numbers.items()}
        return FeatureTable(self.features, values, numbers, self.filled[rows])

    @staticmethod
    def stack(tables: "Sequence[FeatureTable]") -> "FeatureTable":
        """Several of the same features, one after another."""
        first = tables[0]
        return FeatureTable(
            first.features,
            {name: stack([table.values[name] for table in tables]) for name in first.values},
            {name: np.concatenate([table.numbers[name] for table in tables]) for name in first.numbers},
            np.concatenate([table.filled for table in tables]),
        )

    def select(self, features: Sequence[Feature]) -> "FeatureTable":
        """Some features, in the order wanted, with what a model says of them (pooling)."""
        values = {f.name: self.values[f.name] for f in features if f.in_table}
        return FeatureTable(
            tuple(features), values, {f.name: self.numbers[f.name] for f in features if not f.in_table}, self.filled
        )

    def bags(self, name: str) -> Ragged:
        """Row ids of a feature: none of rows without features, one or several of others; 0 is an unknown value."""
        column = self.values[name]
        if isinstance(column, Ragged):
            return column
        return Ragged(column[self.filled], bounds_of(self.filled.astype(np.int64)))

    def inputs(self) -> Floats:
        """(n, inputs) of the projection: every number and vector, standardised, and whether it is missing; all 0 in
        rows without features.
        """
        found = projection_inputs([feature for feature in self.features if not feature.in_table], self.numbers)
        return found * self.filled[:, None].astype(np.float32)

    def to_arrow(self) -> pa.Table:
        """A row per index, from 1."""
        columns: dict[str, pa.Array] = {FILLED: pa.array(self.filled[1:])}
        for feature in self.features:
            if not feature.in_table:
                rows = self.numbers[feature.name][1:]
                flat = pa.array(rows.reshape(-1))
                columns[feature.name] = pa.FixedSizeListArray.from_arrays(flat, feature.width)
                continue
            column = take(self.values[feature.name], np.arange(1, len(self)))
            if isinstance(column, Ragged):
                lists = pa.array(column.bounds, pa.int32()), pa.array(column.values, pa.int32())
                columns[feature.name] = pa.ListArray.from_arrays(*lists)
            else:
                columns[feature.name] = pa.array(column, pa.int32())
        return pa.table(columns)

    @staticmethod
    def from_arrow(table: pa.Table, features: Sequence[Feature], where: str) -> "FeatureTable":
        """Back from :meth:`to_arrow`; ``where`` is for messages."""
        nobody = FeatureTable.empty(features, 1)
        values: dict[str, Ids] = {}
        numbers: dict[str, Floats] = {}
        for feature in features:
            column = table[feature.name].combine_chunks()
            if isinstance(column, pa.ChunkedArray):
                column = pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], column.type)
            if not feature.in_table:
                flat = column.flatten().to_numpy(zero_copy_only=False).astype(np.float32)
                if len(flat) != len(table) * feature.width:
                    raise DataError(f"{where}: {feature.name} has not {feature.width} numbers a row: make it again")
                numbers[feature.name] = flat.reshape(len(table), feature.width)
                continue
            ids = (column.flatten() if feature.multiple else column).to_numpy(zero_copy_only=False).astype(np.int64)
            if len(ids) and not 0 <= ids.min() <= ids.max() < feature.rows:
                raise DataError(f"{where}: {feature.name} has values outside of its {feature.rows} rows: make it again")
            values[feature.name] = ids
            if feature.multiple:
                lengths = pc.fill_null(pc.list_value_length(column), 0).to_numpy(zero_copy_only=False)
                values[feature.name] = Ragged(ids, bounds_of(lengths.astype(np.int64)))
        filled = table[FILLED].to_numpy().astype(bool)
        return FeatureTable.stack([nobody, FeatureTable(tuple(features), values, numbers, filled)])
