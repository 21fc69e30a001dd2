"""The temporal channel, chunk by chunk: keys, queries and decays that depend on the events' times alone.

Scale k has the phase φ_k(t) = 2π (t mod P_k) / P_k. Its sin head weighs a past value by sin(φ(t_{i+1}) − φ(t_j)), its
cos head by cos of the same, both by r_k^{c_{i+1} − c_j}. The phases' part of a chunk's map does not depend on any
weight: it is made once and shared by all blocks (:class:`ChunkTimes`).
"""

from typing import Any

import torch
from torch import Tensor

from fuxi_torchrec.ops.chunks import Chunks, last_state, scan, scan_backward
from fuxi_torchrec.ops.decay import LOWEST_EXPONENT, powers
from fuxi_torchrec.ops.precision import apply, at_least_float32, exactly, once, without_autocast

# Of the state and the decays between chunks or events. With even gaps every step multiplies by the same factor: in
# float32 its rounding would add up over thousands of steps.
STATE_DTYPE = torch.float64


def phase_vectors(times: Tensor, periods_H: Tensor, dtype: torch.dtype) -> Tensor:
    """(cos φ_k(t), sin φ_k(t)) of int64 times, shape (*times.shape, H, 2); the modulus is taken in int64."""
    theta_H = 2 * torch.pi / periods_H.to(torch.float64)
    angle = (torch.remainder(times.unsqueeze(-1), periods_H).to(torch.float64) * theta_H).to(dtype)
    return torch.stack((angle.cos(), angle.sin()), dim=-1)


def query_vectors(at_next: Tensor) -> Tensor:
    """Queries of the sin heads (sin, −cos), then of the cos heads (cos, sin): (..., H, 2) to (..., 2H, 2)."""
    cos, sin = at_next.unbind(-1)
    return torch.cat((torch.stack((sin, -cos), dim=-1), torch.stack((cos, sin), dim=-1)), dim=-2)


class ChunkTimes:
    """What the times alone decide about each chunk.

    Args:
        chunks: the layout.
        key_THK: phase vectors of each event's own time (T, H, 2).
        query_TGK: queries at the next event's time, sin heads then cos heads (T, 2H, 2).
        key_clock_T: int64, the clock at each event.
        next_clock_T: int64, the clock at the user's next event, or at the request.
    """

    @without_autocast
    def __init__(
        self, chunks: Chunks, key_THK: Tensor, query_TGK: Tensor, key_clock_T: Tensor, next_clock_T: Tensor
    ) -> None:
        self.chunks = chunks
        self.key_NHCK, self.query_NGCK = chunks.cut(key_THK), chunks.cut(query_TGK)
        scales = key_THK.shape[1]
        # padding stands still at the end of its chunk
        last_N1 = (chunks.filled_N - 1)[:, None]
        end_N1 = next_clock_T[chunks.row_NC.gather(1, last_N1)]
        key_clock_NC = key_clock_T[chunks.row_NC].where(chunks.filled_NC, end_N1)
        next_clock_NC = next_clock_T[chunks.row_NC].where(chunks.filled_NC, end_N1)
        start_N1 = key_clock_NC[:, :1]
        self.to_query_NC = next_clock_NC - start_N1
        self.to_next_NC = end_N1 - key_clock_NC
        self.across_N = (end_N1 - start_N1).squeeze(1)
        causal_CC = torch.ones(chunks.size, chunks.size, dtype=torch.bool, device=key_THK.device).tril()
        between_NCC = (next_clock_NC[:, :, None] - key_clock_NC[:, None, :]).where(causal_CC, 0)
        self.between_NCC = between_NCC.to(key_THK.dtype)
        # (N, 2, H, C, C): sin heads, cos heads; zero above the diagonal
        phase = self.query_NGCK.unflatten(1, (2, scales)) @ self.key_NHCK.mT.unsqueeze(1)
        self.phase_N2HCC = phase.tril_()


def temporal(
    v_TGV: Tensor,
    log_decay_H: Tensor,
    gain_G: Tensor,
    skip_G: Tensor,
    times: ChunkTimes,
    initial_BGKV: Tensor | None = None,
    with_state: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """``y_i = gain · Σ_{j≤i} r^{c_{i+1} − c_j} sin|cos(φ(t_{i+1}) − φ(t_j)) v_j + skip · v_i``; and the state after.

    Values, gains and skips are those of the 2H sub-heads: H sin heads, then H cos heads. The state is float64.
    """
    return apply(_Temporal, v_TGV, log_decay_H, gain_G, skip_G, initial_BGKV, times, with_state)


@without_autocast
def temporal_state(v_TGV: Tensor, log_decay_H: Tensor, times: ChunkTimes, initial_BGKV: Tensor) -> Tensor:
    """The state after each user's last event, where outputs are not needed. Not differentiable."""
    v_NGCV = times.chunks.cut(at_least_float32(v_TGV))
    key_NHCK = times.key_NHCK * _Decays.to_next(log_decay_H, times)
    across = _Decays.across(log_decay_H, times, STATE_DTYPE)
    return last_state(_updates(key_NHCK, v_NGCV), across, times.chunks, initial_BGKV, STATE_DTYPE)


def _updates(key_NHCK: Tensor, v_NGCV: Tensor) -> Tensor:
    """What each chunk adds to the state: ``kᵀv``, the sin and cos heads of a scale sharing their keys."""
    return (key_NHCK.mT.unsqueeze(1) @ v_NGCV.unflatten(1, (2, -1))).flatten(1, 2)


class _Decays:
    """The powers of r inside chunks, the sin and cos heads of a scale sharing them."""

    def __init__(self, log_decay_H: Tensor, times: ChunkTimes) -> None:
        exponent = log_decay_H[:, None, None] * times.between_NCC[:, None]
        self.inside_NHCC = exponent.clamp_(min=LOWEST_EXPONENT).exp_()
        self.query_N1HC1 = powers(log_decay_H, times.to_query_NC).transpose(0, 1)[:, None, :, :, None]
        self.key_NHC1 = self.to_next(log_decay_H, times)

    @staticmethod
    def to_next(log_decay_H: Tensor, times: ChunkTimes) -> Tensor:
        """From each event to the end of its chunk: (N, H, C, 1)."""
        return powers(log_decay_H, times.to_next_NC).transpose(0, 1)[..., None]

    @staticmethod
    def across(log_decay_H: Tensor, times: ChunkTimes, dtype: torch.dtype) -> Tensor:
        """From chunk to chunk: (N, 2H, 1, 1)."""
        return powers(log_decay_H.to(dtype), times.across_N).T.repeat(1, 2)[..., None, None]


class _Temporal(torch.autograd.Function):
    @staticmethod
    @exactly
    def forward(
        ctx: Any,
        v_TGV: Tensor,
        log_decay_H: Tensor,
        gain_G: Tensor,
        skip_G: Tensor,
        initial_BGKV: Tensor | None,
        times: ChunkTimes,
        with_state: bool,
    ) -> tuple[Tensor, Tensor | None]:
        chunks, scales = times.chunks, len(log_decay_H)
        decays = _Decays(log_decay_H, times)
        v_NGCV = chunks.cut(v_TGV)
        key_NHCK = times.key_NHCK * decays.key_NHC1
        update_NGKV = _updates(key_NHCK, v_NGCV)
        across = _Decays.across(log_decay_H, times, STATE_DTYPE)
        S_AGKV, final_BGKV = scan(update_NGKV, across, chunks, initial_BGKV, with_state, STATE_DTYPE)
        S_AGKV, fresh = S_AGKV.to(v_TGV.dtype), chunks.count - len(S_AGKV)

        map_NGCC = (times.phase_N2HCC * decays.inside_NHCC[:, None]).flatten(1, 2)
        map_NGCC *= gain_G[:, None, None]
        map_NGCC.diagonal(dim1=2, dim2=3).add_(skip_G[:, None])
        query = (times.query_NGCK.unflatten(1, (2, scales)) * decays.query_N1HC1).flatten(1, 2)
        y_NGCV = map_NGCC @ v_NGCV
        y_NGCV[fresh:] += (query[fresh:] * gain_G[:, None, None]) @ S_AGKV
        ctx.save_for_backward(v_TGV, log_decay_H, gain_G, skip_G, S_AGKV)
        ctx.times, ctx.initial_dtype = times, None if initial_BGKV is None else initial_BGKV.dtype
        return chunks.join(y_NGCV), final_BGKV

    @staticmethod
    @once
    @exactly
    def backward(ctx: Any, grad_y_TGV: Tensor, grad_final_BGKV: Tensor | None) -> tuple[Tensor | None, ...]:
        v_TGV, log_decay_H, gain_G, skip_G, S = ctx.saved_tensors
        times: ChunkTimes = ctx.times
        chunks, scales = times.chunks, len(log_decay_H)
        decays = _Decays(log_decay_H, times)
        v, dy = chunks.cut(v_TGV), chunks.cut(grad_y_TGV)
        old = slice(chunks.count - len(S), None)  # chunks with a state before them
        gain = gain_G[:, None, None]
        query = (times.query_NGCK.unflatten(1, (2, scales)) * decays.query_N1HC1).flatten(1, 2)
        key = (times.key_NHCK * decays.key_NHC1).repeat(1, 2, 1, 1)
        across = _Decays.across(log_decay_H, times, v.dtype)

        dS_AGKV = (query[old] * gain).mT @ dy[old]
        dU_NGKV, dS0_BGKV = scan_backward(dS_AGKV, grad_final_BGKV, across, chunks, ctx.initial_dtype is not None)

        # inside the chunk
        map_NGCC = (times.phase_N2HCC * decays.inside_NHCC[:, None]).flatten(1, 2)
        dA_NGCC = dy @ v.mT
        dskip_G = dA_NGCC.diagonal(dim1=2, dim2=3).sum((0, 2))
        weight_NGCC = dA_NGCC * map_NGCC
        dgain_G = weight_NGCC.sum((0, 2, 3))
        dlog_G = gain_G * (weight_NGCC * times.between_NCC[:, None]).sum((0, 2, 3))
        # through the state: the query's part, the key's part, the carry
        read_AGC = ((dy[old] @ S.mT) * query[old]).sum(3)
        dgain_G = dgain_G + read_AGC.sum((0, 2))
        dlog_G = dlog_G + gain_G * (read_AGC * times.to_query_NC[old, None]).sum((0, 2))
        written_NGC = ((v @ dU_NGKV.mT) * key).sum(3)
        dlog_G = dlog_G + (written_NGC * times.to_next_NC[:, None]).sum((0, 2))
        carried_AG = (S * dU_NGKV[old] * across[old]).sum((2, 3))
        dlog_G = dlog_G + (carried_AG * times.across_N[old, None]).sum(0)

        map_NGCC *= gain
        map_NGCC.diagonal(dim1=2, dim2=3).add_(skip_G[:, None])
        dv = map_NGCC.mT @ dy + key @ dU_NGKV
        initial = None if dS0_BGKV is None else dS0_BGKV.to(ctx.initial_dtype)
        return chunks.join(dv), dlog_G.view(2, scales).sum(0), dgain_G, dskip_G, initial, None, None
