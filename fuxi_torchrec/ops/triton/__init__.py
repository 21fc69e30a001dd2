"""Triton kernels for CUDA devices: found, and known to torch, when they are first asked for.

Triton comes with torch's CUDA build. Where it is missing, or of another version than the kernels were verified on, a
line says why and torch is used. With ``TRITON_INTERPRET=1`` in the environment Triton's interpreter runs the kernels on
CPU tensors: that is how they are tested without a GPU.
"""

import importlib.metadata
import importlib.util
import os
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple, TypeVar

import torch

Function = TypeVar("Function", bound=Callable[..., Any])

VERIFIED = "3.7.1"  # what torch 2.13's CUDA build pins
LEAST_CAPABILITY = (8, 0)
WIDEST_HEAD, WIDEST_KERNEL, WIDEST_ROW = 64, 64, 1024  # that the kernels were compiled for without spills
COVERED = (
    f"heads of up to {WIDEST_HEAD} columns, positional kernels of up to {WIDEST_KERNEL}, rows of up to {WIDEST_ROW}, "
    "all channels on"
)


class Found(NamedTuple):
    """What this machine has.

    Attributes:
        missing: why there are no kernels; empty if there are.
        interpreted: whether they run in Triton's interpreter, on CPU tensors.
    """

    missing: str
    interpreted: bool = False


def _constant(function: Function) -> Function:
    """``torch.compiler.assume_constant_result``, which imports the compiler, and with it numpy."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@_constant
def load() -> Found:
    """Look for Triton and make the operators known to torch, once."""
    return _load()


@cache
def _load() -> Found:
    if importlib.util.find_spec("triton") is None:
        return Found("triton is not installed: it comes with torch's CUDA build")
    version = importlib.metadata.version("triton")
    if version != VERIFIED:
        return Found(f"triton is {version}, the kernels were verified on {VERIFIED}")
    from fuxi_torchrec.ops.triton import operators

    operators.register()
    return Found("", os.environ.get("TRITON_INTERPRET") == "1")


@cache
def capability(device: torch.device) -> tuple[int, int]:
    """Of a CUDA device; (0, 0) without CUDA."""
    return torch.cuda.get_device_capability(device) if torch.cuda.is_available() else (0, 0)


@_constant
def unfit(device: torch.device) -> str:
    """Why the kernels do not run on a CUDA device; empty if they do.

    Example:
        >>> unfit(torch.device("cpu"))
        'cpu is no CUDA device'
    """
    if device.type != "cuda":
        return f"{device.type} is no CUDA device"
    major, minor = capability(device)
    if (major, minor) < LEAST_CAPABILITY:
        return f"{device} has compute capability {major}.{minor}, the kernels need 8.0"
    return ""


class Shape(NamedTuple):
    """Of a block: width, retention heads, temporal scales, width of the positional kernel."""

    dim: int
    heads: int
    scales: int
    kernel: int

    def uncovered(self) -> str:
        """Why the kernels do not cover it; empty if they do.

        Example:
            >>> Shape(128, 4, 8, 32).uncovered()
            ''
            >>> Shape(512, 2, 8, 32).uncovered()
            'heads of 256 columns, the kernels cover 64'
        """
        if self.dim // self.heads > WIDEST_HEAD:
            return f"heads of {self.dim // self.heads} columns, the kernels cover {WIDEST_HEAD}"
        if self.kernel > WIDEST_KERNEL:
            return f"a positional kernel of {self.kernel} columns, the kernels cover {WIDEST_KERNEL}"
        if self.dim > WIDEST_ROW:
            return f"rows of {self.dim} columns, the kernels cover {WIDEST_ROW}"
        return ""
