"""Exact ranks of targets among all candidates, each process scoring its own part of the catalogue.

A target's rank is 1 plus the number of other candidates with a strictly higher score: ties count for the target. An
unknown target has no rank and counts as a miss.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fuxi_torchrec.distributed import World
from fuxi_torchrec.embeddings.rows import item_rows
from fuxi_torchrec.training.loss import Metric, scaled_items

CUTS = (1, 5, 10, 50, 200)
_SCORES = 2**20  # held at a time
UNRANKED = torch.iinfo(torch.int64).max


@dataclass
class Queries:
    """Users of one process: what they are compared by.

    Attributes:
        vectors: (B, D) outputs of the encoder.
        targets: (B,) ids, 0 if unknown; on the host, like the next two.
        seen: ids to leave out of the candidates (the target itself stays), user after user.
        seen_lengths: (B,) how many of them are each user's.
    """

    vectors: Tensor
    targets: Tensor
    seen: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    seen_lengths: Tensor | None = None


class Catalogue:
    """The candidates, divided evenly among processes, whatever the table's sharding.

    Making one is a collective, and so is every call of :meth:`ranks`.

    Args:
        items: the sharded collection of the item table.
        candidates: (n,) ids in order.
        dim: of the table.
        metric: of the scores.
    """

    def __init__(self, items: nn.Module, candidates: Tensor, dim: int, metric: Metric, world: World) -> None:
        share = -(-len(candidates) // world.size)
        self.ids = candidates[share * world.rank : share * (world.rank + 1)]
        self.rows_ND = scaled_items(item_rows(items, self.ids, dim, world.device), metric)
        self.metric, self.world = metric, world
        self._column = torch.full((int(candidates.max()) + 1 if len(candidates) else 1,), -1, dtype=torch.int64)
        self._column[self.ids] = torch.arange(len(self.ids))
        self._users_at_once = max(1, _SCORES // max(1, share))

    @torch.no_grad()
    def ranks(self, queries: Queries) -> tuple[Tensor, Tensor]:
        """Ranks of all processes' targets in the order of the processes, and how many of them are each process's."""
        everyone = _gather_queries(queries, self.world)
        vectors = scaled_items(everyone.vectors, self.metric)
        assert everyone.seen_lengths is not None
        starts = torch.cat([torch.zeros(1, dtype=torch.int64), everyone.seen_lengths.cumsum(0)])
        better = torch.empty(len(vectors), dtype=torch.int64)
        for begin in range(0, len(vectors), self._users_at_once):
            part = slice(begin, begin + self._users_at_once)
            end = min(part.stop, len(vectors))
            seen = everyone.seen[starts[begin] : starts[end]]
            owner = torch.repeat_interleave(torch.arange(end - begin), everyone.seen_lengths[part])
            better[part] = self._better(vectors[part], everyone.targets[part], seen, owner)
        dist.all_reduce(better)
        return torch.where(everyone.targets > 0, better + 1, UNRANKED), everyone.counts

    def _better(self, vectors_BD: Tensor, targets: Tensor, seen: Tensor, owner: Tensor) -> Tensor:
        """(B,) candidates of this process that score higher than the target; the targets' scores are exchanged."""
        scores_BN = vectors_BD @ self.rows_ND.t()
        columns = self._columns(targets)
        own = torch.nonzero(columns >= 0).squeeze(1)
        target_scores = scores_BN.new_zeros(len(targets))
        target_scores[own] = scores_BN[own, columns[own]]
        host = target_scores.cpu()
        dist.all_reduce(host)
        if len(seen):
            columns_seen = self._columns(seen)
            drop = (columns_seen >= 0) & (seen != targets[owner])
            scores_BN[owner[drop], columns_seen[drop]] = -torch.inf
        return (scores_BN > host.to(scores_BN.device).unsqueeze(1)).sum(1).cpu()

    def _columns(self, ids: Tensor) -> Tensor:
        """Where this process holds each item, −1 if it does not."""
        inside = ids < len(self._column)
        return torch.where(inside, self._column[torch.where(inside, ids, 0)], -1)


@dataclass
class _Everyone:
    vectors: Tensor
    targets: Tensor
    seen: Tensor
    seen_lengths: Tensor
    counts: Tensor


def _gather_queries(queries: Queries, world: World) -> _Everyone:
    """All processes' queries, in the order of the processes."""
    lengths = queries.seen_lengths
    if lengths is None:
        lengths = torch.zeros(len(queries.targets), dtype=torch.int64)
    sizes = torch.tensor([len(queries.targets), len(queries.seen)])
    all_sizes = [torch.empty_like(sizes) for _ in range(world.size)]
    dist.all_gather(all_sizes, sizes)
    counts = torch.stack(all_sizes)
    users, seen = counts[:, 0], counts[:, 1]
    vectors = _gather(queries.vectors.float().cpu(), users.tolist())
    meta = _gather(torch.stack([queries.targets, lengths], 1), users.tolist())
    return _Everyone(
        vectors.to(world.device), meta[:, 0].contiguous(), _gather(queries.seen, seen.tolist()), meta[:, 1], users
    )


def _gather(mine: Tensor, counts: Sequence[int]) -> Tensor:
    """Everybody's rows one after another; the processes have different numbers of them."""
    most = max(counts)
    if most == 0:
        return mine
    filled = mine.new_zeros(most, *mine.shape[1:])
    filled[: len(mine)] = mine
    everyone = [torch.empty_like(filled) for _ in counts]
    dist.all_gather(everyone, filled)
    return torch.cat([part[:count] for part, count in zip(everyone, counts, strict=True)])


class Metrics:
    """Hit rate, NDCG and MRR of ranks, summed up as they come."""

    def __init__(self) -> None:
        self.users = self.unknown = 0
        self._hits = dict.fromkeys(CUTS, 0.0)
        self._gains = dict.fromkeys(CUTS, 0.0)
        self._reciprocal = 0.0

    def add(self, ranks: Tensor) -> None:
        """Ranks from 1; UNRANKED is a miss."""
        known = ranks[ranks != UNRANKED].double()
        self.users += len(ranks)
        self.unknown += len(ranks) - len(known)
        gains = 1.0 / torch.log2(known + 1.0)
        for k in CUTS:
            self._hits[k] += float((known <= k).sum())
            self._gains[k] += float(gains[known <= k].sum())
        self._reciprocal += float((1.0 / known).sum())

    def result(self) -> dict[str, float]:
        """Means over all users, unknown targets included as misses."""
        users = max(1, self.users)
        found = {f"hr@{k}": value / users for k, value in self._hits.items()}
        found |= {f"ndcg@{k}": value / users for k, value in self._gains.items()}
        return {**found, "mrr": self._reciprocal / users, "users": self.users, "unknown_targets": self.unknown}
