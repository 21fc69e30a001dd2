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
_NARROW = 32  # columns of values that a product with a single row of weights reads as fast as memory gives them


def query_blocks(queries: int, heads: int, events: int) -> Iterator[slice]:
    """The new events, so many at a time."""
    size = max(1, _BLOCK_ELEMENTS // max(1, heads * events))
    for begin in range(0, queries, size):
        yield slice(begin, min(begin + size, queries))


def position_map(position_P: Tensor, queries: slice, events: int) -> Tensor:
    """(Q, E) weights by distance: queries stand behind so many cached events."""
    nearest, farthest = queries.start + 1, queries.stop - 1 + events
    within = position_P[nearest : farthest + 1]
    beyond = position_P[-1:].expand(farthest + 1 - nearest - len(within))
    # from the last query's distance to the first event down to the first query's to the last; a row of each query
    return torch.cat((within, beyond)).flip(0).unfold(0, events, 1).flip(0)


def time_map(time: TimeMap, next_Q: Tensor, time_E: Tensor) -> Tensor:
    """(Q, E) weights by time."""
    return time.weights(next_Q.unsqueeze(1) - time_E)


def content(q_QHK: Tensor, k_HEK: Tensor, bias_QE: Tensor | None = None) -> Tensor:
    """``silu(q·k + bias)``, (H, Q, E)."""
    scores_HQE = q_QHK.transpose(0, 1) @ k_HEK.mT
    if bias_QE is not None:
        scores_HQE += bias_QE
    return F.silu(scores_HQE, inplace=True)


def narrow_shape(heads: int, width: int) -> tuple[int, int]:
    """Heads and width of values as :func:`weighted` reads them fastest: wide heads as several."""
    parts = width // _NARROW if width % _NARROW == 0 else 1
    return heads * parts, width // parts


def narrow(v_THV: Tensor) -> Tensor:
    """Values of that shape; columns stay in their order."""
    return v_THV.reshape(len(v_THV), *narrow_shape(*v_THV.shape[1:]))


def weighted(v_GEV: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
    """Values weighed by maps, (H, Q, E) or shared by the heads (Q, E): (Q, G·V) each; values are read once for all.

    There are as many heads of values as of maps, or a multiple of them: :func:`narrow`.
    """
    heads = max(len(each) if each.ndim == 3 else 1 for each in weights)
    stacked_HQE = torch.cat([each.expand(heads, -1, -1) for each in weights], 1)
    stacked_GQE = stacked_HQE.unsqueeze(1).expand(-1, len(v_GEV) // heads, -1, -1).flatten(0, 1)
    return tuple(y.transpose(0, 1).flatten(1) for y in (stacked_GQE @ v_GEV).chunk(len(weights), 1))


def softmax(q_QHK: Tensor, k_HEK: Tensor, v_HEV: Tensor, y_QHV: Tensor, log_sum_QH: Tensor) -> Tensor:
    """Softmax attention to the cached events and to those that gave ``y`` with the given logarithm of their sum."""
    scores_HQE = (q_QHK * q_QHK.shape[2] ** -0.5).transpose(0, 1) @ k_HEK.mT
    log_sum_HQ1 = scores_HQE.logsumexp(2, keepdim=True)
    cached_QHV = (scores_HQE.sub_(log_sum_HQ1).exp_() @ v_HEV).transpose(0, 1)
    share_QH1 = torch.sigmoid(log_sum_QH.unsqueeze(2) - log_sum_HQ1.transpose(0, 1))  # of y
    return torch.lerp(cached_QHV, y_QHV, share_QH1)
