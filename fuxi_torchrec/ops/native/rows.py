"""Norms and SwiGLU, row by row: a pass over memory each where torch takes several."""

from typing import Any

import torch
from torch import Tensor


def rms_norm(x: Tensor) -> Tensor:
    """``x / sqrt(mean(x²) + eps)``."""
    return torch.ops.fuxi_torchrec.norm(x, False)


def layer_norm(x: Tensor) -> Tensor:
    """``(x − mean) / sqrt(var + eps)``, biased variance."""
    return torch.ops.fuxi_torchrec.norm(x, True)


def swiglu(x: Tensor) -> Tensor:
    """``a ⊙ SiLU(b)`` of the halves a, b of each row."""
    return torch.ops.fuxi_torchrec.swiglu(x)


def register() -> None:
    """Shapes without numbers, and the backward passes; once, after the library is loaded."""
    torch.library.register_fake("fuxi_torchrec::norm", lambda x, official: _like(x))
    torch.library.register_fake("fuxi_torchrec::norm_backward", lambda grad, x, official: _like(x))
    torch.library.register_fake("fuxi_torchrec::swiglu", lambda x: x.new_empty(len(x), x.shape[1] // 2))
    torch.library.register_fake("fuxi_torchrec::swiglu_backward", lambda grad, x: _like(x))
    torch.library.register_autograd("fuxi_torchrec::norm", _norm_backward, setup_context=_keep)
    torch.library.register_autograd("fuxi_torchrec::swiglu", _swiglu_backward, setup_context=_keep)


def _like(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, *ctx.official = inputs
    ctx.save_for_backward(x)


def _norm_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    _only_once()
    return torch.ops.fuxi_torchrec.norm_backward(grad, *ctx.saved_tensors, *ctx.official), None


def _swiglu_backward(ctx: Any, grad: Tensor) -> Tensor:
    _only_once()
    return torch.ops.fuxi_torchrec.swiglu_backward(grad, *ctx.saved_tensors)


def _only_once() -> None:
    if torch.is_grad_enabled():
        raise RuntimeError('the chunkwise form has no second derivatives: use form="parallel"')
