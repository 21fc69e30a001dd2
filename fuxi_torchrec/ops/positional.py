"""The positional channel, chunk by chunk: no decay, and keys and queries that depend on the position alone.

The map of a chunk is therefore the same for every user at the same position and is computed once per position.
"""

from typing import Any

import torch
from torch import Tensor

from fuxi_torchrec.ops.chunks import Chunks, last_state, scan, scan_backward
from fuxi_torchrec.ops.placement import placed
from fuxi_torchrec.ops.precision import apply, at_least_float32, exactly, once, without_autocast


class ChunkPositions:
    """Which rows of the kernel table each chunk uses, and which chunks use the same.

    Args:
        chunks: the layout.
        rows: rows of the table; later positions use the last one.
        start_B: position of each user's first event; 0 if None.
    """

    index_N: Tensor | None

    def __init__(self, chunks: Chunks, rows: int, start_B: Tensor | None = None) -> None:
        device = chunks.device
        slot_C = torch.arange(chunks.size, device=device)
        if start_B is not None and start_B.device.type != "cpu":  # which are equal only the device knows: all apart
            begin_N = chunks.begin_N + start_B[chunks.user_N]
            self.row_MC, self.index_N = (begin_N[:, None] + slot_C).clamp(max=rows - 1), None
            return
        begin_N = chunks.host_begin_N if start_B is None else chunks.host_begin_N + start_B[chunks.user_N]
        begin_M, index_N = torch.unique(begin_N.clamp(max=rows - 1), return_inverse=True)
        self.row_MC = (placed(begin_M, device)[:, None] + slot_C).clamp(max=rows - 1)
        # without sharing, chunks of one user, in ascending order, are the unique ones as they stand
        shared = len(begin_M) < chunks.count
        self.index_N = placed(index_N, device) if shared or not chunks.in_order else None

    def spread(self, x_MX: Tensor) -> Tensor:
        """From positions to the chunks that use them."""
        return x_MX if self.index_N is None else x_MX.index_select(0, self.index_N)

    def gather(self, x_NX: Tensor) -> Tensor:
        """From chunks to the positions they use, summed."""
        if self.index_N is None:
            return x_NX
        return x_NX.new_zeros(len(self.row_MC), *x_NX.shape[1:]).index_add_(0, self.index_N, x_NX)


def positional(
    v_TD: Tensor,
    table_RK: Tensor,
    gain: Tensor,
    skip: Tensor,
    chunks: Chunks,
    positions: ChunkPositions,
    initial_BKD: Tensor | None = None,
    with_state: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """``y_i = gain · Σ_{j≤i} (κ_i·κ_j) v_j + skip · v_i``, κ_i the table's row; and the state after the last event."""
    return apply(_Positional, v_TD, table_RK, gain, skip, initial_BKD, chunks, positions, with_state)


@without_autocast
def positional_state(
    v_TD: Tensor, table_RK: Tensor, chunks: Chunks, positions: ChunkPositions, initial_BKD: Tensor
) -> Tensor:
    """The state after each user's last event, where outputs are not needed. Not differentiable."""
    v_NCD = chunks.cut(at_least_float32(v_TD).unsqueeze(1)).squeeze(1)
    kernel_NCK = positions.spread(table_RK[positions.row_MC])
    return last_state(kernel_NCK.mT @ v_NCD, None, chunks, initial_BKD)


def _maps(table_RK: Tensor, positions: ChunkPositions) -> tuple[Tensor, Tensor]:
    """κ of each position's chunk, and its causal map ``κκᵀ``."""
    kernel_MCK = table_RK[positions.row_MC]
    return kernel_MCK, (kernel_MCK @ kernel_MCK.mT).tril_()


class _Positional(torch.autograd.Function):
    @staticmethod
    @exactly
    def forward(
        ctx: Any,
        v_TD: Tensor,
        table_RK: Tensor,
        gain: Tensor,
        skip: Tensor,
        initial_BKD: Tensor | None,
        chunks: Chunks,
        positions: ChunkPositions,
        with_state: bool,
    ) -> tuple[Tensor, Tensor | None]:
        v_NCD = chunks.cut(v_TD.unsqueeze(1)).squeeze(1)
        kernel_MCK, map_MCC = _maps(table_RK, positions)
        kernel_NCK = positions.spread(kernel_MCK)
        S_AKD, final_BKD = scan(kernel_NCK.mT @ v_NCD, None, chunks, initial_BKD, with_state)
        S_AKD, fresh = S_AKD.to(v_TD.dtype), chunks.count - len(S_AKD)
        map_MCC.mul_(gain).diagonal(dim1=1, dim2=2).add_(skip)
        y_NCD = torch.bmm(positions.spread(map_MCC), v_NCD)
        y_NCD[fresh:].baddbmm_(kernel_NCK[fresh:] * gain, S_AKD)
        ctx.save_for_backward(v_TD, table_RK, gain, skip, S_AKD)
        ctx.chunks, ctx.positions = chunks, positions
        ctx.initial_dtype = None if initial_BKD is None else initial_BKD.dtype
        return chunks.join(y_NCD.unsqueeze(1)).squeeze(1), final_BKD

    @staticmethod
    @once
    @exactly
    def backward(ctx: Any, grad_y_TD: Tensor, grad_final_BKD: Tensor | None) -> tuple[Tensor | None, ...]:
        v_TD, table_RK, gain, skip, S = ctx.saved_tensors
        chunks: Chunks = ctx.chunks
        positions: ChunkPositions = ctx.positions
        v, dy = (chunks.cut(x.unsqueeze(1)).squeeze(1) for x in (v_TD, grad_y_TD))
        old = slice(chunks.count - len(S), None)  # chunks with a state before them
        kernel_MCK, map_MCC = _maps(table_RK, positions)
        kernel = positions.spread(kernel_MCK)

        dS_AKD = (kernel[old] * gain).mT @ dy[old]
        dU_NKD, dS0_BKD = scan_backward(dS_AKD, grad_final_BKD, None, chunks, ctx.initial_dtype is not None)
        dquery_ACK = dy[old] @ S.mT
        dA_MCC = positions.gather(torch.bmm(dy, v.mT)).tril_()
        dkernel_NCK = v @ dU_NKD.mT
        dkernel_NCK[old] += dquery_ACK * gain
        dkernel_MCK = positions.gather(dkernel_NCK)
        dkernel_MCK = dkernel_MCK + ((dA_MCC + dA_MCC.mT) * gain) @ kernel_MCK
        dtable_RK = torch.zeros_like(table_RK).index_put_((positions.row_MC,), dkernel_MCK, accumulate=True)
        dgain = (dA_MCC * map_MCC).sum() + (dquery_ACK * kernel[old]).sum()
        dskip = dA_MCC.diagonal(dim1=1, dim2=2).sum()

        map_MCC.mul_(gain).diagonal(dim1=1, dim2=2).add_(skip)
        dv = torch.baddbmm(kernel @ dU_NKD, positions.spread(map_MCC).mT, dy)
        initial = None if dS0_BKD is None else dS0_BKD.to(ctx.initial_dtype)
        dv_TD = chunks.join(dv.unsqueeze(1)).squeeze(1)
        return dv_TD, dtable_RK, dgain.reshape(gain.shape), dskip.reshape(skip.shape), initial, None, None, None
