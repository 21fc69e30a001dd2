"""First-order recurrences with a decay of each element and event, chunk by chunk.

Inside a chunk event after event, over all chunks at once; across chunks the carried state. Decays are given as
logarithms, never positive, and only ever summed inside a chunk. The backward pass keeps the states at chunk boundaries
and computes the rest again.

Shape suffixes beside those of the package: W elements of a diagonal state; E channels, S state elements of a channel.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from fuxi_torchrec.ops.chunks import Chunks, scan, scan_backward
from fuxi_torchrec.ops.decay import LOWEST_EXPONENT
from fuxi_torchrec.ops.precision import apply, exactly, once

_GROUP_ELEMENTS = 2**18  # of the states of chunks that are computed together: they stay near the cache


def diagonal_scan(
    log_decay_TW: Tensor,
    update_TW: Tensor,
    chunks: Chunks,
    initial_BW: Tensor | None = None,
    with_state: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """``h_i = e^{l_i} h_{i−1} + b_i`` of every event, and of each user's last."""
    return apply(_Diagonal, log_decay_TW, update_TW, initial_BW, chunks, with_state)


def selective_scan(
    u_TE: Tensor,
    step_TE: Tensor,
    A_ES: Tensor,
    B_TS: Tensor,
    C_TS: Tensor,
    chunks: Chunks,
    initial_BES: Tensor | None = None,
    with_state: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """``h_i = e^{Δ_i A} h_{i−1} + Δ_i u_i B_iᵀ``, ``y_i = h_i C_i``: y, and h after each user's last event.

    A is negative. No tensor of all events and states exists.
    """
    return apply(_Selective, u_TE, step_TE, A_ES, B_TS, C_TS, initial_BES, chunks, with_state)


def _exp(exponent: Tensor) -> Tensor:
    return exponent.clamp(min=LOWEST_EXPONENT).exp_()


def _cut(chunks: Chunks, x_TW: Tensor) -> Tensor:
    """(N, C, W), zero where there is padding: a decay of 1 and nothing added."""
    return chunks.cut(x_TW.unsqueeze(1)).squeeze(1)


def _join(chunks: Chunks, x_NCW: Tensor) -> Tensor:
    return chunks.join(x_NCW.unsqueeze(1)).squeeze(1)


class _Diagonal(torch.autograd.Function):
    @staticmethod
    @exactly
    def forward(
        ctx: Any,
        log_decay_TW: Tensor,
        update_TW: Tensor,
        initial_BW: Tensor | None,
        chunks: Chunks,
        with_state: bool,
    ) -> tuple[Tensor, Tensor | None]:
        l_NCW, h_NCW = _cut(chunks, log_decay_TW), _cut(chunks, update_TW)
        decay_NCW = _exp(l_NCW)
        for r in range(1, chunks.size):
            h_NCW[:, r].addcmul_(decay_NCW[:, r], h_NCW[:, r - 1])
        passed_NCW = l_NCW.cumsum_(1)
        S_AW, final_BW = scan(h_NCW[:, -1], _exp(passed_NCW[:, -1]), chunks, initial_BW, with_state)
        S_AW, fresh = S_AW.to(h_NCW.dtype), chunks.count - len(S_AW)
        h_NCW[fresh:].addcmul_(_exp(passed_NCW[fresh:]), S_AW.unsqueeze(1))
        h_TW = _join(chunks, h_NCW)
        ctx.save_for_backward(log_decay_TW, h_TW, S_AW)
        ctx.chunks, ctx.has_initial = chunks, initial_BW is not None
        return h_TW, final_BW

    @staticmethod
    @once
    @exactly
    def backward(ctx: Any, grad_h_TW: Tensor, grad_final_BW: Tensor | None) -> tuple[Tensor | None, ...]:
        log_decay_TW, h_TW, S_AW = ctx.saved_tensors
        chunks: Chunks = ctx.chunks
        l_NCW, h_NCW, g_NCW = (_cut(chunks, x) for x in (log_decay_TW, h_TW, grad_h_TW))
        decay_NCW, fresh = _exp(l_NCW), chunks.count - len(S_AW)
        for r in reversed(range(chunks.size - 1)):
            g_NCW[:, r].addcmul_(decay_NCW[:, r + 1], g_NCW[:, r + 1])
        passed_NCW = l_NCW.cumsum_(1)
        before_AW = decay_NCW[fresh:, 0] * g_NCW[fresh:, 0]
        across_NW = _exp(passed_NCW[:, -1])
        after_NW, grad_initial_BW = scan_backward(before_AW, grad_final_BW, across_NW, chunks, ctx.has_initial)
        g_NCW.addcmul_(_exp(passed_NCW[:, -1:] - passed_NCW), after_NW.unsqueeze(1))
        previous_NCW = torch.zeros_like(h_NCW)
        previous_NCW[:, 1:] = h_NCW[:, :-1]
        previous_NCW[fresh:, 0] = S_AW
        grad_log = _join(chunks, previous_NCW.mul_(decay_NCW).mul_(g_NCW))
        return grad_log, _join(chunks, g_NCW), grad_initial_BW, None, None


class _Selective(torch.autograd.Function):
    @staticmethod
    @exactly
    def forward(
        ctx: Any,
        u_TE: Tensor,
        step_TE: Tensor,
        A_ES: Tensor,
        B_TS: Tensor,
        C_TS: Tensor,
        initial_BES: Tensor | None,
        chunks: Chunks,
        with_state: bool,
    ) -> tuple[Tensor, Tensor | None]:
        u, step, B, C = (_cut(chunks, x) for x in (u_TE, step_TE, B_TS, C_TS))
        alone = initial_BES is None and chunks.fresh(False) == chunks.count  # one chunk a user: nothing is carried
        update_NES = u.new_zeros(chunks.count, *A_ES.shape)
        if not alone:
            for group in _groups(chunks, A_ES):
                for r in range(chunks.size):
                    _advance(update_NES[group], u[group, r], step[group, r], A_ES, B[group, r])
        across_NES = None if alone else _exp(step.sum(1).unsqueeze(2) * A_ES)
        S_AES, final_BES = scan(update_NES, across_NES, chunks, initial_BES, with_state and not alone)
        S_AES = S_AES.to(u.dtype)
        y_NCE, h_NES = torch.empty_like(u), _starts(S_AES, chunks, A_ES)
        for group in _groups(chunks, A_ES):
            for r in range(chunks.size):
                _advance(h_NES[group], u[group, r], step[group, r], A_ES, B[group, r])
                torch.matmul(h_NES[group], C[group, r].unsqueeze(2), out=y_NCE[group, r].unsqueeze(2))
        if with_state and alone:
            final_BES = h_NES.new_zeros(len(chunks.lengths_B), *A_ES.shape)
            final_BES[chunks.user_N] = h_NES
        ctx.save_for_backward(u_TE, step_TE, A_ES, B_TS, C_TS, S_AES)
        ctx.chunks, ctx.has_initial = chunks, initial_BES is not None
        return _join(chunks, y_NCE), final_BES

    @staticmethod
    @once
    @exactly
    def backward(ctx: Any, grad_y_TE: Tensor, grad_final_BES: Tensor | None) -> tuple[Tensor | None, ...]:
        u_TE, step_TE, A_ES, B_TS, C_TS, S_AES = ctx.saved_tensors
        chunks: Chunks = ctx.chunks
        u, step, B, C, dy = (_cut(chunks, x) for x in (u_TE, step_TE, B_TS, C_TS, grad_y_TE))
        fresh = chunks.count - len(S_AES)
        # the gradient of the state before each chunk, from the chunk alone
        before_NES = u.new_zeros(chunks.count, *A_ES.shape)
        if len(S_AES):
            for group in _groups(chunks, A_ES):
                for r in reversed(range(chunks.size)):
                    g = before_NES[group].addcmul_(dy[group, r].unsqueeze(2), C[group, r].unsqueeze(1))
                    g.mul_(_exp(step[group, r].unsqueeze(2) * A_ES))
        across_NES = _exp(step.sum(1).unsqueeze(2) * A_ES)
        g_NES, dS0_BES = scan_backward(before_NES[fresh:], grad_final_BES, across_NES, chunks, ctx.has_initial)

        start_NES = _starts(S_AES, chunks, A_ES)
        du, dstep, dB, dC = (torch.empty_like(x) for x in (u, step, B, C))
        dA_ES = torch.zeros_like(A_ES)
        for group in _groups(chunks, A_ES):
            h, states = start_NES[group], []
            for r in range(chunks.size):
                states.append(h.clone())
                _advance(h, u[group, r], step[group, r], A_ES, B[group, r])
            g = g_NES[group]
            for r in reversed(range(chunks.size)):
                dC[group, r] = (dy[group, r].unsqueeze(1) @ h).squeeze(1)
                g.addcmul_(dy[group, r].unsqueeze(2), C[group, r].unsqueeze(1))
                along_nE = (g @ B[group, r].unsqueeze(2)).squeeze(2)
                dB[group, r] = ((step[group, r] * u[group, r]).unsqueeze(1) @ g).squeeze(1)
                du[group, r] = along_nE * step[group, r]
                h = states.pop()
                decay = _exp(step[group, r].unsqueeze(2) * A_ES)
                g.mul_(decay)
                carried = g * h  # of the exponent Δ·A
                dstep[group, r] = along_nE * u[group, r] + (carried * A_ES).sum(2)
                dA_ES += (carried * step[group, r].unsqueeze(2)).sum(0)
        du, dstep, dB, dC = (_join(chunks, x) for x in (du, dstep, dB, dC))
        return du, dstep, dA_ES, dB, dC, dS0_BES, None, None


def _groups(chunks: Chunks, A_ES: Tensor) -> Iterator[slice]:
    """Chunks that are computed together."""
    size = max(1, _GROUP_ELEMENTS // A_ES.numel())
    for begin in range(0, chunks.count, size):
        yield slice(begin, min(begin + size, chunks.count))


def _starts(S_AES: Tensor, chunks: Chunks, A_ES: Tensor) -> Tensor:
    """The state before every chunk, zero where there is none."""
    h_NES = S_AES.new_zeros(chunks.count, *A_ES.shape)
    h_NES[chunks.count - len(S_AES) :] = S_AES
    return h_NES


def _advance(h_nES: Tensor, u_nE: Tensor, step_nE: Tensor, A_ES: Tensor, B_nS: Tensor) -> None:
    """One event more, in place."""
    h_nES.mul_(_exp(step_nE.unsqueeze(2) * A_ES))
    h_nES.addcmul_((step_nE * u_nE).unsqueeze(2), B_nS.unsqueeze(1))
