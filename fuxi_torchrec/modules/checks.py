"""Checks of the encoder's inputs: every message names the argument and the numbers."""

import itertools

import torch
from torch import Tensor

from fuxi_torchrec.modules.config import FuXiLinearConfig

_FAR = 2**62


def batch(
    config: FuXiLinearConfig, like: Tensor, x: Tensor, offsets: Tensor, timestamps: Tensor, validate: bool | None
) -> list[int]:
    """Check rows, offsets and timestamps; return the offsets as a list."""
    if x.dim() != 2 or x.shape[1] != config.dim:
        raise ValueError(f"x must be of shape (events, {config.dim}), not {tuple(x.shape)}")
    if not x.is_floating_point():
        raise ValueError(f"x must be of a floating dtype, not {x.dtype}")
    if like.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"the encoder is {like.dtype}: keep it in float32 or float64 and use autocast for less")
    if x.dtype != like.dtype and not (torch.is_autocast_enabled(x.device.type) and x.dtype.itemsize <= 4):
        raise ValueError(f"x is {x.dtype}, the encoder is {like.dtype}: convert one of them")
    if x.device != like.device:
        raise ValueError(f"x is on {x.device}, the encoder on {like.device}")
    times("timestamps", timestamps, len(x), x.device)
    if offsets.dim() != 1 or not len(offsets):
        raise ValueError(f"offsets must be of shape (users + 1,), not {tuple(offsets.shape)}")
    if offsets.dtype != torch.int64:
        raise ValueError(f"offsets must be int64, not {offsets.dtype}")
    bounds: list[int] = offsets.tolist()
    if validate if validate is not None else x.device.type == "cpu":
        _values(x, bounds)
        _passing(timestamps, bounds)
    return bounds


def times(name: str, values: Tensor, count: int, device: torch.device) -> None:
    """Check a tensor of times."""
    if values.dtype != torch.int64:
        why = "floats cannot hold times exactly" if values.is_floating_point() else "convert it with .long()"
        raise ValueError(f"{name} must be int64, not {values.dtype}: {why}")
    if values.shape != (count,):
        raise ValueError(f"{name} must be of shape ({count},), not {tuple(values.shape)}")
    if values.device != device:
        raise ValueError(f"{name} is on {values.device}, the rows are on {device}")


def _values(x: Tensor, bounds: list[int]) -> None:
    if bounds[0] != 0:
        raise ValueError(f"offsets must start at 0, not {bounds[0]}")
    for user, (a, b) in enumerate(itertools.pairwise(bounds)):
        if b < a:
            raise ValueError(f"offsets must not decrease: offsets[{user + 1}] = {b} after offsets[{user}] = {a}")
    if bounds[-1] != len(x):
        raise ValueError(f"offsets must end at the number of rows, {len(x)}, not {bounds[-1]}")
    if len(x) and not torch.isfinite(x.detach().sum()):  # one pass; the exact look only if it may be needed
        bad = torch.nonzero(~torch.isfinite(x).all(1)).flatten()
        if len(bad):
            raise ValueError(
                f"x holds non-finite values in {len(bad)} of {len(x)} rows, the first is row {int(bad[0])}"
            )


def _passing(timestamps: Tensor, bounds: list[int]) -> None:
    """Refuse times whose steps forward do not add up in 64 bits, as those of missing times may."""
    if not len(timestamps):
        return
    low, high = int(timestamps.min()), int(timestamps.max())
    if low < -_FAR or high > _FAR:
        raise ValueError(f"timestamps must be within 2^62 of 0, not {low} to {high}: is a time missing?")
    gaps = timestamps.diff().clamp(min=0).double()
    if float(gaps.sum()) <= _FAR:
        return
    passed = torch.cat([gaps.new_zeros(1), gaps]).cumsum(0)  # at each event, since the first of all
    for user, (a, b) in enumerate(itertools.pairwise(bounds)):
        if b > a and float(passed[b - 1] - passed[a]) > _FAR:
            raise ValueError(
                f"timestamps of user {user} go forth and back by more than 2^62 in all: is a time missing among them?"
            )
