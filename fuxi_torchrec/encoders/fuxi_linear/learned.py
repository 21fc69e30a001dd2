"""What an encoder has learned, in numbers that mean something: half-lives, weights, decays, the positional kernel."""

import math
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from fuxi_torchrec.encoders.fuxi_linear.block import Block
from fuxi_torchrec.encoders.fuxi_linear.channels import TemporalChannel
from fuxi_torchrec.encoders.fuxi_linear.encoder import FuXiLinearEncoder


@dataclass(frozen=True)
class Scale:
    """A temporal scale of a block.

    Attributes:
        period: in the data's time unit.
        half_life: the time after which an event counts half, in the same unit.
        sin, cos: α of its two sub-heads, the weight of the sum over the past, the event included. A longer half-life
            sums more events, so weights of different scales are not on one measure.
        sin_skip, cos_skip: β, what the event's own value has beside that.
    """

    period: int
    half_life: float
    sin: float
    cos: float
    sin_skip: float
    cos_skip: float


@dataclass(frozen=True)
class LearnedBlock:
    """A block, with None for a channel that is off.

    Attributes:
        scales: of the temporal channel.
        retention: λ of each head: what is left of an event after one more.
        kernel: (positions, positions) α · (2/d_p) κ_i·κ_j, 0 for j > i.
        kernel_skip: β of the positional channel, what the event's own value has beside the sum.
    """

    scales: list[Scale] | None
    retention: list[float] | None
    kernel: Tensor | None
    kernel_skip: float | None


def learned(encoder: FuXiLinearEncoder, positions: int = 256) -> list[LearnedBlock]:
    """What each block has learned.

    Args:
        encoder: a trained one.
        positions: rows of the kernel to compute, at most those there are.
    """
    with torch.no_grad():
        return [_of_block(block, encoder.config.temporal_periods, positions) for block in encoder.layers]


def _of_block(block: Block, periods: tuple[int, ...], positions: int) -> LearnedBlock:
    return LearnedBlock(
        scales=None if block.temporal is None else _scales(block.temporal, periods),
        retention=None if block.retention is None else block.retention.log_decay().exp().tolist(),
        kernel=_kernel(block, positions),
        kernel_skip=None if block.positional is None else float(block.positional.beta),
    )


def _scales(channel: TemporalChannel, periods: tuple[int, ...]) -> list[Scale]:
    log_decay = channel.log_decay().double()
    gain, skip = channel.gain_and_skip(log_decay)
    half_life = (-math.log(2) / log_decay).abs().tolist()  # infinite where nothing is forgotten
    return [
        Scale(
            period=period,
            half_life=half_life[k],
            sin=float(gain[k]),
            cos=float(gain[k + len(periods)]),
            sin_skip=float(skip[k]),
            cos_skip=float(skip[k + len(periods)]),
        )
        for k, period in enumerate(periods)
    ]


def _kernel(block: Block, positions: int) -> Tensor | None:
    if block.positional is None:
        return None
    rows = block.positional.kernel[:positions]
    gain, _ = block.positional.gain_and_skip()
    return (gain * rows @ rows.T).tril()


def readable(ticks: float, per_second: int) -> str:
    """A duration for people.

    Example:
        >>> readable(90_000, 1), readable(1_500, 1_000)
        ('1.04 d', '1.5 s')
    """
    if math.isinf(ticks):
        return "for ever"
    seconds = ticks / per_second
    units = [("s", 1.0), ("min", 60.0), ("h", 3600.0), ("d", 86400.0), ("y", 365.25 * 86400.0)]
    for (name, size), (_, larger) in pairwise(units):
        if seconds < larger:
            return f"{seconds / size:.3g} {name}"
    return f"{seconds / units[-1][1]:.3g} {units[-1][0]}"
