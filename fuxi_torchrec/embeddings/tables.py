"""The collections of tables: items, and features of events, items and users."""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from fuxi_torchrec.config import Config, Sharding
from fuxi_torchrec.data.dataset import DatasetInfo
from fuxi_torchrec.events.errors import DataError
from fuxi_torchrec.events.features import OWNERS, Feature, Owner

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


def owner_of(table: str) -> Owner | None:
    """Whose feature a table is of; None for the item table.

    Example:
        >>> owner_of("item_feature_brand"), owner_of("feature_action"), owner_of("item_table")
        ('item', 'event', None)
    """
    prefixes: dict[Owner, str] = {"event": "feature_", "item": "item_feature_", "user": "user_feature_"}
    return next((owner for owner, prefix in prefixes.items() if table.startswith(prefix)), None)


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
    features: tuple[Table, ...]  # of events
    of_items: tuple[Table, ...] = ()  # of features of items
    of_users: tuple[Table, ...] = ()  # of features of users
    numbers: tuple[Feature, ...] = ()  # features of events that are projected: numbers and vectors
    item_inputs: int = 0  # of the projection of items' numbers and vectors
    user_inputs: int = 0  # of that of users

    @property
    def all(self) -> tuple[Table, ...]:
        return (self.items, *self.features, *self.of_items, *self.of_users)

    @property
    def has_item_features(self) -> bool:
        return bool(self.of_items) or self.item_inputs > 0

    def resolved(self, change: Callable[[Table], Table]) -> "Tables":
        """With every table changed."""
        changed = {name: tuple(map(change, getattr(self, name))) for name in ("features", "of_items", "of_users")}
        return replace(self, items=change(self.items), **changed)  # type: ignore[arg-type]

    @property
    def feature_names(self) -> list[str]:
        """Of features of events that are rows of tables."""
        return [table.feature for table in self.features]

    @property
    def event_names(self) -> list[str]:
        """Of all features of events that are read."""
        return [*self.feature_names, *(feature.name for feature in self.numbers)]

    @property
    def event_inputs(self) -> int:
        """Of the projection of events' numbers and vectors."""
        return sum(feature.inputs for feature in self.numbers)

    @property
    def needs_equal_bags(self) -> bool:
        """Row-wise lookups need the same number of bags on every rank; asked of tables as they are planned."""
        assert all(table.sharding != "auto" for table in self.all)
        return any(table.sharding == "row_wise" for table in self.all)


def tables_for(config: Config, info: DatasetInfo) -> Tables:
    """The tables that a dataset needs."""
    chosen = {owner: chosen_features(config, info, owner) for owner in OWNERS}
    tables = make_tables(config, info.items, {f.name: f.rows for f in chosen["event"] if f.in_table})
    dim, more = config.model.dim, dict[str, tuple[Table, ...]]()
    for owner in ("item", "user"):
        wanted = config.features.of(owner)
        more[f"of_{owner}s"] = tuple(
            Table(f"{owner}_feature_{f.name}", f.name, f.rows, dim, wanted[f.name].sharding, f.pooling)
            for f in chosen[owner]
            if f.in_table
        )
    inputs = {owner: sum(feature.inputs for feature in chosen[owner]) for owner in OWNERS}
    numbers = tuple(feature for feature in chosen["event"] if not feature.in_table)
    tables = replace(tables, numbers=numbers, item_inputs=inputs["item"], user_inputs=inputs["user"])
    return replace(tables, **more)  # type: ignore[arg-type]


def chosen_features(config: Config, info: DatasetInfo, owner: Owner) -> tuple[Feature, ...]:
    """Features of the configuration as the dataset has them, in the configuration's order."""
    about = {feature.name: feature for feature in info.features_of(owner)}
    wanted = config.features.of(owner)
    missing = [name for name in wanted if name not in about]
    if missing:
        there = ", ".join(sorted(about)) or "none"
        raise DataError(f"features.{owner}: the dataset has no feature {', '.join(missing)}; there are {there}")
    dotted = [name for name in wanted if "." in name]
    if dotted:
        raise DataError(f"features.{owner}: {', '.join(dotted)}: a name with a dot in it cannot be that of a table")
    return tuple(replace(about[name], pooling=each.pooling) for name, each in wanted.items())


def make_tables(config: Config, items: int, feature_rows: dict[str, int]) -> Tables:
    """Tables of so many items, and of features of events with so many rows."""
    dim, wanted = config.model.dim, config.features.event
    features = tuple(
        Table(f"feature_{name}", name, max(1, rows), dim, wanted[name].sharding, wanted[name].pooling)
        for name, rows in feature_rows.items()
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
