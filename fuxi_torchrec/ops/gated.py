"""Retention whose decay differs from event to event, chunk by chunk; derivatives by autograd."""

import torch
from torch import Tensor

from fuxi_torchrec.ops.chunks import Chunks
from fuxi_torchrec.ops.decay import LOWEST_EXPONENT
from fuxi_torchrec.ops.precision import at_least_float32, without_autocast


@without_autocast
def gated_retention(q_TK: Tensor, k_TK: Tensor, v_THV: Tensor, log_decay_TH: Tensor, chunks: Chunks) -> Tensor:
    """``S_i = e^{l_i} S_{i−1} + k_iᵀ v_i``, ``y_i = q_i S_i``; queries and keys are shared by the heads."""
    q_TK, k_TK, v_THV, log_decay_TH = (at_least_float32(x) for x in (q_TK, k_TK, v_THV, log_decay_TH))
    q_N1CK, k_N1CK = (chunks.cut(x.unsqueeze(1)) for x in (q_TK, k_TK))
    v_NHCV = chunks.cut(v_THV)
    passed_NHC = chunks.cut(log_decay_TH.unsqueeze(2)).squeeze(3).cumsum(2)  # since the chunk's begin
    causal_CC = torch.ones(chunks.size, chunks.size, dtype=torch.bool, device=v_THV.device).tril()
    between = (passed_NHC.unsqueeze(3) - passed_NHC.unsqueeze(2)).masked_fill(~causal_CC, 0)
    scores_NHCC = (q_N1CK @ k_N1CK.mT) * (_exp(between) * causal_CC)
    to_end_NHC1 = _exp(passed_NHC[..., -1:] - passed_NHC).unsqueeze(3)
    update_NHKV = k_N1CK.mT @ (v_NHCV * to_end_NHC1)
    S_NHKV = _states(update_NHKV, _exp(passed_NHC[..., -1])[..., None, None], chunks)
    return chunks.join(scores_NHCC @ v_NHCV + (q_N1CK @ S_NHKV) * _exp(passed_NHC).unsqueeze(3))


def _exp(exponent: Tensor) -> Tensor:
    return exponent.clamp(min=LOWEST_EXPONENT).exp()


def _states(update_NX: Tensor, decay_NX: Tensor, chunks: Chunks) -> Tensor:
    """The state before each chunk; differentiable, unlike :func:`fuxi_torchrec.ops.chunks.scan`."""
    if not chunks.active:
        return update_NX
    before = [torch.zeros_like(update_NX[: chunks.active[0]])]
    for n in range(len(chunks.active) - 1):
        going_on, first = chunks.going_on(n), chunks.first[n]
        here = slice(first, first + going_on)
        before.append(decay_NX[here] * before[-1][:going_on] + update_NX[here])
    return torch.cat(before)
