"""Causal softmax attention over each user's events, tile by tile with a running maximum; see :mod:`tiles`."""

from typing import Any

import torch
from torch import Tensor

from fuxi_torchrec.ops.chunks import Chunks
from fuxi_torchrec.ops.precision import apply, exactly, once
from fuxi_torchrec.ops.tiles import add_product, causal, groups


def softmax_attention(
    q_THK: Tensor, k_THK: Tensor, v_THV: Tensor, chunks: Chunks, dropout: float = 0.0
) -> tuple[Tensor, Tensor]:
    """``y_i = Σ_{j≤i} Dropout(softmax_j(q_i·k_j / sqrt(K))) v_j`` of every head, and the logarithm of the sum (T, H).

    Which weights are dropped is drawn again in the backward pass, from one number of torch's generator.
    """
    seed = int(torch.randint(2**62, (1,))) if dropout else 0
    return apply(_Softmax, q_THK, k_THK, v_THV, chunks, dropout, seed)


class _Dropped:
    """Which weights stay, tile after tile; decided by 16 bits each, which is four times as quick as by floats."""

    def __init__(self, rate: float, seed: int, device: torch.device) -> None:
        self._dropped = round(rate * 2**16)
        self._generator = torch.Generator(device).manual_seed(seed) if self._dropped else None

    def apply(self, *weights: Tensor) -> tuple[Tensor, ...]:
        """The given weights of one tile with the same ones dropped, the others made larger."""
        if self._generator is None:
            return weights
        one = weights[0]
        bits = torch.empty((one.numel() + 3) // 4, dtype=torch.int64, device=one.device)
        bits.random_(-(2**63), None, generator=self._generator)
        stay = bits.view(torch.int16)[: one.numel()].view(one.shape) >= self._dropped - 2**15
        return tuple((weight * stay).mul_(1 / (1 - self._dropped / 2**16)) for weight in weights)


class _Softmax(torch.autograd.Function):
    @staticmethod
    @exactly
    def forward(
        ctx: Any, q_THK: Tensor, k_THK: Tensor, v_THV: Tensor, chunks: Chunks, dropout: float, seed: int
    ) -> tuple[Tensor, Tensor]:
        q, k, v = (chunks.cut(x) for x in (q_THK * q_THK.shape[2] ** -0.5, k_THK, v_THV))
        y, mask = torch.zeros_like(v), causal(chunks, v) < 1
        total = v.new_zeros(*v.shape[:3], 1)
        largest = torch.full_like(total, -torch.inf)
        dropped = _Dropped(dropout, seed, v.device)
        for distance in range(len(chunks.active)):
            for query, key in groups(chunks, distance, v.shape[1]):
                scores = q[query] @ k[key].mT
                if not distance:
                    scores.masked_fill_(mask, -torch.inf)
                above = torch.maximum(scores.amax(3, keepdim=True), largest[query])
                weights, less = scores.sub_(above).exp_(), torch.exp(largest[query] - above)
                largest[query] = above
                total[query].mul_(less).add_(weights.sum(3, keepdim=True))
                y[query] *= less
                (weights,) = dropped.apply(weights)
                add_product(y[query], weights, v[key])
        y.div_(total)
        log_sum = total.log_().add_(largest)
        y_THV = chunks.join(y)
        ctx.save_for_backward(q_THK, k_THK, v_THV, y_THV, log_sum)
        ctx.chunks, ctx.dropout, ctx.seed = chunks, dropout, seed
        log_sum_TH = chunks.join(log_sum).squeeze(2)
        ctx.mark_non_differentiable(log_sum_TH)
        return y_THV, log_sum_TH

    @staticmethod
    @once
    @exactly
    def backward(ctx: Any, grad_y_THV: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        q_THK, k_THK, v_THV, y_THV, log_sum = ctx.saved_tensors
        chunks: Chunks = ctx.chunks
        scale = q_THK.shape[2] ** -0.5
        q, k, v, dy = (chunks.cut(x) for x in (q_THK * scale, k_THK, v_THV, grad_y_THV))
        mean = chunks.cut((y_THV * grad_y_THV).sum(2, keepdim=True))  # of the weights' gradients, by the weights
        dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
        mask, dropped = causal(chunks, v), _Dropped(ctx.dropout, ctx.seed, v.device)
        for distance in range(len(chunks.active)):
            for query, key in groups(chunks, distance, v.shape[1]):
                weights = (q[query] @ k[key].mT).sub_(log_sum[query])
                if not distance:
                    weights.clamp_(max=0)  # those that the mask hides may be anything
                weights.exp_()
                if not distance:
                    weights.mul_(mask)
                used, grad = dropped.apply(weights, dy[query] @ v[key].mT)
                add_product(dv[key], used.mT, dy[query])
                grad = (grad - mean[query]).mul_(weights)
                add_product(dq[query], grad, k[key])
                add_product(dk[key], grad.mT, q[query])
        dq, dk, dv = (chunks.join(x) for x in (dq.mul_(scale), dk, dv))
        return dq, dk, dv, None, None, None
