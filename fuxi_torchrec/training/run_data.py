"""A dataset as a training run sees it: its split, its batches, the items it knows."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fuxi_torchrec.config import Config, DataConfig
from fuxi_torchrec.data.batches import BatchMaker, Items
from fuxi_torchrec.data.dataset import Dataset, DatasetInfo
from fuxi_torchrec.data.reader import Reader
from fuxi_torchrec.data.schedule import Plan
from fuxi_torchrec.data.splits import ByTime, LeaveOneOut, Split
from fuxi_torchrec.data.survey import survey
from fuxi_torchrec.distributed import World, raise_on_all_ranks, share_from_rank_0
from fuxi_torchrec.embeddings.inputs import NO_LOOKUPS, Lookups
from fuxi_torchrec.embeddings.owned import lookup_of
from fuxi_torchrec.embeddings.sharding import check_shardable
from fuxi_torchrec.embeddings.tables import Tables, tables_for
from fuxi_torchrec.events.errors import DataError
from fuxi_torchrec.events.features import OWNERS
from fuxi_torchrec.tasks.base import ItemSet
from fuxi_torchrec.tasks.registry import make_task
from fuxi_torchrec.training.checkpoint.info import Identity
from fuxi_torchrec.training.run_directory import KnownItems, RunDirectory, RunError

Ints = NDArray[np.int64]

DEFAULT_EVENTS = 16384


def split_of(config: DataConfig) -> Split:
    """The split that a configuration asks for."""
    if config.split == "by_time":
        assert isinstance(config.test_from, int) and not isinstance(config.valid_from, str)
        return ByTime(config.test_from, config.valid_from)
    return LeaveOneOut(config.fit_on_valid)


def plan_of(config: Config) -> Plan:
    """How a configuration makes batches."""
    batch = config.batch
    events = DEFAULT_EVENTS if batch.events is None and batch.users is None else batch.events
    return Plan(
        batch.max_length, batch.truncation, events, batch.users, batch.streams, batch.shuffle_blocks, config.seed
    )


def remarks(config: Config, info: DatasetInfo) -> list[str]:
    """What is allowed in a run, and is most likely not meant."""
    found = []
    longest, positions = config.batch.max_length, config.model.max_positions
    if longest < positions:
        found.append(
            f"batch.max_length = {longest} and model.max_positions = {positions}: positions from {longest} on are not "
            "trained and stay random; set both equal"
        )
    for owner in OWNERS:
        unused = [feature.name for feature in info.features_of(owner) if feature.name not in config.features.of(owner)]
        if unused:
            key, names = f"features.{owner}", ", ".join(unused)
            found.append(f"the dataset has features that the model does not read: {names}; name them in {key}")
    return found


@dataclass(frozen=True)
class RunData:
    """A dataset as a run sees it."""

    dataset: Dataset  # what is trained on
    maker: BatchMaker  # makes batches of it
    items: KnownItems  # which items the run knows
    tables: Tables  # what is looked up
    lengths: Ints  # training events of each user
    validated: Ints  # rows of the users that have a validation target
    item_set: ItemSet  # the known items as tasks see them
    lookups: Lookups = NO_LOOKUPS  # features of items and users

    @property
    def candidates(self) -> Ints:
        """Items that are ranked: those with a row of their own, or with features."""
        return np.flatnonzero(self.maker.items.seen)

    @staticmethod
    def open(config: Config, directory: RunDirectory, world: World, resumed: bool) -> "RunData":
        """What training needs to know of its dataset, counted on rank 0 for all: a collective.

        The known items are those of the run directory if the run is resumed.
        """
        with raise_on_all_ranks("opening the dataset"):
            dataset, tables, reader = _open(config)
            everything = np.arange(dataset.info.items + 1) > 0
            split, items = split_of(config.data), None
            if resumed and directory.has_items():
                items = _read_items(directory, dataset)
            check_shardable(tables, config.optimizer, world.size)
        needs_target_counts = make_task(config.task, config.loss, config.model.dim).needs_target_counts

        def count() -> dict[str, Tensor]:
            # a run that leaves bad users out must leave out the same ones whenever it is started
            whole = items is None or needs_target_counts or config.data.on_bad_rows == "skip"
            found = survey(BatchMaker(reader, split, Items(everything)), items=whole)
            return {name: torch.from_numpy(getattr(found, name)) for name in _COUNTED}

        shared = share_from_rank_0(world, "counting items and events", count)
        counts, target_counts, lengths, validated = (shared[name].numpy() for name in _COUNTED)
        if items is None:
            items = KnownItems(everything & (counts >= config.data.min_item_events), counts)
        if not items.known.any():  # the same on every rank
            raise DataError(
                f"{dataset.path}: no item has {config.data.min_item_events} training events: nothing to train on"
            )
        with raise_on_all_ranks("reading features"):
            of_items = lookup_of(config, dataset, "item", items.known)
            lookups = Lookups(of_items, lookup_of(config, dataset, "user"))
        featured = None if of_items is None else of_items.table.filled
        maker = BatchMaker(reader, split, Items(items.known, config.data.oov_rate, config.seed, featured))
        item_set = ItemSet(items.ids, np.where(items.known, target_counts, 0) if needs_target_counts else None)
        return RunData(dataset, maker, items, tables, lengths, validated, item_set, lookups)

    def identity(self, config: Config) -> Identity:
        return Identity(
            self.dataset.info.fingerprint,
            self.items.fingerprint,
            self.dataset.info.time_unit,
            self.dataset.info.items,
            config.model.identity(),
        )


_COUNTED = ("item_counts", "target_counts", "train_lengths", "users_with")  # of a survey


def _open(config: Config) -> tuple[Dataset, Tables, Reader]:
    dataset = Dataset.open(config.data.path)
    if dataset.info.time_unit != config.data.time_unit:
        raise DataError(
            f"{dataset.path}: times are in {dataset.info.time_unit}, the config says data.time_unit = "
            f"{config.data.time_unit}: set it, and model.temporal_periods in the same unit"
        )
    tables, cache = tables_for(config, dataset.info), config.data.cache_mib * 2**20
    return dataset, tables, Reader(dataset, tables.event_names, config.data.on_bad_rows, cache)


def _read_items(directory: RunDirectory, dataset: Dataset) -> KnownItems:
    items = directory.read_items()
    if len(items.known) != dataset.info.items + 1:
        raise RunError(
            f"{directory.path}: the run knows a vocabulary of {len(items.known) - 1} items, {dataset.path} has "
            f"{dataset.info.items}: take another --run-dir, and --init-from this one to start from its weights"
        )
    return items
