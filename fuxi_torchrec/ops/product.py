"""Rows times a weight matrix, by the library that is fast on this CPU.

torch's CPU products are MKL's, which leaves half of a non-Intel CPU's AVX-512 unused; oneDNN, which torch has too, does
not. Both are float32 throughout.
"""

from typing import Any

import torch
from torch import Tensor

from fuxi_torchrec.ops import backends

_FEW = 32  # rows for which finding oneDNN's kernel takes longer than the product


def product(x_TD: Tensor, weight: Tensor) -> Tensor:
    """``x · W``, differentiable once where oneDNN computes it."""
    if len(x_TD) < _FEW or not backends.onednn_product(x_TD):
        return x_TD @ weight
    return _Product.apply(x_TD, weight)


def _linear(x: Tensor, weight: Tensor) -> Tensor:
    """``x · Wᵀ`` by oneDNN."""
    return torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        x, weight = x.contiguous(), weight.contiguous()  # oneDNN has fast kernels for plain layouts alone
        ctx.save_for_backward(x, weight)
        return _linear(x, weight.t())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        if torch.is_grad_enabled():
            raise RuntimeError('the chunkwise form has no second derivatives: use form="parallel"')
        x, weight = ctx.saved_tensors
        grad = grad.contiguous()
        by_x, by_weight = ctx.needs_input_grad
        return _linear(grad, weight) if by_x else None, _turned(x, grad) if by_weight else None


def _turned(x: Tensor, grad: Tensor) -> Tensor:
    """``xᵀ · grad``: oneDNN wants a copy of xᵀ, which pays where x is much the narrower."""
    return _linear(x.t(), grad.t()) if grad.shape[1] >= 8 * x.shape[1] else x.t() @ grad
