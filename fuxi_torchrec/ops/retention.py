"""Retention, chunk by chunk: the decay depends on the distance between events only.

Inside a chunk the definition, ``((QKᵀ) ⊙ D) V`` with one D for all chunks; across chunks the carried state. The
backward pass keeps the states at chunk boundaries and recomputes everything inside a chunk.
"""

from typing import Any

import torch
from torch import Tensor

from fuxi_torchrec.ops.chunks import Chunks, last_state, scan, scan_backward
from fuxi_torchrec.ops.decay import powers
from fuxi_torchrec.ops.precision import apply, at_least_float32, exactly, once, without_autocast


def retention(
    q_THK: Tensor,
    k_THK: Tensor,
    v_THV: Tensor,
    log_decay_H: Tensor,
    chunks: Chunks,
    initial_BHKV: Tensor | None = None,
    lag: int = 0,
    with_state: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """``y_i = Σ_{j≤i} λ^{i−j+lag} (q_i·k_j) v_j``, and the state after each user's last event."""
    return apply(_Retention, q_THK, k_THK, v_THV, log_decay_H, initial_BHKV, chunks, lag, with_state)


@without_autocast
def retention_state(k_THK: Tensor, v_THV: Tensor, log_decay_H: Tensor, chunks: Chunks, initial_BHKV: Tensor) -> Tensor:
    """The state after each user's last event, where outputs are not needed. Not differentiable."""
    decays = _Decays(log_decay_H, chunks, lag=0)
    k_NHCK, v_NHCV = (chunks.cut(at_least_float32(x)) for x in (k_THK, v_THV))
    return last_state((k_NHCK * decays.key_NHC1).mT @ v_NHCV, decays.chunk_NH11, chunks, initial_BHKV)


class _Decays:
    """The powers of λ inside chunks. S is the state at the clock of the chunk's first event."""

    def __init__(self, log_decay_H: Tensor, chunks: Chunks, lag: int) -> None:
        slot_C = torch.arange(chunks.size, device=log_decay_H.device)
        causal_CC = torch.ones(chunks.size, chunks.size, dtype=torch.bool, device=log_decay_H.device).tril()
        # ticks between events j and i, from the state to a query, from a key to the next chunk's first event
        self.between_CC = (slot_C[:, None] - slot_C + lag).where(causal_CC, 0)
        self.to_query_C = slot_C + lag
        self.to_next_NC = (chunks.filled_N[:, None] - slot_C).clamp(min=0)
        self.across_N = chunks.filled_N
        self.D_HCC = powers(log_decay_H, self.between_CC) * causal_CC
        self.query_HC1 = powers(log_decay_H, self.to_query_C)[..., None]
        self.key_NHC1 = powers(log_decay_H, self.to_next_NC).transpose(0, 1)[..., None]
        self.chunk_NH11 = powers(log_decay_H, self.across_N).T[..., None, None]


class _Retention(torch.autograd.Function):
    @staticmethod
    @exactly
    def forward(
        ctx: Any,
        q_THK: Tensor,
        k_THK: Tensor,
        v_THV: Tensor,
        log_decay_H: Tensor,
        initial_BHKV: Tensor | None,
        chunks: Chunks,
        lag: int,
        with_state: bool,
    ) -> tuple[Tensor, Tensor | None]:
        decays = _Decays(log_decay_H, chunks, lag)
        q_NHCK, k_NHCK, v_NHCV = (chunks.cut(x) for x in (q_THK, k_THK, v_THV))
        update_NHKV = (k_NHCK * decays.key_NHC1).mT @ v_NHCV
        S_AHKV, final_BHKV = scan(update_NHKV, decays.chunk_NH11, chunks, initial_BHKV, with_state)
        S_AHKV, fresh = S_AHKV.to(v_THV.dtype), chunks.count - len(S_AHKV)
        y_NHCV = (q_NHCK @ k_NHCK.mT).mul_(decays.D_HCC) @ v_NHCV
        y_NHCV[fresh:] += (q_NHCK[fresh:] * decays.query_HC1) @ S_AHKV
        ctx.save_for_backward(q_THK, k_THK, v_THV, log_decay_H, S_AHKV)
        ctx.chunks, ctx.lag, ctx.initial_dtype = chunks, lag, None if initial_BHKV is None else initial_BHKV.dtype
        return chunks.join(y_NHCV), final_BHKV

    @staticmethod
    @once
    @exactly
    def backward(ctx: Any, grad_y_THV: Tensor, grad_final_BHKV: Tensor | None) -> tuple[Tensor | None, ...]:
        q_THK, k_THK, v_THV, log_decay_H, S = ctx.saved_tensors
        chunks: Chunks = ctx.chunks
        decays = _Decays(log_decay_H, chunks, ctx.lag)
        q, k, v, dy = (chunks.cut(x) for x in (q_THK, k_THK, v_THV, grad_y_THV))
        old = slice(chunks.count - len(S), None)  # chunks with a state before them

        dS_AHKV = (q[old] * decays.query_HC1).mT @ dy[old]
        has_initial = ctx.initial_dtype is not None
        dU_NHKV, dS0_BHKV = scan_backward(dS_AHKV, grad_final_BHKV, decays.chunk_NH11, chunks, has_initial)

        dA_NHCC = dy @ v.mT
        A_NHCC = (q @ k.mT).mul_(decays.D_HCC)
        dlog_H = ((dA_NHCC * A_NHCC).sum(0) * decays.between_CC).sum((1, 2))
        dv = A_NHCC.mT @ dy + (k * decays.key_NHC1) @ dU_NHKV
        dA_NHCC *= decays.D_HCC
        dq_past = (dy[old] @ S.mT) * decays.query_HC1
        dk_next = (v @ dU_NHKV.mT) * decays.key_NHC1
        dq = dA_NHCC @ k
        dq[old] += dq_past
        dk = dA_NHCC.mT @ q + dk_next

        dlog_H = dlog_H + ((dq_past * q[old]).sum((0, 3)) * decays.to_query_C).sum(1)
        dlog_H = dlog_H + ((dk_next * k).sum(3) * decays.to_next_NC[:, None]).sum((0, 2))
        carried_AH = (S * dU_NHKV[old] * decays.chunk_NH11[old]).sum((2, 3))
        dlog_H = dlog_H + (carried_AH * decays.across_N[old, None]).sum(0)
        dS0_BHKV = None if dS0_BHKV is None else dS0_BHKV.to(ctx.initial_dtype)
        return chunks.join(dq), chunks.join(dk), chunks.join(dv), dlog_H, dS0_BHKV, None, None, None
