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

    exact = without_autocast(function)

    @wraps(function)
    def run(ctx: Any, *args: Any) -> Any:
        return exact(ctx, *(at_least_float32(a) if isinstance(a, Tensor) else a for a in args))

    return run  # type: ignore[return-value]


def once(function: F) -> F:
    """For a backward that has no derivative itself: refuse ``create_graph``.

    torch's ``once_differentiable`` lets ``torch.autograd.grad`` pass by, with second derivatives that lack a part.
    """

    @wraps(function)
    def run(ctx: Any, *args: Any) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError('the chunkwise form has no second derivatives: use form="parallel"')
        return function(ctx, *args)

    return run  # type: ignore[return-value]


class _NothingKept:
    """Stands for a context where no backward pass follows."""

    def save_for_backward(self, *_: Tensor | None) -> None:
        pass

    def mark_non_differentiable(self, *_: Tensor) -> None:
        pass


def apply(function: type[torch.autograd.Function], *args: Any) -> Any:
    """``function.apply``; without gradients its forward alone, which is quicker for a few events."""
    if torch.is_grad_enabled():
        return function.apply(*args)
    return function.forward(_NothingKept(), *args)


def without_autocast(function: F) -> F:
    """Run a function of tensors without autocast, whatever the caller's."""

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        device = next(a.device.type for a in args if isinstance(a, Tensor))
        if not torch.is_autocast_enabled(device):  # switching off what is off takes longer than a small product
            return function(*args, **kwargs)
        with torch.autocast(device, enabled=False):
            return function(*args, **kwargs)

    return run  # type: ignore[return-value]


def at_least_float32(x: Tensor) -> Tensor:
    """Half precision as float32, anything wider as it is."""
    return x.float() if x.dtype in _LOW else x
