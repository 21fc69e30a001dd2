"""Time, decays and states keep their precision under autocast."""

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import torch
from torch import Tensor

F = TypeVar("F", bound=Callable[..., Any])

_LOW = (torch.float16, torch.bfloat16)


def exactly(function: F) -> F:
    """Run without autocast, half-precision tensors taken as float32.

    For the forward and backward of a ``torch.autograd.Function``, where autocast would reach the matrix products.
    """

    @wraps(function)
    def run(ctx: Any, *args: Any) -> Any:
        device = next(a.device.type for a in args if isinstance(a, Tensor))
        with torch.autocast(device, enabled=False):
            return function(ctx, *(at_least_float32(a) if isinstance(a, Tensor) else a for a in args))

    return run  # type: ignore[return-value]


def without_autocast(function: F) -> F:
    """Run a function of tensors without autocast, whatever the caller's."""

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        device = next(a.device.type for a in args if isinstance(a, Tensor))
        with torch.autocast(device, enabled=False):
            return function(*args, **kwargs)

    return run  # type: ignore[return-value]


def at_least_float32(x: Tensor) -> Tensor:
    """Half precision as float32, anything wider as it is."""
    return x.float() if x.dtype in _LOW else x
