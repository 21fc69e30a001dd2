"""A dataset on disk: a directory of Parquet files, ``items.parquet`` and ``dataset.json``.

``dataset.json`` is written last: a directory without it is not a dataset, whatever else it holds.
"""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from fuxi_torchrec.events.errors import DataError
from fuxi_torchrec.events.features import Feature
from fuxi_torchrec.events.filesystem import read_bytes
from fuxi_torchrec.events.histories import Ints
from fuxi_torchrec.events.log import LogSpec
from fuxi_torchrec.events.times import TimeUnit
from fuxi_torchrec.events.vocabulary import Vocabulary, read_table
from fuxi_torchrec.schema import Record, read_json

VERSION = 2
INFO = "dataset.json"
ITEMS = "items.parquet"
USER, ITEM, TIME, TARGET = "user_id", "item", "timestamp", "target"
# upper bounds of the length histogram's buckets
BUCKETS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 20_000, 50_000, 100_000)


@dataclass(frozen=True)
class FileInfo(Record):
    """One Parquet file of users."""

    name: str
    users: int
    events: int


@dataclass(frozen=True)
class DatasetInfo(Record):
    """What ``dataset.json`` says."""

    version: int
    log: LogSpec
    users: int
    items: int
    events: int
    first_time: int
    last_time: int
    has_target: bool
    features: tuple[Feature, ...]
    files: tuple[FileInfo, ...]
    length_histogram: dict[str, int]
    skipped_rows: dict[str, int]
    source: dict[str, Any]
    fingerprint: str

    @property
    def time_unit(self) -> TimeUnit:
        return self.log.time_unit

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=1) + "\n"


@dataclass(frozen=True)
class Dataset:
    """A finished dataset: where it is and what it holds."""

    path: str
    info: DatasetInfo

    @staticmethod
    def open(path: str | Path) -> "Dataset":
        """Read the description; a DataError if there is none."""
        where = f"{str(path).rstrip('/')}/{INFO}"
        try:
            text = read_bytes(where)
        except DataError:
            raise DataError(
                f"{path}: no dataset here: {INFO} is missing or cannot be read. It is written last, so an unfinished "
                "preparation has none: run `python -m pipelines.prepare` again"
            ) from None
        info = read_json(DatasetInfo, text, where, DataError, "prepare the dataset again", version=("version", VERSION))
        return Dataset(str(path).rstrip("/"), info)

    def file(self, name: str) -> str:
        return f"{self.path}/{name}"

    def vocabulary(self) -> Vocabulary:
        return Vocabulary.read(self.file(ITEMS))

    def feature_values(self, name: str) -> pa.Array:
        """Raw values of a feature of text, in the order of their indices, from 1."""
        table = read_table(self.file(f"feature-{name}.parquet"), ["value", "index"])
        return table.sort_by("index")["value"].combine_chunks()


def histogram(lengths: Ints) -> dict[str, int]:
    """Users by length, in the buckets ``<= bound``."""
    counts = np.bincount(np.searchsorted(BUCKETS, lengths), minlength=len(BUCKETS) + 1)
    names = [*(f"<={bound}" for bound in BUCKETS), f">{BUCKETS[-1]}"]
    return {name: int(count) for name, count in zip(names, counts, strict=True) if count}
