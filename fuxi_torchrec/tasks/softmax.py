"""Sampled softmax losses of the next item.

Each gives ``Σ_p weight_p · nll_p`` over positions; what to divide by is the caller's choice. The gradients are computed
together with the loss, a chunk of positions at a time, so that the logits of all positions never exist at once.
"""

from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fuxi_torchrec.encoders.norms import unit_length
from fuxi_torchrec.ops.precision import at_least_float32

Similarity = Literal["cosine", "dot"]

# elements of the buffers that are used again for every chunk
LOGITS = 2**19
GATHERED = 2**20


def scaled_items(rows_ND: Tensor, similarity: Similarity) -> Tensor:
    """Item vectors as the score wants them: of unit length for ``cosine``."""
    return unit_length(at_least_float32(rows_ND)) if similarity == "cosine" else rows_ND


def scaled_queries(rows_PD: Tensor, similarity: Similarity, temperature: float) -> Tensor:
    """Query vectors as the score wants them: like items, and divided by the temperature."""
    return scaled_items(rows_PD, similarity) / temperature


def candidate_softmax(
    queries_PD: Tensor,
    targets_PD: Tensor,
    candidates_MD: Tensor,
    log_weights_M: Tensor | None,
    target_column_P: Tensor,
    weights_P: Tensor,
) -> Tensor:
    """Softmax over one pool of distinct candidates for all positions.

    ``nll_p = log(exp(q_p·t_p) + Σ_m exp(q_p·c_m + log_weight_m)) − q_p·t_p``, without the m that is p's own target.

    Args:
        queries_PD, targets_PD, candidates_MD: scaled.
        log_weights_M: a constant added to each candidate's score; None for 0.
        target_column_P: int64, the candidate that is the position's own target, or −1 if the pool lacks it.
        weights_P: of the positions; a constant.
    """
    inputs = (queries_PD, targets_PD, candidates_MD)
    return known_gradients(_candidate_softmax, inputs, log_weights_M, target_column_P, weights_P)


def position_softmax(
    queries_PD: Tensor, target_rows_P: Tensor, rows_UD: Tensor, candidate_rows_PK: Tensor, weights_P: Tensor
) -> Tensor:
    """Softmax over each position's own candidates.

    ``nll_p = log(exp(q_p·t_p) + Σ_k exp(q_p·c_pk)) − q_p·t_p``, without the k that are p's own target.

    Args:
        queries_PD, rows_UD: scaled.
        target_rows_P, candidate_rows_PK: int64, places in ``rows_UD``.
        weights_P: of the positions; a constant.
    """
    inputs = (queries_PD, rows_UD)
    return known_gradients(_position_softmax, inputs, target_rows_P, candidate_rows_PK, weights_P)


def _candidate_softmax(
    queries_PD: Tensor,
    targets_PD: Tensor,
    candidates_MD: Tensor,
    log_weights_M: Tensor | None,
    target_column_P: Tensor,
    weights_P: Tensor,
    with_gradients: bool,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    (P, D), M = queries_PD.shape, len(candidates_MD)
    weights_P = weights_P.to(queries_PD.dtype)
    bias_M = queries_PD.new_zeros(M) if log_weights_M is None else log_weights_M.to(queries_PD.dtype)
    size = max(LOGITS // (M + 1), D)  # with very many candidates, logits as large as the candidates themselves
    buffer = queries_PD.new_empty(min(size, P), M + 1)
    nll_P = queries_PD.new_empty(P)
    dq_PD, dt_PD, dc_MD = torch.empty_like(queries_PD), torch.empty_like(targets_PD), torch.zeros_like(candidates_MD)
    for part in parts(P, size):
        q_CD, t_CD, weight_C1 = queries_PD[part], targets_PD[part], weights_P[part, None]
        logits_CN = buffer[: len(q_CD)]
        torch.addmm(bias_M, q_CD, candidates_MD.T, out=logits_CN[:, :M])
        # the last column is the target's; there, −1 does no harm
        logits_CN[torch.arange(len(q_CD), device=q_CD.device), target_column_P[part]] = -torch.inf
        logits_CN[:, M] = (q_CD * t_CD).sum(1)
        nll_P[part], sum_C1 = _exponentials(logits_CN)
        if with_gradients:
            share_C1 = weight_C1 / sum_C1
            at_target_C1 = logits_CN[:, M:] * share_C1 - weight_C1
            torch.mm(logits_CN[:, :M], candidates_MD, out=dq_PD[part])
            dq_PD[part].mul_(share_C1).addcmul_(at_target_C1, t_CD)
            torch.mul(at_target_C1, q_CD, out=dt_PD[part])
            dc_MD.addmm_(logits_CN[:, :M].T, q_CD * share_C1)
    return nll_P.mul_(weights_P).sum(), (dq_PD, dt_PD, dc_MD)


def _position_softmax(
    queries_PD: Tensor,
    rows_UD: Tensor,
    target_rows_P: Tensor,
    candidate_rows_PK: Tensor,
    weights_P: Tensor,
    with_gradients: bool,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    (P, D), N = queries_PD.shape, candidate_rows_PK.shape[1] + 1
    weights_P = weights_P.to(queries_PD.dtype)
    size = max(GATHERED // (N * D), 1)
    buffer = queries_PD.new_empty(min(size, P) * N, D)
    nll_P = queries_PD.new_empty(P)
    dq_PD, du_UD = torch.empty_like(queries_PD), torch.zeros_like(rows_UD)
    for part in parts(P, size):
        q_C1D, weight_C = queries_PD[part, None], weights_P[part]
        own_C1, others_CK = target_rows_P[part, None], candidate_rows_PK[part]
        index = torch.cat((others_CK, own_C1), 1).flatten()
        gathered = torch.index_select(rows_UD, 0, index, out=buffer[: len(index)])
        gathered_CND = gathered.view(-1, N, D)
        logits_CN = torch.bmm(q_C1D, gathered_CND.mT).squeeze(1)  # the last column is the target's
        logits_CN[:, :-1].masked_fill_(others_CK == own_C1, -torch.inf)
        nll_P[part], sum_C1 = _exponentials(logits_CN)
        if with_gradients:
            logits_CN *= weight_C[:, None] / sum_C1
            logits_CN[:, -1] -= weight_C
            torch.bmm(logits_CN[:, None], gathered_CND, out=dq_PD[part, None])
            torch.mul(logits_CN[..., None], q_C1D, out=gathered_CND)
            du_UD.index_add_(0, index, gathered)
    return nll_P.mul_(weights_P).sum(), (dq_PD, du_UD)


def _exponentials(logits_CN: Tensor) -> tuple[Tensor, Tensor]:
    """The loss of logits whose last column is the target's; they become ``exp(logit − largest)``, also given summed."""
    logits_CN -= logits_CN.amax(1, keepdim=True)
    target_C = logits_CN[:, -1].clone()
    sum_C1 = logits_CN.exp_().sum(1, keepdim=True)
    return sum_C1.squeeze(1).log() - target_C, sum_C1


def parts(count: int, size: int) -> Iterator[slice]:
    """Of so many positions, ``size`` at a time."""
    return (slice(begin, begin + size) for begin in range(0, count, size))


def known_gradients(
    compute: Callable[..., tuple[Tensor, tuple[Tensor, ...]]], inputs: tuple[Tensor, ...], *constants: Tensor | None
) -> Tensor:
    """A loss that computes its gradients by the inputs itself, if they are wanted."""
    wanted = torch.is_grad_enabled() and any(x.requires_grad for x in inputs)
    with torch.no_grad(), torch.autocast(inputs[0].device.type, enabled=False):
        loss, gradients = compute(*(at_least_float32(x) for x in inputs), *constants, wanted)
    return _KnownGradients.apply(loss, gradients, *inputs) if wanted else loss


class _KnownGradients(torch.autograd.Function):
    """A loss whose gradients are there already."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, gradients: tuple[Tensor, ...], *inputs: Tensor) -> Tensor:
        ctx.save_for_backward(*gradients)
        return loss.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *(grad_loss * gradient for gradient in ctx.saved_tensors)
