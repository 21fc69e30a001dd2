"""A trained run, ready to be queried: its checkpoint under a row-wise plan of this job's own, and a dataset."""

import dataclasses
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import Tensor

from fuxi_torchrec.config import Config, Sharding
from fuxi_torchrec.data.batches import BatchMaker, Items
from fuxi_torchrec.data.dataset import Dataset
from fuxi_torchrec.data.reader import Reader, RowGroup
from fuxi_torchrec.data.splits import Part
from fuxi_torchrec.data.survey import survey
from fuxi_torchrec.distributed import World, broadcast_from_rank_0, raise_on_all_ranks, share_from_rank_0
from fuxi_torchrec.embeddings.inputs import NO_LOOKUPS, Lookups
from fuxi_torchrec.embeddings.owned import lookup_of
from fuxi_torchrec.embeddings.pipeline import ShardedModel
from fuxi_torchrec.embeddings.sharding import ShardingError, check_shardable, describe, placements, shard
from fuxi_torchrec.embeddings.tables import Tables, tables_for
from fuxi_torchrec.encoders.base import SequenceEncoder
from fuxi_torchrec.errors import FuxiError
from fuxi_torchrec.evaluation.encoding import UserEncoder
from fuxi_torchrec.events.errors import DataError
from fuxi_torchrec.events.histories import Ints, Ragged
from fuxi_torchrec.events.vocabulary import Vocabulary
from fuxi_torchrec.logging import get_logger
from fuxi_torchrec.training.checkpoint.info import CheckpointError, Info, find_checkpoint
from fuxi_torchrec.training.checkpoint.store import Checkpoints, table_rows
from fuxi_torchrec.training.checkpoint.unshard import plain_name
from fuxi_torchrec.training.model import SequenceModel
from fuxi_torchrec.training.run_data import split_of
from fuxi_torchrec.training.run_directory import ITEMS, KnownItems, RunDirectory

logger = get_logger(__name__)


# of the item table and of features: the first that leaves no rank without rows
_SHARDINGS: tuple[tuple[Sharding, Sharding], ...] = (
    ("row_wise", "row_wise"),
    ("row_wise", "data_parallel"),
    ("data_parallel", "data_parallel"),
)


class RetrievalError(FuxiError, ValueError):
    """What cannot be evaluated or exported as asked."""


@dataclass(frozen=True)
class Loaded:
    """A run's weights on this job's ranks, and the data to use them on."""

    config: Config  # the run's, with this job's sharding
    directory: RunDirectory
    checkpoint: Path  # where the weights are from
    info: Info  # what the checkpoint says of itself
    vocabulary: Vocabulary  # raw ids of the run's items
    items: KnownItems  # which of them it knows
    dataset: Dataset  # what is evaluated or exported; its own fingerprint, the run's indices
    maker: BatchMaker  # makes batches of it
    tables: Tables
    model: ShardedModel
    world: World
    unknown_items: int = 0  # items of the dataset that the run's vocabulary lacks; 0 for the run's own data
    lookups: Lookups = NO_LOOKUPS  # features of the run's items, and of the dataset's users

    @property
    def users(self) -> UserEncoder:
        return UserEncoder(self.model, self.tables, self.world, self.lookups)

    @property
    def candidates(self) -> Ints:
        """Items that are ranked and exported: those with a row of their own, or with features."""
        return np.flatnonzero(self.maker.items.seen)

    @property
    def module(self) -> SequenceModel:
        return self.users.module

    @property
    def encoder(self) -> SequenceEncoder:
        return self.module.encoder

    def lengths(self) -> Ints:
        """Events of each user, read on rank 0 for all: a collective."""
        found = share_from_rank_0(
            self.world, "reading the dataset", lambda: {"lengths": torch.from_numpy(self.maker.reader.lengths())}
        )
        return found["lengths"].numpy()

    def users_with(self, part: Part) -> tuple[Ints, Ints]:
        """Events of each user, and rows of those who have a target, read on rank 0 for all: a collective."""

        def work() -> dict[str, Tensor]:
            found = survey(self.maker, part)
            return {"lengths": torch.from_numpy(found.lengths), "users": torch.from_numpy(found.users_with)}

        found = share_from_rank_0(self.world, "reading the dataset", work)
        return found["lengths"].numpy(), found["users"].numpy()


def load(
    run_dir: str | Path,
    world: World,
    which: str | None = None,
    data: str | None = None,
    allow_other_data: bool = False,
) -> Loaded:
    """Load a run, see :class:`RunOptions`: a collective. ``which`` is the checkpoint, the best or else the latest."""
    directory = RunDirectory(run_dir)
    with raise_on_all_ranks("opening the run"):
        config = directory.read_config()
    checkpoints = Checkpoints(directory.checkpoints, 1, world)
    path = broadcast_from_rank_0("looking for the checkpoint", lambda: find_checkpoint(directory.checkpoints, which))
    info = checkpoints.read_info(path)
    with raise_on_all_ranks("opening the dataset"):
        directory.check_trained(config, info, path)
        if info.identity.encoder != config.model.identity():
            raise CheckpointError(
                f"{path}: the checkpoint's encoder is not that of {directory.path}/config.yaml, or was made by another "
                f"version of this software ({info.software})"
            )
        dataset = _open_dataset(config, info, data, allow_other_data)
        vocabulary, items = Vocabulary.read(str(directory.path / ITEMS)), directory.read_items()
        if len(vocabulary) != info.identity.items or items.fingerprint != info.identity.vocabulary:
            raise CheckpointError(f"{path}: the checkpoint knows other items than {directory.path}/{ITEMS}")
        tables, config = _tables(config, info, path, dataset, world.size)
        reader, unknown = _reader(config, info, dataset, vocabulary, tables)
        lookups = _lookups(config, info, dataset, items)
        featured = None if lookups.items is None else lookups.items.table.filled
        maker = BatchMaker(reader, split_of(config.data), Items(items.known, featured=featured))
    model, plan = shard(SequenceModel(config, tables), tables, config.optimizer, world)
    checkpoints.load(path, model, None)
    model.eval()
    logger.info("%s on %d ranks\n%s", path, world.size, describe(placements(plan, tables)))
    return Loaded(
        *(config, directory, path, info, vocabulary, items, dataset, maker, tables, model, world, unknown, lookups)
    )


# --- the dataset -----------------------------------------------------------------------------------------------------


def _open_dataset(config: Config, info: Info, data: str | None, allow_other_data: bool) -> Dataset:
    dataset = Dataset.open(data or config.data.path)
    unit, found = config.data.time_unit, dataset.info
    if found.time_unit != unit:
        raise DataError(f"{dataset.path}: times are in {found.time_unit}, the run's in {unit}: prepare it in {unit}")
    if found.fingerprint != info.identity.dataset and not allow_other_data:
        raise RetrievalError(
            f"{dataset.path}: the dataset's fingerprint is {found.fingerprint}, the run was trained on "
            f"{info.identity.dataset}: give the run's own with --data, or take this one with --allow-other-data, its "
            "items found by their raw ids"
        )
    return dataset


def _tables(config: Config, info: Info, checkpoint: Path, dataset: Dataset, world_size: int) -> tuple[Tables, Config]:
    """The checkpoint's tables, row-wise where there are rows enough; and the configuration that says so."""
    found = dataset.info
    rows = {plain_name(name): size for name, size in table_rows(checkpoint).items()}
    features = tuple(
        dataclasses.replace(feature, rows=rows.get(f"feature_{feature.name}", feature.rows))
        for feature in found.features
    )
    if any(config.features.event.get(f.name) and not f.in_table for f in features):  # standardised as in training
        own_features = {f.name: f for f in own_dataset(config, info, dataset, "statistics").info.features}
        features = tuple(f if f.in_table else own_features.get(f.name, f) for f in features)
    about = dataclasses.replace(found, items=info.identity.items, features=features)
    if config.features.item:  # as they are in the run's own dataset
        own = own_dataset(config, info, dataset, ", ".join(config.features.item)).info
        about = dataclasses.replace(about, item_features=own.item_features)
    # nothing is trained: the kernel without moments, whatever the run's optimizer
    config = dataclasses.replace(config, optimizer=dataclasses.replace(config.optimizer, kind="adamw"))
    for item, feature in _SHARDINGS:
        table = dataclasses.replace(config.tables, sharding=item)
        config = dataclasses.replace(config, tables=table, features=config.features.with_sharding(feature))
        tables = tables_for(config, about)
        with suppress(ShardingError):
            check_shardable(tables, config.optimizer, world_size)
            break
    return tables, config


def _lookups(config: Config, info: Info, dataset: Dataset, items: KnownItems) -> Lookups:
    """Features of the run's items, from its own dataset wherever it is used; and of the users."""
    if not config.features.item and not config.features.user:
        return NO_LOOKUPS
    own = own_dataset(config, info, dataset, ", ".join([*config.features.item, *config.features.user]))
    if config.features.user and own is not dataset:
        raise RetrievalError(
            f"{dataset.path}: features of users ({', '.join(config.features.user)}) are indices of the run's own "
            f"dataset, data.path = {config.data.path}: take that one"
        )
    return Lookups(lookup_of(config, own, "item", items.known), lookup_of(config, own, "user"))


def _reader(config: Config, info: Info, dataset: Dataset, vocabulary: Vocabulary, tables: Tables) -> tuple[Reader, int]:
    """The dataset in the run's indices, and how many of its items the run's vocabulary lacks."""
    features = tables.event_names
    if dataset.info.fingerprint == info.identity.dataset:
        return Reader(dataset, features, config.data.on_bad_rows), 0
    own = dataset.vocabulary()
    if pa.types.is_integer(own.ids.type) != pa.types.is_integer(vocabulary.ids.type):
        raise DataError(
            f"{dataset.path}: item ids are {own.ids.type}, the run's are {vocabulary.ids.type}: they cannot be matched"
        )
    index = np.concatenate([[0], vocabulary.index(own.ids.cast(vocabulary.ids.type))])
    unknown = int((index[1:] == 0).sum())
    what = "%s is not the data the run was trained on: %d of its %d items are unknown to the run"
    logger.warning(what, dataset.path, unknown, len(own))
    sizes = {table.feature: table.rows for table in tables.features}
    maps = {name: _feature_map(config, info, dataset, name, sizes[name]) for name in tables.feature_names}
    return RemappedReader(dataset, features, config.data.on_bad_rows, index, maps), unknown


def own_dataset(config: Config, info: Info, dataset: Dataset, name: str) -> Dataset:
    """The dataset whose values of a feature are a run's indices: its own, also where another one is used."""
    if dataset.info.fingerprint == info.identity.dataset:
        return dataset
    try:
        own = Dataset.open(config.data.path)
        if own.info.fingerprint != info.identity.dataset:
            raise DataError(f"its fingerprint is {own.info.fingerprint}, the run's is {info.identity.dataset}")
    except DataError as error:
        raise DataError(
            f"{dataset.path}: values of the feature {name} are matched through those of the run's own dataset, "
            f"data.path = {config.data.path}: {error}. Put it back there"
        ) from None
    return own


def _feature_map(config: Config, info: Info, dataset: Dataset, name: str, rows: int) -> Ints:
    """The run's value of each value of a feature, 0 for what it does not know."""
    (feature,) = (feature for feature in dataset.info.features if feature.name == name)
    if feature.kind == "bucket":
        own = own_dataset(config, info, dataset, name).info.features
        if feature.boundaries != next(f.boundaries for f in own if f.name == name):
            raise RetrievalError(f"{dataset.path}: {name} has other buckets than the run's: prepare it with --extend")
    if not feature.vocabulary:
        values = np.arange(feature.rows)
        return np.where(values < rows, values, 0)
    theirs, ours = (each.feature_values(name) for each in (own_dataset(config, info, dataset, name), dataset))
    found = pc.fill_null(pc.add(pc.index_in(ours, value_set=theirs), 1), 0)
    return np.concatenate([[0], found.to_numpy(zero_copy_only=False)]).astype(np.int64)


class RemappedReader(Reader):
    """Another dataset's events in a run's indices (of items, and of each feature's values); 0 for what it lacks."""

    def __init__(
        self, dataset: Dataset, features: list[str], on_bad_rows: str, index: Ints, features_index: dict[str, Ints]
    ) -> None:
        super().__init__(dataset, features, "skip" if on_bad_rows == "skip" else "error")
        self._index, self._features_index = index, features_index

    def _read(self, number: int) -> RowGroup:
        block = super()._read(number)
        features = {
            name: Ragged(self._features_index[name][column.values], column.bounds)
            if isinstance(column, Ragged)
            else (self._features_index[name][column] if name in self._features_index else column)
            for name, column in block.features.items()
        }
        return dataclasses.replace(block, items=self._index[block.items], features=features)
