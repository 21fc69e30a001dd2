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
            return function(ctx, *(a.float() if isinstance(a, Tensor) and a.dtype in _LOW else a for a in args))

    return run  # type: ignore[return-value]
