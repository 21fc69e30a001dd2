"""Norms over the last dimension, without learned parameters."""

import torch.nn.functional as F
from torch import Tensor

EPS = 1e-6


def unit_length(x: Tensor) -> Tensor:
    """``x / |x|``: what cosine scores compare, in training and in serving."""
    return F.normalize(x, dim=-1, eps=EPS)


def rms_norm(x: Tensor) -> Tensor:
    """``x / sqrt(mean(x²) + eps)``."""
    return F.rms_norm(x, x.shape[-1:], eps=EPS)


def layer_norm(x: Tensor) -> Tensor:
    """``(x − mean) / sqrt(var + eps)``, biased variance."""
    return F.layer_norm(x, x.shape[-1:], eps=EPS)
