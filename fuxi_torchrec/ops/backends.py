"""Which implementation of an operator runs: chosen here and nowhere else, by device, dtype and what is installed.

``torch`` is always there and defines the results. ``native``, C++ kernels for CPUs in float32, is taken where its
library was built; ``triton``, kernels for CUDA devices in float32, where Triton is installed. Results agree to float
rounding.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from fuxi_torchrec.ops import native, triton

_wanted = ""  # the fastest there is
_found: native.Found | None = None


def found() -> native.Found:
    """The native kernels, loaded at the first call."""
    global _found
    if _found is None:
        _found = native.load()
    return _found


def load(kernels: Path) -> None:
    """Take the kernels of another library; it is an error if they cannot be used."""
    global _found
    there = native.load(kernels)
    if there.missing:
        raise ValueError(there.missing)
    _found = there


def available() -> list[str]:
    """Names for :func:`use`: torch; native where it is there, and the native kernels of each instruction set; triton.

    Example:
        >>> "torch" in available()
        True
    """
    sets = found().instruction_sets
    return ["torch", *(["native"] if sets else []), *(f"native-{name}" for name in sets), *_triton_there()]


def _triton_there() -> list[str]:
    kernels = triton.load()
    fit = kernels.interpreted or (torch.cuda.is_available() and not triton.unfit(torch.device("cuda", 0)))
    return ["triton"] if fit and not kernels.missing else []


@contextmanager
def use(name: str) -> Iterator[None]:
    """For tests and benchmarks: all operators by one backend of :func:`available`.

    Example:
        >>> with use("torch"):
        ...     native_block(torch.zeros(1))
        False
    """
    if name not in available():
        because = found().missing
        raise ValueError(f"no backend {name!r} here, only {', '.join(available())}{because and ': ' + because}")
    before = _wanted
    _set(name)
    try:
        yield
    finally:
        _set(before)


def _set(name: str) -> None:
    global _wanted
    _wanted = name
    if found().instruction_sets:
        native.choose(name.removeprefix("native-") if name.startswith("native-") else "")


def native_block(like: Tensor) -> bool:
    """Whether a block over such rows runs in native kernels."""
    return (
        _wanted not in ("torch", "triton")
        and like.device.type == "cpu"
        and like.dtype == torch.float32
        and not torch.is_autocast_enabled("cpu")
        and not found().missing
    )


def native_decode(like: Tensor) -> bool:
    """Whether a query or an append of one event runs in native kernels, which have no gradients.

    Not in an exported program: it is run where this package's operators are not known.
    """
    return native_block(like) and decoding()


def onednn_product(like: Tensor) -> bool:
    """Whether products of such rows run in oneDNN: where the CPU is one that MKL does not use well."""
    return native_block(like) and found().onednn


def triton_block(like: Tensor, shape: triton.Shape) -> bool:
    """Whether a block of a shape, over such rows, runs in Triton kernels: on CUDA in float32, bfloat16 under autocast.

    Elsewhere only where they are asked for, in Triton's interpreter.
    """
    kernels = triton.load()
    if kernels.missing or shape.uncovered() or _wanted not in ("", "triton"):
        return False
    if like.device.type == "cuda":
        return like.dtype == torch.float32 and not triton.unfit(like.device)
    return _wanted == "triton" and like.device.type == "cpu" and kernels.interpreted


def decoding() -> bool:
    """Whether operators without gradients, and not known where an exported program runs, may be used."""
    return not torch.is_grad_enabled() and not torch.compiler.is_exporting()
