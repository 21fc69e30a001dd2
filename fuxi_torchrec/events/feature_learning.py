"""What is learned of a file of features (vocabularies, quantiles, statistics), and its rows as a model reads them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from fuxi_torchrec.events.columns import ColumnSpec
from fuxi_torchrec.events.errors import DataError
from fuxi_torchrec.events.feature_files import RawFeatures
from fuxi_torchrec.events.feature_table import FeatureTable
from fuxi_torchrec.events.features import Feature, Owner
from fuxi_torchrec.events.histories import Floats, Ids, Ints, Ragged, bounds_of


@dataclass(frozen=True)
class Learned:
    """What prepare learns of a file: the features, and values of ids by name, in the order of their indices."""

    features: tuple[Feature, ...]
    values: dict[str, pa.Array] = field(default_factory=dict)


def learn(raw: RawFeatures, rows: NDArray[np.bool_], owner: Owner, before: Learned | None = None) -> Learned:
    """Vocabularies by falling count, quantiles, means and deviations, of the rows that are training data.

    Args:
        before: of a dataset that is extended: vocabularies grow behind its values, statistics and boundaries stay.
    """
    old = {} if before is None else {feature.name: feature for feature in before.features}
    features, values = [], dict[str, pa.Array]()
    chosen = pa.array(np.flatnonzero(rows))
    for spec in raw.file.learned:
        column, was = raw.columns[spec.name].take(chosen), old.get(spec.name)
        if was is not None and was.kind != spec.kind:
            raise DataError(
                f"{raw.where}: {spec.name} was a {was.kind} in the dataset that is extended, not {spec.kind}"
            )
        if spec.kind == "id":
            several = pa.types.is_list(column.type) or pa.types.is_large_list(column.type)
            known = None if before is None or was is None else before.values[spec.name]
            values[spec.name] = _vocabulary(column.flatten() if several else column, known)
            size = len(values[spec.name]) + 1
            features.append(Feature(spec.name, several, size, True, owner=owner))
            if was is not None and was.multiple != several:
                raise DataError(f"{raw.where}: {spec.name} has one value in one dataset, and lists in the other")
        elif was is not None:
            _check_width(raw, spec, was)
            features.append(was)
        else:
            features.append(_statistics(spec, column, owner, raw.where))
    return Learned(tuple(features), values)


def _vocabulary(column: pa.Array, known: pa.Array | None) -> pa.Array:
    counted = pc.value_counts(column.drop_null())
    pairs = zip(counted.field("values").to_pylist(), counted.field("counts").to_pylist(), strict=True)
    order = [value for value, _ in sorted(pairs, key=lambda pair: (-pair[1], pair[0]))]
    if known is None:
        return pa.array(order, pa.string())
    there = set(known.to_pylist())
    return pa.array([*known.to_pylist(), *(value for value in order if value not in there)], pa.string())


def _statistics(spec: ColumnSpec, column: pa.Array, owner: Owner, where: str) -> Feature:
    if spec.kind == "vector":
        lengths = pc.list_value_length(column).drop_null()
        if not len(lengths):
            raise DataError(f"{where}: {spec.name}: no row of the training data has a vector")
        return Feature(spec.name, kind="vector", owner=owner, width=int(lengths[0].as_py()))
    numbers = column.drop_null().to_numpy(zero_copy_only=False).astype(np.float64)
    if not len(numbers):
        raise DataError(f"{where}: {spec.name}: no row of the training data has a number")
    if spec.kind == "bucket":
        cuts = np.quantile(numbers, np.arange(1, spec.buckets) / spec.buckets, method="inverted_cdf")
        cuts = np.unique(cuts)
        cuts = cuts[cuts > numbers.min()]
        boundaries = tuple(cuts.tolist())
        return Feature(spec.name, rows=len(boundaries) + 2, kind="bucket", owner=owner, boundaries=boundaries)
    deviation = float(numbers.std())
    return Feature(
        spec.name, kind="number", owner=owner, width=1, mean=float(numbers.mean()), deviation=deviation or 1.0
    )


def _check_width(raw: RawFeatures, spec: ColumnSpec, feature: Feature) -> None:
    if spec.kind == "vector":
        for width in pc.unique(pc.list_value_length(raw.columns[spec.name]).drop_null()).to_pylist():
            if width != feature.width:
                raise DataError(f"{raw.where}: {spec.name} has {width} elements, before it had {feature.width}")


@dataclass(frozen=True)
class Encoded:
    """Rows of a file as a model reads them, and how many values of each feature its vocabulary lacks."""

    table: FeatureTable
    unknown: dict[str, int]


def encode(raw: RawFeatures, features: Sequence[Feature], values: Mapping[str, pa.Array]) -> Encoded:
    """A row for each row of the file."""
    columns: dict[str, Ids] = {}
    numbers: dict[str, Floats] = {}
    unknown = {}
    specs = {spec.name: spec for spec in raw.file.columns}
    for feature in features:
        column = raw.columns[feature.name]
        _check_width(raw, specs[feature.name], feature)
        if feature.kind == "vector":
            rows = np.full((len(column), feature.width), np.nan, np.float32)
            flat = column.flatten().to_numpy(zero_copy_only=False).astype(np.float32)
            rows[column.is_valid().to_numpy(zero_copy_only=False)] = flat.reshape(-1, feature.width)
            numbers[feature.name] = rows
        elif feature.kind == "number":
            numbers[feature.name] = column.to_numpy(zero_copy_only=False).astype(np.float32).reshape(-1, 1)
        elif feature.kind == "bucket":
            columns[feature.name] = buckets(feature, column.to_numpy(zero_copy_only=False).astype(np.float64))
        else:
            columns[feature.name], unknown[feature.name] = _indices(column, feature, values[feature.name])
    table = FeatureTable(tuple(features), columns, numbers, np.ones(len(raw.ids), bool))
    return Encoded(table, {name: count for name, count in unknown.items() if count})


def buckets(feature: Feature, numbers: NDArray[np.float64]) -> Ints:
    """The bucket of each number, 0 if it is nan.

    Example:
        >>> feature = Feature("price", rows=4, kind="bucket", boundaries=(1.0, 5.0))
        >>> buckets(feature, np.array([0.5, 1.0, 7.0, np.nan])).tolist()
        [1, 2, 3, 0]
    """
    found = 1 + np.searchsorted(np.array(feature.boundaries), numbers, side="right")
    return np.where(np.isnan(numbers), 0, found).astype(np.int64)


def _indices(column: pa.Array, feature: Feature, values: pa.Array) -> tuple[Ids, int]:
    several = pa.types.is_list(column.type)
    if several and not feature.multiple:
        raise DataError(f"{feature.name}: one value is expected, not a list")
    lengths = None
    if feature.multiple:
        ones = pc.cast(column.is_valid(), pa.int32())
        lengths = pc.fill_null(pc.list_value_length(column), 0) if several else ones
        column = column.flatten() if several else column.drop_null()
    found = pc.fill_null(pc.add(pc.index_in(column, value_set=values), 1), 0)
    ids: Ints = found.to_numpy(zero_copy_only=False).astype(np.int64)
    missing = int((ids == 0).sum()) - column.null_count
    if lengths is None:
        return ids, missing
    return Ragged(ids, bounds_of(lengths.to_numpy(zero_copy_only=False).astype(np.int64))), missing
