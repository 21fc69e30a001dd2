"""Columns that turn with the position: rotary keys and queries."""

import torch
from torch import Tensor


def turns(position: Tensor, frequencies: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin of ``position · frequency``: (X, 1, pairs) each, for rows (X, heads, 2 · pairs).

    Frequencies are float64: an angle of a late position has no digits to lose before the cosine is taken.
    """
    angles = position.unsqueeze(-1) * frequencies
    return angles.cos().to(dtype).unsqueeze(-2), angles.sin().to(dtype).unsqueeze(-2)


def rotated(x_XHK: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Columns 2m and 2m + 1 of every head turned by the m-th angle."""
    even, odd = x_XHK[..., ::2], x_XHK[..., 1::2]
    return torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1).flatten(-2)
