"""The loss with a bias for the items of each position's window.

Candidates of a position are its window, and what a sampler drew but for items of the window: each item of the window
counts once, and a draw as often as it stands for items that were not drawn, so that both are on one scale. The
gradients are computed together with the loss, some positions at a time.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from fuxi_torchrec.tasks.softmax import known_gradients, parts

_GATHERED = 2**19  # elements of gathered rows at a time, about


class Compared(NamedTuple):
    """What P positions are compared with, as places in the U looked-up rows; constants all.

    Attributes:
        targets_P: distinct from nothing else: a target that is drawn or in the window counts once.
        window_PW: the distinct items of the window; −1 for empty slots.
        pool_M: distinct candidates of all positions.
        log_weights_M: added to the scores of those outside of the window; None for 0.
        own_PK: candidates of each position.
        own_log_weight: () added to their scores.
    """

    targets_P: Tensor
    window_PW: Tensor
    pool_M: Tensor
    log_weights_M: Tensor | None
    own_PK: Tensor
    own_log_weight: Tensor


def repeat_softmax(
    queries_PD: Tensor, shifted_PD: Tensor, rows_UD: Tensor, bias_PW: Tensor, compared: Compared, weights_P: Tensor
) -> Tensor:
    """``Σ_p weight_p · (log Σ_c exp(s_pc) − s_pt)`` over p's candidates c and its target t.

    ``s_pc = shifted_p·e_c + bias_pc`` for items of the window, ``queries_p·e_c``, with the log weight where c was
    drawn, for all others.

    Args:
        queries_PD, shifted_PD, rows_UD: scaled.
        weights_P: of the positions; a constant.
    """
    return known_gradients(_repeat_softmax, (queries_PD, shifted_PD, rows_UD, bias_PW), *compared, weights_P)


def _repeat_softmax(
    queries_PD: Tensor,
    shifted_PD: Tensor,
    rows_UD: Tensor,
    bias_PW: Tensor,
    targets_P: Tensor,
    window_PW: Tensor,
    pool_M: Tensor,
    log_weights_M: Tensor | None,
    own_PK: Tensor,
    own_log_weight: Tensor,
    weights_P: Tensor,
    with_gradients: bool,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    (P, D), (U, _), W, M, K = queries_PD.shape, rows_UD.shape, window_PW.shape[1], len(pool_M), own_PK.shape[1]
    weights_P = weights_P.to(queries_PD.dtype)
    weight_M = queries_PD.new_zeros(M) if log_weights_M is None else log_weights_M.to(queries_PD.dtype)
    pool_MD = rows_UD.index_select(0, pool_M)
    column_U = torch.full((U + 1,), -1, device=pool_M.device)  # of the pool; the last entry is that of empty slots
    column_U[pool_M] = torch.arange(M, device=pool_M.device)
    # columns of the logits: the pool, a column for what is not there, the position's own, the window, the target
    N = M + 1 + K + W + 1
    size = max(1, min(_GATHERED // (D * (K + W + 1)), _GATHERED // N))
    nll_P, dbias_PW = queries_PD.new_empty(P), torch.zeros_like(bias_PW)
    dq_PD, ds_PD = torch.empty_like(queries_PD), torch.empty_like(shifted_PD)
    drows_UD, dpool_MD = torch.zeros_like(rows_UD), torch.zeros_like(pool_MD)
    marked = torch.zeros(min(size, P) if K else 0, U + 1, dtype=torch.bool, device=pool_M.device)
    for part in parts(P, size):
        q_CD, s_CD, weight_C1 = queries_PD[part], shifted_PD[part], weights_P[part, None]
        target_C1, window_CW, own_CK = targets_P[part, None], window_PW[part], own_PK[part]
        index = torch.cat((own_CK, window_CW.clamp(min=0), target_C1), 1)
        rows_CND = rows_UD.index_select(0, index.flatten()).view(len(q_CD), -1, D)
        logits_CN = q_CD.new_empty(len(q_CD), N)
        pool, own, window, target = logits_CN.split([M + 1, K, W, 1], 1)
        torch.addmm(weight_M, q_CD, pool_MD.T, out=pool[:, :M])
        torch.bmm(rows_CND[:, :K], q_CD[..., None], out=own[..., None])
        own.add_(own_log_weight.to(own.dtype))
        torch.bmm(rows_CND[:, K : K + W], s_CD[..., None], out=window[..., None])
        target.copy_((rows_CND[:, -1] * q_CD).sum(1, keepdim=True))
        window.add_(bias_PW[part]).masked_fill_(window_CW < 0, -torch.inf)
        # every item once: the window's is the one that counts, then the target's
        pool.scatter_(1, column_U[torch.cat((window_CW, target_C1), 1)] % (M + 1), -torch.inf)
        pool[:, M] = -torch.inf
        if K:
            window_or_empty = torch.where(window_CW < 0, U, window_CW)
            here = marked[: len(q_CD)].scatter_(1, window_or_empty, True).scatter_(1, target_C1, True)
            own.masked_fill_(here.gather(1, own_CK), -torch.inf)
            here.scatter_(1, window_or_empty, False).scatter_(1, target_C1, False)
        slot_C = torch.cat((window_CW == target_C1, torch.ones_like(target_C1, dtype=torch.bool)), 1).int().argmax(1)
        target.masked_fill_((slot_C < W)[:, None], -torch.inf)
        at_C1 = (M + 1 + K + slot_C)[:, None]
        logits_CN -= logits_CN.amax(1, keepdim=True)
        wanted_C = logits_CN.gather(1, at_C1).squeeze(1)
        sum_C1 = logits_CN.exp_().sum(1, keepdim=True)
        nll_P[part] = sum_C1.squeeze(1).log() - wanted_C
        if with_gradients:
            logits_CN *= weight_C1 / sum_C1
            logits_CN.scatter_add_(1, at_C1, -weight_C1)
            torch.mm(pool[:, :M], pool_MD, out=dq_PD[part])
            dq_PD[part] += torch.bmm(own[:, None], rows_CND[:, :K]).squeeze(1) + target * rows_CND[:, -1]
            torch.bmm(window[:, None], rows_CND[:, K : K + W], out=ds_PD[part, None])
            dbias_PW[part] = window
            dpool_MD.addmm_(pool[:, :M].T, q_CD)
            torch.mul(torch.cat((own, target), 1)[..., None], q_CD[:, None], out=rows_CND[:, : K + 1])
            drows_UD.index_add_(0, torch.cat((own_CK, target_C1), 1).flatten(), rows_CND[:, : K + 1].flatten(0, 1))
            torch.mul(window[..., None], s_CD[:, None], out=rows_CND[:, :W])
            drows_UD.index_add_(0, window_CW.clamp(min=0).flatten(), rows_CND[:, :W].flatten(0, 1))
    if with_gradients:
        drows_UD.index_add_(0, pool_M, dpool_MD)
    return nll_P.mul_(weights_P).sum(), (dq_PD, ds_PD, drows_UD, dbias_PW)
