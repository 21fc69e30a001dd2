"""Which implementation of an operator runs: chosen here and nowhere else, by device, dtype and what is installed.

``torch`` is always there and defines the results. ``native``, C++ kernels for CPUs in float32, is taken where its
library was built. Results agree to float rounding.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from fuxi_torchrec.ops import native

BEST = ""  # the fastest there is
_wanted = BEST


def available() -> list[str]:
    """Names for :func:`use`: torch, native where it is there, and the native kernels of each instruction set.

    Example:
        >>> "torch" in available()
        True
    """
    sets = native.instruction_sets()
    return ["torch", *(["native"] if sets else []), *(f"native-{name}" for name in sets)]


def missing() -> str:
    """In a line, why there are no native kernels; empty if there are."""
    return native.load()


@contextmanager
def use(name: str) -> Iterator[None]:
    """For tests and benchmarks: all operators by one backend of :func:`available`.

    Example:
        >>> with use("torch"):
        ...     native_block(torch.zeros(1))
        False
    """
    global _wanted
    if name not in available():
        because = missing()
        raise ValueError(f"no backend {name!r} here, only {', '.join(available())}{': ' + because if because else ''}")
    before = _wanted
    _set(name)
    try:
        yield
    finally:
        _set(before)


def _set(name: str) -> None:
    global _wanted
    _wanted = name
    if native.instruction_sets():
        native.choose(name.removeprefix("native").removeprefix("-") if name.startswith("native") else "")


def native_block(like: Tensor) -> bool:
    """Whether a block over such rows runs in native kernels."""
    return (
        _wanted != "torch"
        and like.device.type == "cpu"
        and like.dtype == torch.float32
        and not torch.is_autocast_enabled("cpu")
        and native.ready()
    )
