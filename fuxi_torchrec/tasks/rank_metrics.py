"""Hit rate, NDCG and MRR of ranks."""

import torch
import torch.distributed as dist
from torch import Tensor

CUTS = (1, 5, 10, 50, 200)
UNRANKED = torch.iinfo(torch.int64).max


class RankMetrics:
    """Hit rate, NDCG and MRR of ranks, summed up as they come."""

    def __init__(self) -> None:
        # users, unknown targets, sum of 1/rank; hits of every cut; gains of every cut
        self._sums = torch.zeros(3 + 2 * len(CUTS), dtype=torch.float64)

    def add(self, ranks: Tensor, /) -> None:
        """Ranks from 1; UNRANKED is a miss."""
        known = ranks[ranks != UNRANKED].double()
        gains = 1.0 / torch.log2(known + 1.0)
        within = [known <= k for k in CUTS]
        self._sums += torch.stack(
            [
                torch.tensor(float(len(ranks))),
                torch.tensor(float(len(ranks) - len(known))),
                (1.0 / known).sum(),
                *(mask.sum() for mask in within),
                *(gains[mask].sum() for mask in within),
            ]
        )

    def add_peers(self) -> None:
        dist.all_reduce(self._sums)

    def result(self) -> dict[str, float]:
        """Means over all users, unknown targets included as misses."""
        users, unknown, reciprocal, *rest = self._sums.tolist()
        means = [value / max(1.0, users) for value in rest]
        found = {f"hr@{k}": value for k, value in zip(CUTS, means, strict=False)}
        found |= {f"ndcg@{k}": value for k, value in zip(CUTS, means[len(CUTS) :], strict=True)}
        return {**found, "mrr": reciprocal / max(1.0, users), "users": int(users), "unknown_targets": int(unknown)}
