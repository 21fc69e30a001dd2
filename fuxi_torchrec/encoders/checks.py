"""Checks of an encoder's inputs: every message names the argument and the values."""

import itertools
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fuxi_torchrec.encoders.state import States

if TYPE_CHECKING:
    from fuxi_torchrec.encoders.base import EncoderConfig, SequenceEncoder

_FAR = 2**62
_FEW = 16


def batch(
    config: "EncoderConfig",
    like: Tensor,
    x: Tensor,
    offsets: Tensor,
    timestamps: Tensor,
    validate: bool | None,
    request_timestamps: Tensor | None = None,
    state: States | None = None,
) -> list[int]:
    """Check rows, offsets, timestamps and, if given, request times and the state's users; the offsets as a list."""
    if x.dim() != 2 or x.shape[1] != config.dim:
        raise ValueError(f"x must be of shape (events, {config.dim}), not {tuple(x.shape)}")
    if not x.is_floating_point():
        raise ValueError(f"x must be of a floating dtype, not {x.dtype}")
    if like.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"the encoder is {like.dtype}: keep it in float32 or float64 and use autocast for less")
    if x.dtype != like.dtype and not (torch.is_autocast_enabled(x.device.type) and x.dtype.itemsize <= 4):
        raise ValueError(f"x is {x.dtype}, the encoder is {like.dtype}: convert one of them")
    precision(like.device)
    if x.device != like.device:
        raise ValueError(f"x is on {x.device}, the encoder on {like.device}")
    _times("timestamps", timestamps, len(x), x.device)
    if offsets.dim() != 1 or not len(offsets):
        raise ValueError(f"offsets must be of shape (users + 1,), not {tuple(offsets.shape)}")
    if offsets.dtype != torch.int64:
        raise ValueError(f"offsets must be int64, not {offsets.dtype}")
    bounds: list[int] = offsets.tolist()
    if wanted := _wanted(validate, x.device):
        _values(x, bounds)
        _near("timestamps", timestamps)
    if request_timestamps is not None:
        requests(request_timestamps, len(bounds) - 1, x.device, validate)
    if wanted:
        _passing(timestamps, bounds, request_timestamps)
    if state is not None and len(bounds) - 1 != len(state):
        raise ValueError(f"offsets describes {len(bounds) - 1} users, the state has {len(state)}")
    return bounds


def state(encoder: "SequenceEncoder", found: States, like: Tensor) -> None:
    """Check a state against the encoder that is to use it, of which a parameter is given."""
    if encoder.training and getattr(encoder.config, "dropout", False):
        raise ValueError("append and query are for evaluation: call encoder.eval() first")
    if found.fingerprint != encoder.fingerprint:
        raise ValueError(
            f"state is of another configuration: fingerprint {found.fingerprint}, the encoder has {encoder.fingerprint}"
        )
    rows = found.sample
    if rows.dtype != like.dtype or rows.device != like.device:
        raise ValueError(f"state is {rows.dtype} on {rows.device}, the encoder {like.dtype} on {like.device}")


def precision(device: torch.device) -> None:
    """Refuse a device without float64, which phases and the temporal state need."""
    if device.type == "mps":
        raise ValueError("the encoder is on mps, which has no float64: phases and the temporal state need it; use cpu")


def requests(values: Tensor, users: int, device: torch.device, validate: bool | None) -> None:
    """Check the request times of so many users."""
    _times("request_timestamps", values, users, device)
    if _wanted(validate, device):
        _near("request_timestamps", values)


def _wanted(validate: bool | None, device: torch.device) -> bool:
    """Whether values are looked at: by default on the CPU only, and not in exported programs."""
    return validate if validate is not None else device.type == "cpu" and not torch.compiler.is_compiling()


def _times(name: str, values: Tensor, count: int, device: torch.device) -> None:
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


def _near(name: str, values: Tensor) -> None:
    """Refuse times of which two may differ by more than 64 bits hold, as a missing one."""
    if not len(values):
        return
    # a few values are read as a list: no tensor operation is as quick
    few = values.tolist() if len(values) <= _FEW else [int(bound) for bound in values.aminmax()]
    low, high = min(few), max(few)
    if low <= -_FAR or high >= _FAR:
        raise ValueError(f"{name} must be within 2^62 of 0, not {low} to {high}: is a time missing?")


def _passing(timestamps: Tensor, bounds: list[int], request_timestamps: Tensor | None) -> None:
    """Refuse times whose steps forward do not add up in 64 bits, as those of missing times may."""
    if not len(timestamps) or (request_timestamps is None and all(b - a <= 1 for a, b in itertools.pairwise(bounds))):
        return
    gaps = timestamps.diff().clamp(min=0).double()
    requested = [] if request_timestamps is None else request_timestamps.tolist()
    latest, earliest = max(requested, default=0), int(timestamps.min())
    if float(gaps.sum()) + max(0, latest - earliest) <= _FAR:
        return
    passed = torch.cat([gaps.new_zeros(1), gaps]).cumsum(0)  # at each event, since the first of all
    for user, (a, b) in enumerate(itertools.pairwise(bounds)):
        if a == b:
            continue
        waited = max(0, requested[user] - int(timestamps[b - 1])) if requested else 0
        if float(passed[b - 1] - passed[a]) + waited > _FAR:
            raise ValueError(
                f"timestamps of user {user} go forth and back by more than 2^62 in all: is a time missing among them?"
            )
