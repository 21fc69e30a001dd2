"""Powers of the decay, from integer clocks."""

import torch
from torch import Tensor

# e^-80 is nothing beside 1 and still a normal float32; below it denormals would double the time of a product.
LOWEST_EXPONENT = -80.0


def powers(log_decay_H: Tensor, ticks: Tensor) -> Tensor:
    """``r^ticks`` for every head: (H, *ticks.shape).

    Ticks are differences of int64 clocks: they become floats only here, after the subtraction, so that no two large
    floats are ever subtracted. They must not be negative.
    """
    exponent = log_decay_H.reshape(-1, *[1] * ticks.dim()) * ticks.to(log_decay_H.dtype)
    return torch.exp(exponent.clamp(min=LOWEST_EXPONENT))
