"""The one place that launches a kernel."""

from typing import Any

import torch
from torch import Tensor


def precision() -> str:
    """Of products of float32, as torch's own setting has it: exact by default, tf32 three times over for "high".

    Plain tf32, which torch allows itself under "high", would put 4e-4 of error into the channels.
    """
    return "ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32x3"


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Of all arithmetic for rows of a dtype."""
    return torch.float32 if dtype.itemsize < 4 else dtype


def power_of_two(n: int, least: int = 1) -> int:
    """The next one that is not smaller."""
    return max(least, 1 << (n - 1).bit_length())


def run(
    kernel: Any, grid: tuple[int, ...], arguments: tuple[Tensor | int | None, ...], options: dict[str, Any]
) -> None:
    """Tests put another function in its place, to count launches or to compile without a device."""
    kernel[grid](*arguments, **options)


def launch(
    kernel: Any, grid: tuple[int, ...], *arguments: Tensor | int | None, num_warps: int = 4, **constants: Any
) -> None:
    """Run a kernel, unless there is nothing to do. Loads of loops are not staged: states would fill shared memory."""
    if all(grid):
        run(kernel, grid, arguments, {**constants, "num_warps": num_warps, "num_stages": 1})
