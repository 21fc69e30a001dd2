"""What an encoder has learned, in terms that mean something: half-lives, weights, decays, the positional kernel."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fuxi_torchrec.encoders.explain import readable
from fuxi_torchrec.encoders.fuxi_linear.block import Block
from fuxi_torchrec.encoders.fuxi_linear.channels import PositionalChannel, TemporalChannel
from fuxi_torchrec.encoders.fuxi_linear.encoder import FuXiLinearEncoder

_POSITIONS = 256  # shown of the kernel
_FADING = 200  # events shown of a retention head's memory


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
    """A block, with None for a channel that is off or not the paper's.

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


def learned(encoder: FuXiLinearEncoder, positions: int = _POSITIONS) -> list[LearnedBlock]:
    """What each block has learned, with the kernel of so many positions, at most those there are."""
    with torch.no_grad():
        return [_of_block(block, encoder.config.temporal_periods, positions) for block in encoder.layers]


def _of_block(block: Block, periods: tuple[int, ...], positions: int) -> LearnedBlock:
    kernel = kernel_skip = None
    if isinstance(block.positional, PositionalChannel):
        rows, (gain, skip) = block.positional.kernel[:positions], block.positional.gain_and_skip()
        kernel, kernel_skip = (gain * rows @ rows.T).tril(), float(skip)
    return LearnedBlock(
        scales=_scales(block.temporal, periods) if type(block.temporal) is TemporalChannel else None,
        retention=None if block.retention is None else block.retention.log_decay().exp().tolist(),
        kernel=kernel,
        kernel_skip=kernel_skip,
    )


def _scales(channel: TemporalChannel, periods: tuple[int, ...]) -> list[Scale]:
    log_decay = channel.log_decay().double()
    gain, skip = channel.gain_and_skip(log_decay)
    half_life = (-math.log(2) / log_decay).abs().tolist()  # infinite where nothing is forgotten
    weights = torch.cat((gain, skip)).view(4, -1).T.tolist()  # sin, cos and their skips, of each scale
    return [Scale(*each[:2], *each[2]) for each in zip(periods, half_life, weights, strict=True)]


@dataclass(frozen=True)
class Learned:
    """What all blocks have learned, as text and as a figure."""

    blocks: list[LearnedBlock]
    per_second: int  # ticks of the periods' time unit

    def text(self) -> str:
        """A table per block."""
        lines = []
        for number, block in enumerate(self.blocks):
            lines.append(f"block {number}")
            if block.retention is not None:
                left = ", ".join(f"{each:.4f}" for each in block.retention)
                lines.append(f"  retention, left after one event: {left}")
            if block.kernel_skip is not None:
                lines.append(f"  positional, beside the kernel the event itself: {block.kernel_skip:.3f}")
            if block.scales is not None:
                lines.append(f"  {'period':>10} {'half-life':>10} {'sin':>8} {'cos':>8} {'itself':>15}")
                lines += [self._line(scale) for scale in block.scales]
        return "\n".join(lines)

    def _line(self, scale: Scale) -> str:
        period, half_life = (readable(ticks, self.per_second) for ticks in (scale.period, scale.half_life))
        itself = f"{scale.sin_skip:.2f} / {scale.cos_skip:.2f}"
        return f"  {period:>10} {half_life:>10} {scale.sin:>8.3f} {scale.cos:>8.3f} {itself:>15}"

    def draw(self, title: str, output: Path) -> None:
        """A row of panels per block: temporal weights, half-lives, retention, positional kernel; empty if it is off."""
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt

        figure, axes = plt.subplots(len(self.blocks), 4, figsize=(17, 3.6 * len(self.blocks)), squeeze=False)
        for number, (block, row) in enumerate(zip(self.blocks, axes, strict=True)):
            if block.scales is not None:
                _draw_weights(row[0], block.scales, self.per_second)
                _draw_half_lives(row[1], block.scales, self.per_second)
            if block.retention is not None:
                _draw_retention(row[2], block.retention)
            if block.kernel is not None:
                _draw_kernel(figure, row[3], block.kernel)
            row[0].set_ylabel(f"block {number}\nweight of the past")
        figure.suptitle(title)
        figure.tight_layout()
        figure.savefig(output, dpi=110)
        plt.close(figure)


def _draw_weights(axis: Any, scales: Sequence[Scale], per_second: int) -> None:
    axis.set_title("temporal scales: α of sin and cos")
    places = range(len(scales))
    axis.bar([place - 0.2 for place in places], [scale.sin for scale in scales], 0.4, label="sin")
    axis.bar([place + 0.2 for place in places], [scale.cos for scale in scales], 0.4, label="cos")
    axis.axhline(0, color="black", linewidth=0.5)
    axis.set_xticks(list(places), [readable(scale.period, per_second) for scale in scales], rotation=45)
    axis.legend()


def _draw_half_lives(axis: Any, scales: Sequence[Scale], per_second: int) -> None:
    axis.set_title("temporal scales: half-life against period")
    periods = [scale.period / per_second for scale in scales]
    axis.loglog(periods, periods, ":", color="gray", label="one period")
    axis.loglog(periods, [scale.half_life / per_second for scale in scales], "o")
    axis.set(xlabel="period, s", ylabel="half-life, s")
    axis.legend()


def _draw_retention(axis: Any, decays: Sequence[float]) -> None:
    axis.set_title("retention: what is left of an event")
    for head, decay in enumerate(decays):
        axis.semilogx(range(1, _FADING), [decay**n for n in range(1, _FADING)], label=f"head {head}: {decay:.3f}")
    axis.set(xlabel="events later", ylim=(0, 1))
    axis.legend()


def _draw_kernel(figure: Any, axis: Any, kernel: Tensor) -> None:
    axis.set_title("positional kernel: weight of event j at i")
    most = float(kernel.abs().max()) or 1.0
    image = axis.imshow(kernel.numpy(), cmap="RdBu", vmin=-most, vmax=most, interpolation="nearest")
    axis.set(xlabel="j", ylabel="i")
    figure.colorbar(image, ax=axis)
