"""Rows of items by id, from wherever they are: their own, and those of their features."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from fuxi_torchrec.embeddings.bags import bags, padded
from fuxi_torchrec.embeddings.owned import FeatureLookup
from fuxi_torchrec.embeddings.tables import ITEM_FEATURE

_AT_ONCE = 2**16  # rows that all ranks together look up

# rows by feature: sharded tables come in an order of their own
FeatureRows = dict[str, Tensor]


def pooled(
    rows: FeatureRows | None,
    looked_up: KeyedJaggedTensor | None,
    pooling: Mapping[str, str],
    numbers: Tensor | None,
    projection: nn.Module | None,
) -> Tensor | None:
    """(n, D) the sum over all features of items or users: pooled rows of tables, and projected numbers; None if there
    are none. With numbers n is their count, else that of the bags.
    """
    found = None
    if rows is not None:
        assert looked_up is not None
        lengths = looked_up.lengths().view(len(pooling), -1)
        for (name, how), own in zip(pooling.items(), lengths, strict=True):
            each = rows[name] / own.clamp(min=1).unsqueeze(1) if how == "mean" else rows[name]
            found = each if found is None else found + each
    if numbers is not None:
        assert projection is not None
        projected: Tensor = projection(numbers)
        found = projected if found is None else found[: len(projected)] + projected
    return found


def rows_at_once(ranks: int) -> int:
    """Of a lookup by each rank: row-wise, every rank holds partial sums of all ranks' rows."""
    return max(1024, _AT_ONCE // ranks)


@dataclass(frozen=True)
class FeatureCollection:
    """A model's features of items, or of users: the sharded tables, and the projection."""

    tables: nn.Module | None
    pooling: Mapping[str, str]
    projection: nn.Module | None

    def part(self, ids: Tensor, count: int, device: torch.device, about: FeatureLookup) -> Tensor:
        """(n, D) of ids, with one lookup of ``count`` bags: a collective."""
        values, numbers = about.inputs(ids.numpy())
        looked_up = None if values is None else padded(values, count).to(device)
        rows = None if self.tables is None else self.tables(looked_up).to_dict()
        numbers = None if numbers is None else numbers.to(device)
        found = pooled(rows, looked_up, self.pooling, numbers, self.projection)
        assert found is not None
        return found[: len(ids)]

    @torch.no_grad()
    def rows(self, ids: Tensor, dim: int, device: torch.device, about: FeatureLookup) -> Tensor:
        """(n, D) of many: a collective; every rank gives its own (n,) ids, on the host."""
        rows = torch.empty(len(ids), dim, device=device)
        for begin, count in _lookups(len(ids)):
            part = ids[begin : begin + count]
            rows[begin : begin + len(part)] = self.part(part, count, device, about)
        return rows


def _lookups(rows: int) -> Iterator[tuple[int, int]]:
    """Begin and size of the lookups of this rank's rows, as many as of the rank with the most: a collective."""
    most = torch.tensor(rows)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    size = rows_at_once(dist.get_world_size())
    for begin in range(0, int(most), size):
        yield begin, min(size, int(most) - begin)


@dataclass(frozen=True)
class ItemLookup:
    """A model's collections of items and their features, sharded."""

    items: nn.Module
    features: FeatureCollection = FeatureCollection(None, {}, None)

    @torch.no_grad()
    def rows(self, ids: Tensor, dim: int, device: torch.device, about: FeatureLookup | None = None) -> Tensor:
        """(n, D) rows of items: a collective; every rank gives its own (n,) ids, on the host.

        Args:
            about: the items' features, if the model reads any.
        """
        rows = torch.empty(len(ids), dim, device=device)
        for begin, count in _lookups(len(ids)):
            part = ids[begin : begin + count]
            own = part.numpy() if about is None else about.rows_of(part.numpy(), None)
            found = self.items(padded(bags([ITEM_FEATURE], [own]), count).to(device)).values()[: len(part)]
            if about is not None:
                found = found + self.features.part(part, count, device, about)
            rows[begin : begin + len(part)] = found
        return rows
