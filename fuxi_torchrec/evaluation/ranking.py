"""Exact ranks of targets among all candidates, each rank scoring its own shard of the catalogue.

A target's rank is 1 plus the number of other candidates with a strictly higher score: ties count for the target. An
unknown target has no rank and counts as a miss. Scores are float32 matrix products.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from fuxi_torchrec.distributed import World, raise_on_all_ranks
from fuxi_torchrec.embeddings.inputs import gathered
from fuxi_torchrec.embeddings.owned import FeatureLookup
from fuxi_torchrec.embeddings.rows import ItemLookup
from fuxi_torchrec.tasks.base import Correction
from fuxi_torchrec.tasks.rank_metrics import UNRANKED
from fuxi_torchrec.tasks.softmax import Similarity, scaled_items

# Users and items of a block of scores. On a CPU a block is a megabyte: it is written and counted in the cache.
_BLOCK = {"cpu": (256, 1024)}
_BLOCK_ELSEWHERE = (1024, 2**16)
# Rows of a matrix product, at least: products with a single row are computed another way, round differently, and would
# break ties.
_LEAST = 16
_TARGETS = 64  # targets' scores are the diagonal of a product of so many rows


@dataclass
class Queries:
    """Users of one rank, or of all: what they are compared by."""

    vectors: Tensor  # (B, D) outputs of the encoder
    targets: Tensor  # (B,) ids, 0 if unknown; on the host, like the next two
    # ids to leave out of the candidates (the target itself stays), user after user
    seen: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    # (B,) how many of them are each user's; empty if nothing is left out
    seen_lengths: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    correction: Correction | None = None  # of some scores; None for none, on all ranks alike


class ShardedCatalogue:
    """The candidates, sharded evenly, whatever the table's sharding.

    Making one is a collective, and so is every call of :meth:`ranks`.

    Args:
        items: the sharded collections of items and their features.
        candidates: (n,) ids in order.
        about: the items' features, if the model reads any.
    """

    def __init__(
        self,
        items: ItemLookup,
        candidates: Tensor,
        dim: int,
        similarity: Similarity,
        world: World,
        about: FeatureLookup | None = None,
    ) -> None:
        share = -(-len(candidates) // world.size)
        self.ids = candidates[share * world.rank : share * (world.rank + 1)]
        self.similarity, self.world = similarity, world
        # filled up with the row of unknown items, which is never counted
        filled = F.pad(self.ids, (0, -len(self.ids) % _LEAST))
        self.rows_ND = items.rows(filled, dim, world.device, about)
        with raise_on_all_ranks("reading the catalogue"):
            for part in self.rows_ND.split(2**16):
                part.copy_(scaled_items(part, similarity))
                if not part.isfinite().all():
                    raise ValueError("the item table holds values that are not finite: it cannot rank anything")
        self._users, self._items = _BLOCK.get(world.device.type, _BLOCK_ELSEWHERE)

    @torch.no_grad()
    def ranks(self, queries: Queries) -> tuple[Tensor, Tensor]:
        """Ranks of the targets of all ranks of the job, in their order, and how many of them are each one's."""
        everyone, counts = _gather_queries(queries, self.world)
        users = len(everyone.targets)
        if not everyone.vectors.isfinite().all():
            raise ValueError("the encoder's outputs hold values that are not finite: they cannot be ranked")
        vectors_BD = F.pad(scaled_items(everyone.vectors, self.similarity), (0, 0, 0, -users % _LEAST))
        wanted_B = F.pad(self._target_scores(vectors_BD, everyone.targets), (0, -users % _LEAST), value=torch.inf)
        added = self._added(everyone.correction, users)
        if everyone.correction is not None:
            wanted_B[:users] += added.of_targets(everyone.targets).to(wanted_B.device)
        # neither the target nor what the user has seen may come before the target
        owner = torch.repeat_interleave(torch.arange(users), everyone.seen_lengths)
        owner = torch.cat([torch.arange(users), owner])
        column = self._columns(torch.cat([everyone.targets, everyone.seen]))
        block = torch.where(column >= 0, owner // self._users, -1)
        better = torch.zeros(users, dtype=torch.int64)
        for number, begin in enumerate(range(0, users, self._users)):
            part = slice(begin, begin + self._users)
            left_out = torch.nonzero(block == number).squeeze(1)
            marks = (column[left_out], owner[left_out] - begin)
            found = self._better(vectors_BD[part], wanted_B[part], *marks, added.within(begin, self._users))
            better[part] = found[: users - begin]
        dist.all_reduce(better)
        return torch.where(everyone.targets > 0, better + 1, UNRANKED), counts

    def _target_scores(self, vectors_BD: Tensor, targets: Tensor) -> Tensor:
        """(B,) scores of the targets, each computed where the item is, by a matrix product like all others."""
        column = self._columns(targets)
        own = torch.nonzero(column >= 0).squeeze(1)
        scores = torch.zeros(len(targets))
        for users in own.split(_TARGETS):
            filled = F.pad(users, (0, -len(users) % _LEAST))
            rows, vectors = (x[i.to(x.device)] for x, i in ((self.rows_ND, column[filled]), (vectors_BD, filled)))
            scores[users] = torch.mm(rows, vectors.t().contiguous()).diagonal()[: len(users)].cpu()
        dist.all_reduce(scores)
        return scores.to(vectors_BD.device)

    def _added(self, correction: Correction | None, users: int) -> "_Added":
        """What is added to scores of items that this rank holds."""
        if correction is None:
            none = torch.zeros(0, dtype=torch.int64)
            return _Added(none, none, none, torch.zeros(0), users)
        column = self._columns(correction.ids)
        owner, slot = torch.nonzero(column >= 0).unbind(1)
        column = column[owner, slot]
        values = torch.empty(len(column))
        for part in torch.arange(len(column)).split(2**16):
            rows, shift = self.rows_ND[column[part].to(self.rows_ND.device)], correction.shift[owner[part]]
            values[part] = (rows * shift.to(rows.device)).sum(1).cpu()
        return _Added(owner, column, correction.ids[owner, slot], values + correction.bias[owner, slot], users)

    def _better(self, vectors_BD: Tensor, wanted_B: Tensor, column: Tensor, owner: Tensor, added: "_Added") -> Tensor:
        """(B,) candidates of this rank that beat the targets; each ``column`` does not count for its ``owner``."""
        count, vectors_DB = wanted_B.new_zeros(len(wanted_B), dtype=torch.float64), vectors_BD.t().contiguous()
        buffer = vectors_BD.new_empty(self._items, len(wanted_B))
        order = torch.argsort(column)
        column, owner = column[order], owner[order]
        begins = range(0, len(self.ids), self._items)
        bounds = torch.searchsorted(column, torch.tensor([*begins, len(self.ids)])).tolist()
        for number, begin in enumerate(begins):
            rows = self.rows_ND[begin : begin + self._items]
            scores = torch.mm(rows, vectors_DB, out=buffer[: len(rows)])[: len(self.ids) - begin]
            more = (added.column >= begin) & (added.column < begin + self._items)
            if more.any():
                where = (added.column[more] - begin).to(scores.device), added.owner[more].to(scores.device)
                scores.index_put_(where, scores[where] + added.values[more].to(scores.device))
            some = slice(bounds[number], bounds[number + 1])
            if some.stop > some.start:
                where = (column[some] - begin).to(scores.device), owner[some].to(scores.device)
                scores.index_put_(where, scores.new_tensor(-torch.inf))
            count += scores.gt_(wanted_B).sum(0)  # in place: a mask of its own takes longer
        return count.long().cpu()

    def _columns(self, ids: Tensor) -> Tensor:
        """Where this rank holds each item, −1 if it does not."""
        if not len(self.ids):
            return torch.full_like(ids, -1)
        place = torch.searchsorted(self.ids, ids).clamp(max=len(self.ids) - 1)
        return torch.where(self.ids[place] == ids, place, -1)


@dataclass(frozen=True)
class _Added:
    """What is added to scores: each pair of a user and an item once, and the same sum wherever it is needed."""

    owner: Tensor  # (n,) users, in order
    column: Tensor  # (n,) of the items
    ids: Tensor  # (n,)
    values: Tensor  # (n,) float32
    users: int

    def within(self, begin: int, count: int) -> "_Added":
        """Of some users, counted from ``begin``."""
        first, end = torch.searchsorted(self.owner, torch.tensor([begin, begin + count])).tolist()
        part = slice(first, end)
        return _Added(self.owner[part] - begin, self.column[part], self.ids[part], self.values[part], count)

    def of_targets(self, targets: Tensor) -> Tensor:
        """(B,) what is added to the scores of the users' targets: a collective."""
        own = self.ids == targets[self.owner]
        found = torch.zeros(self.users)
        found[self.owner[own]] = self.values[own]
        dist.all_reduce(found)
        return found


def _gather_queries(queries: Queries, world: World) -> tuple[Queries, Tensor]:
    """All ranks' queries, in the order of the ranks, and how many each rank has."""
    lengths = F.pad(queries.seen_lengths, (0, len(queries.targets) - len(queries.seen_lengths)))
    users, seen = gathered(torch.tensor([len(queries.targets), len(queries.seen)])).unbind(1)
    vectors = gather_rows(queries.vectors.float().cpu(), users.tolist()).to(world.device)
    meta = gather_rows(torch.stack([queries.targets, lengths], 1), users.tolist())
    correction = queries.correction
    if correction is not None:
        parts = (correction.ids, correction.bias.float().cpu(), correction.shift.float().cpu())
        correction = Correction(*(gather_rows(part, users.tolist()) for part in parts))
    seen_items = gather_rows(queries.seen, seen.tolist())
    return Queries(vectors, meta[:, 0].contiguous(), seen_items, meta[:, 1], correction), users


def gather_rows(mine: Tensor, counts: Sequence[int]) -> Tensor:
    """All ranks' rows one after another; they may have different numbers of them."""
    most = max(counts)
    if most == 0:
        return mine
    filled = mine.new_zeros(most, *mine.shape[1:])
    filled[: len(mine)] = mine
    return torch.cat([part[:count] for part, count in zip(gathered(filled), counts, strict=True)])
