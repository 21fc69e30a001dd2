"""A dataset on disk: a directory of Parquet files, ``items.parquet`` and ``dataset.json``.

``dataset.json`` is written last: a directory without it is not a dataset, whatever else it holds.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from fuxi_torchrec.artifacts import inside
from fuxi_torchrec.events import parquet
from fuxi_torchrec.events.errors import DataError
from fuxi_torchrec.events.feature_files import FeatureFile
from fuxi_torchrec.events.feature_table import FILLED, FeatureTable
from fuxi_torchrec.events.features import Feature, Owner
from fuxi_torchrec.events.filesystem import is_local, read_bytes
from fuxi_torchrec.events.histories import Ints
from fuxi_torchrec.events.log import LogSpec
from fuxi_torchrec.events.times import TimeUnit, last_time
from fuxi_torchrec.events.vocabulary import COLUMNS as VOCABULARY
from fuxi_torchrec.events.vocabulary import Vocabulary
from fuxi_torchrec.schema import Record, read_json, sealed

VERSION = 3
INFO = "dataset.json"
ITEMS = "items.parquet"
USER, ITEM, TIME, TARGET = "user_id", "item", "timestamp", "target"
MOST_ITEMS = 2**31 - 1  # indices have 32 bits
# upper bounds of the length histogram's buckets
BUCKETS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 20_000, 50_000, 100_000)
_ADVICE = "prepare the dataset again"


@dataclass(frozen=True)
class FileInfo(Record):
    """One Parquet file of users: its name, what it holds, its bytes, and the checksum that covers them all."""

    name: str
    users: int
    events: int
    size: int
    crc32: int


@dataclass(frozen=True)
class OwnedFeatures(Record):
    """Features of a dataset's items, or of its users.

    Attributes:
        features: what was learned of them.
        file: how their file was read, and later ones are.
        without: items or users of the dataset that the file does not have.
        others: rows of the file for items or users that the dataset does not have; they are left out.
        repeated: rows of the file that said the same again.
        unknown: of each feature, values that no training data has: index 0.
    """

    features: tuple[Feature, ...] = ()
    file: FeatureFile = field(default_factory=FeatureFile)
    without: int = 0
    others: int = 0
    repeated: int = 0
    unknown: dict[str, int] = field(default_factory=dict)

    @property
    def there(self) -> bool:
        return bool(self.file.columns)


@dataclass(frozen=True)
class DatasetInfo(Record):
    """What ``dataset.json`` says.

    Attributes:
        tables: files beside those of the users, with their checksums.
        skipped_rows: of the log, by reason.
        source: how it was made.
        fingerprint: of the contents.
        item_features, user_features: of the files of features, if there are any.
    """

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
    tables: dict[str, int]
    length_histogram: dict[str, int]
    skipped_rows: dict[str, int]
    source: dict[str, Any]
    fingerprint: str
    item_features: OwnedFeatures = field(default_factory=OwnedFeatures)
    user_features: OwnedFeatures = field(default_factory=OwnedFeatures)

    def __post_init__(self) -> None:
        counts = {"users": self.users, "events": self.events, **self.skipped_rows, **self.length_histogram}
        for file in self.files:
            counts |= {f"{file.name}: users": file.users, f"{file.name}: events": file.events}
        counts |= {f"feature {feature.name}: rows": feature.rows for feature in self.features}
        for name, count in counts.items():
            if count < 0:
                raise ValueError(f"{name} = {count} is negative")
        if not 0 < self.items <= MOST_ITEMS:
            raise ValueError(f"items = {self.items} is not in 1 .. {MOST_ITEMS}")
        found = {"users": sum(file.users for file in self.files), "events": sum(file.events for file in self.files)}
        for name, count in (*found.items(), ("users", sum(self.length_histogram.values()))):
            if getattr(self, name) != count:
                raise ValueError(f"{name} = {getattr(self, name)}, but its parts have {count}")
        if not 0 <= self.first_time <= self.last_time <= last_time(self.time_unit):
            raise ValueError(f"first_time = {self.first_time}, last_time = {self.last_time}: no times in order")
        names = [*(file.name for file in self.files), *self.tables, *(feature.name for feature in self.features)]
        for name in names:
            if "/" in name or names.count(name) > 1:
                raise ValueError(f"{name!r} is not the name of one file or feature")

    def features_of(self, owner: Owner) -> tuple[Feature, ...]:
        """Of events, items or users."""
        owned = {"event": self.features, "item": self.item_features.features, "user": self.user_features.features}
        return owned[owner]

    @property
    def time_unit(self) -> TimeUnit:
        return self.log.time_unit

    def to_json(self) -> str:
        return sealed(dataclasses.asdict(self))

    @staticmethod
    def from_json(text: str | bytes, where: str) -> "DatasetInfo":
        """Back from :meth:`to_json`; ``where`` is for messages."""
        return read_json(DatasetInfo, text, where, DataError, _ADVICE, version=("version", VERSION), seal=True)


@dataclass(frozen=True)
class Dataset:
    """A finished dataset: where it is and what it holds."""

    path: str
    info: DatasetInfo

    @staticmethod
    def open(path: str | Path) -> "Dataset":
        """Read the description; a DataError if there is none."""
        if not str(path):
            raise DataError("data.path is not set: name the directory of a prepared dataset, data.path=DIR")
        where = f"{str(path).rstrip('/')}/{INFO}"
        try:
            text = read_bytes(where)
        except DataError:
            raise DataError(
                f"{path}: no dataset here: {INFO} is missing or cannot be read. It is written last, so an unfinished "
                "preparation has none: run `python -m pipelines.prepare` again, or correct the path (data.path)"
            ) from None
        return Dataset(str(path).rstrip("/"), DatasetInfo.from_json(text, where))

    def file(self, name: str) -> str:
        """The path of one of its files, links followed inside of it only."""
        return str(inside(Path(self.path), name, DataError)) if is_local(self.path) else f"{self.path}/{name}"

    def table(self, name: str, columns: Sequence[str]) -> pa.Table:
        """Columns of one of its tables, the one that was written with it."""
        if name not in self.info.tables:
            raise DataError(f"{self.path}: no {name} in this dataset: {_ADVICE}")
        return parquet.read_table(self.file(name), columns, self.info.tables[name])

    def vocabulary(self) -> Vocabulary:
        vocabulary = Vocabulary.of(self.table(ITEMS, VOCABULARY), self.file(ITEMS))
        if len(vocabulary) != self.info.items:
            raise DataError(f"{self.file(ITEMS)}: {len(vocabulary)} items, {INFO} says {self.info.items}: {_ADVICE}")
        return vocabulary

    def feature_values(self, name: str, owner: Owner = "event") -> pa.Array:
        """Raw values of a feature of text, in the order of their indices, from 1."""
        prefix = "" if owner == "event" else f"{owner}-"
        table = self.table(f"{prefix}feature-{name}.parquet", ["value", "index"])
        return table.sort_by("index")["value"].combine_chunks()

    def owned(self, owner: Owner) -> OwnedFeatures:
        """What is said of the features of items, or of users."""
        return self.info.item_features if owner == "item" else self.info.user_features

    def features_of(self, owner: Owner) -> FeatureTable:
        """Features of items by index, or of users by row + 1; row 0 is of nobody."""
        features, name = self.owned(owner).features, f"{owner}-features.parquet"
        count = self.info.items if owner == "item" else self.info.users
        table = self.table(name, [FILLED, *(feature.name for feature in features)])
        if len(table) != count:
            raise DataError(f"{self.file(name)}: {len(table)} rows, {INFO} says {count} {owner}s: {_ADVICE}")
        return FeatureTable.from_arrow(table, features, self.file(name))

    def display(self) -> pa.Table:
        """Columns of items that are shown, a row per index from 1."""
        return self.table("item-display.parquet", self.info.item_features.file.display)


def histogram(lengths: Ints) -> dict[str, int]:
    """Users by length, in the buckets ``<= bound``."""
    counts = np.bincount(np.searchsorted(BUCKETS, lengths), minlength=len(BUCKETS) + 1)
    names = [*(f"<={bound}" for bound in BUCKETS), f">{BUCKETS[-1]}"]
    return {name: int(count) for name, count in zip(names, counts, strict=True) if count}
