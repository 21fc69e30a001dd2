"""Attention of a few new events of one user to its cached ones: all of them lie before, so nothing is masked.

What :mod:`tiles` gives for the new events among themselves is added to. Queries are taken a block at a time, so that
memory follows the cache's length however many new events there are.

Shape suffixes beside those of the package: Q new events, E cached events.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from fuxi_torchrec.ops.time_maps import TimeMap

_BLOCK_ELEMENTS = 2**20  # of the scores of a block


def query_blocks(queries: int, heads: int, events: int) -> Iterator[slice]:
    """The new events, so many at a time."""
    size = max(1, _BLOCK_ELEMENTS // max(1, heads * events))
    for begin in range(0, queries, size):
        yield slice(begin, min(begin + size, queries))


def position_map(position_P: Tensor, queries: slice, events: int) -> Tensor:
    """(Q, E) weights by distance: queries stand behind so many cached events."""
    device = position_P.device
    query = torch.arange(events + queries.start, events + queries.stop, device=device)
    apart = query.unsqueeze(1) - torch.arange(events, device=device)
    return position_P[apart.clamp_(max=len(position_P) - 1)]


def time_map(time: TimeMap, next_Q: Tensor, time_E: Tensor) -> Tensor:
    """(Q, E) weights by time."""
    return time.weights(next_Q.unsqueeze(1) - time_E)


def content(q_QHK: Tensor, k_HEK: Tensor, bias_QE: Tensor | None = None) -> Tensor:
    """``silu(q·k + bias)``, (H, Q, E)."""
    scores_HQE = q_QHK.transpose(0, 1) @ k_HEK.mT
    if bias_QE is not None:
        scores_HQE += bias_QE
    return F.silu(scores_HQE, inplace=True)


def weighted(v_HEV: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
    """Values weighed by maps, (H, Q, E) or shared by the heads (Q, E): (Q, H, V) each; values are read once for all."""
    stacked = torch.cat([each.expand(len(v_HEV), -1, -1) for each in weights], 1)
    return tuple(y.transpose(0, 1) for y in (stacked @ v_HEV).chunk(len(weights), 1))


def softmax(q_QHK: Tensor, k_HEK: Tensor, v_HEV: Tensor, y_QHV: Tensor, log_sum_QH: Tensor) -> Tensor:
    """Softmax attention to the cached events and to those that gave ``y`` with the given logarithm of their sum."""
    scores_HQE = (q_QHK * q_QHK.shape[2] ** -0.5).transpose(0, 1) @ k_HEK.mT
    log_sum_HQ1 = scores_HQE.logsumexp(2, keepdim=True)
    cached_QHV = (scores_HQE.sub_(log_sum_HQ1).exp_() @ v_HEV).transpose(0, 1)
    share_QH1 = torch.sigmoid(log_sum_QH.unsqueeze(2) - log_sum_HQ1.transpose(0, 1))  # of y
    return torch.lerp(cached_QHV, y_QHV, share_QH1)
