"""Rows of the item table by id, from wherever they are."""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fuxi_torchrec.embeddings.inputs import bags, padded
from fuxi_torchrec.embeddings.tables import ITEM_FEATURE

_AT_ONCE = 2**16  # rows that all ranks together look up


def rows_at_once(ranks: int) -> int:
    """Of a lookup by each rank: row-wise, every rank holds partial sums of all ranks' rows."""
    return max(1024, _AT_ONCE // ranks)


@torch.no_grad()
def item_rows(items: nn.Module, ids: Tensor, dim: int, device: torch.device) -> Tensor:
    """(n, D) rows of a sharded item table: a collective; every rank gives its own (n,) ids, on the host."""
    most = torch.tensor(len(ids))
    dist.all_reduce(most, dist.ReduceOp.MAX)
    rows = torch.empty(len(ids), dim, device=device)
    size = rows_at_once(dist.get_world_size())
    for begin in range(0, int(most), size):
        part = ids[begin : begin + size]
        wanted = padded(bags([ITEM_FEATURE], [part.numpy()]), min(size, int(most) - begin))
        rows[begin : begin + len(part)] = items(wanted.to(device)).values()[: len(part)]
    return rows
