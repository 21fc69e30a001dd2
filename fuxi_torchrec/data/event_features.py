"""Numbers, buckets and vectors of events: what is learned of them, and how a dataset holds them."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from fuxi_torchrec.data.dataset import Dataset
from fuxi_torchrec.events.database import Database
from fuxi_torchrec.events.errors import DataError
from fuxi_torchrec.events.feature_learning import buckets
from fuxi_torchrec.events.features import Feature
from fuxi_torchrec.events.ingestion import FEATURE
from fuxi_torchrec.events.log import LogSpec, quote


def learn_events(
    database: Database, log: LogSpec, widths: Mapping[str, int], where: str, extended: Dataset | None
) -> dict[str, Feature]:
    """Means and deviations, quantiles and widths, by name.

    Args:
        where: SQL condition of the events that are training data.
        extended: a dataset whose statistics stay.
    """
    previous = {} if extended is None else {feature.name: feature for feature in extended.info.features}
    found = {}
    for name, kind in log.kinds.items():
        column, was = quote(FEATURE + name), previous.get(name)
        width = {"bucket": 0, "number": 1, "vector": widths.get(name, 0)}[kind]
        if was is not None:
            if (was.kind, was.width) != (kind, width):
                raise DataError(
                    f"feature column {name} was a {was.kind} of {was.width} elements in the dataset that is extended, "
                    f"here it is a {kind} of {width}"
                )
            found[name] = was
            continue
        count: Any = width
        mean, deviation, cuts = 0.0, 1.0, tuple[float, ...]()
        if kind == "number":
            chosen = f"count({column}), avg({column}), stddev_pop({column})"
            count, mean, deviation = database.row(f"SELECT {chosen} FROM events{where}")
        elif kind == "bucket":
            shares = [n / log.buckets[name] for n in range(1, log.buckets[name])]
            chosen = f"count({column}), min({column}), quantile_disc({column}, {shares})"
            count, least, quantiles = database.row(f"SELECT {chosen} FROM events{where}")
            cuts = tuple(sorted({float(cut) for cut in quantiles or () if cut > least}))
        if not count:
            raise DataError(f"feature column {name}: no event of the training data has a {kind}")
        if kind == "bucket":
            found[name] = Feature(name, rows=len(cuts) + 2, kind=kind, boundaries=cuts)
        else:
            found[name] = Feature(name, kind=kind, width=width, mean=mean, deviation=deviation or 1.0)
    return found


def numbers_of(column: pa.Array, feature: Feature) -> pa.Array:
    """Buckets; or numbers and vectors, nan where they are missing."""
    if feature.kind == "bucket":
        numbers = column.to_numpy(zero_copy_only=False).astype(np.float64)
        return pa.array(buckets(feature, numbers), pa.int32())
    if feature.kind == "number":
        return pa.array(column.to_numpy(zero_copy_only=False).astype(np.float32))
    rows = np.full((len(column), feature.width), np.nan, np.float32)
    there = column.is_valid().to_numpy(zero_copy_only=False)
    rows[there] = column.flatten().to_numpy(zero_copy_only=False).reshape(-1, feature.width)
    ends = pa.array(np.arange(len(column) + 1) * feature.width, pa.int32())
    return pa.ListArray.from_arrays(ends, pa.array(rows.reshape(-1)))
