"""The two collections of tables: items, and features of events."""

import re
from dataclasses import dataclass
from typing import Literal

import torch
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from fuxi_torchrec.config import Config, Sharding
from fuxi_torchrec.data.dataset import DatasetInfo
from fuxi_torchrec.events.errors import DataError

# A collection cannot hold a table called "items": its ModuleDict has a method of that name.
ITEM_FEATURE, ITEM_TABLE = "item", "item_table"
_TABLE = re.compile(r"\.embedding_bags\.([^.]+)\.")  # in the name of a parameter, a weight or a moment


def table_of(name: str) -> str | None:
    """The table that a parameter or a checkpoint's tensor belongs to, None if to none.

    Example:
        >>> table_of("model.items.embedding_bags.item_table.weight"), table_of("model.head.encoder.positions")
        ('item_table', None)
        >>> table_of("model.features.embedding_bags.feature_event-type.weight")
        'feature_event-type'
    """
    found = _TABLE.search(name)
    return found[1] if found else None


@dataclass(frozen=True)
class Table:
    """One table: what it is called and how it is sharded."""

    name: str
    feature: str  # of its lookups
    rows: int  # with row 0 for what is unknown
    dim: int
    sharding: Sharding
    pooling: Literal["sum", "mean"] = "sum"  # of several values of an event


@dataclass(frozen=True)
class Tables:
    """All tables of a run."""

    items: Table
    features: tuple[Table, ...]

    @property
    def all(self) -> tuple[Table, ...]:
        return (self.items, *self.features)

    @property
    def feature_names(self) -> list[str]:
        return [table.feature for table in self.features]

    @property
    def needs_equal_bags(self) -> bool:
        """Row-wise lookups need the same number of bags on every rank; asked of tables as they are planned."""
        assert all(table.sharding != "auto" for table in self.all)
        return any(table.sharding == "row_wise" for table in self.all)


def tables_for(config: Config, info: DatasetInfo) -> Tables:
    """The tables that a dataset needs."""
    rows = {feature.name: feature.rows for feature in info.features}
    wanted = config.features.event
    missing = [name for name in wanted if name not in rows]
    if missing:
        there = ", ".join(sorted(rows)) or "none"
        raise DataError(f"features.event: the dataset has no feature {', '.join(missing)}; there are {there}")
    dotted = [name for name in wanted if "." in name]
    if dotted:
        raise DataError(f"features.event: {', '.join(dotted)}: a name with a dot in it cannot be that of a table")
    return make_tables(config, info.items, rows)


def make_tables(config: Config, items: int, feature_rows: dict[str, int]) -> Tables:
    """Tables of so many items, and of each feature of the configuration."""
    dim = config.model.dim
    features = tuple(
        Table(f"feature_{name}", name, max(1, feature_rows[name]), dim, feature.sharding, feature.pooling)
        for name, feature in config.features.event.items()
    )
    return Tables(Table(ITEM_TABLE, ITEM_FEATURE, items + 1, dim, config.tables.sharding), features)


def collection(tables: tuple[Table, ...], device: torch.device | str = "meta") -> EmbeddingBagCollection:
    """An unsharded collection; bags are summed, whatever the pooling: means are divided after the lookup."""
    return EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(
                name=table.name,
                embedding_dim=table.dim,
                num_embeddings=table.rows,
                feature_names=[table.feature],
                pooling=PoolingType.SUM,
            )
            for table in tables
        ],
        device=torch.device(device),
    )
