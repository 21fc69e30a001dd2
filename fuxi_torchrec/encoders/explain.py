"""What has been learned, as curves: printed at a few places, drawn in full."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Literal

from torch import Tensor

_SHOWN = 8  # places of a curve in the text
_DISTANCES = 256  # events shown of weights by distance


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


@dataclass(frozen=True)
class Curve:
    """Values over places: durations in seconds, or counted things.

    Attributes:
        x, y: as many places as values.
        over: what x is.
    """

    title: str
    x: list[float]
    y: list[float]
    over: Literal["time", "events", "items", "count", "phase", "channel", "head", "place"]

    def text(self) -> str:
        shown = sorted({round(n * (len(self.x) - 1) / (_SHOWN - 1)) for n in range(_SHOWN)})
        places = [readable(self.x[n], 1) if self.over == "time" else f"{self.x[n]:g}" for n in shown]
        values = [f"{self.y[n]:.3g}" for n in shown]
        over, value = (" ".join(f"{cell:>9}" for cell in line) for line in (places, values))
        return f"  {self.title}\n    {self.over:>8} {over}\n    {'':>8} {value}"


@dataclass(frozen=True)
class Curves:
    """Those of all blocks, as text and as a figure.

    Attributes:
        blocks: a row of the figure each.
        names: of the blocks; numbers by default.
        note: the last line of the text.
    """

    blocks: list[list[Curve]]
    names: Sequence[str] = ()
    note: str = ""

    def _name(self, number: int) -> str:
        return self.names[number] if self.names else f"block {number}"

    def text(self) -> str:
        lines = []
        for number, curves in enumerate(self.blocks):
            lines += [self._name(number), *(curve.text() for curve in curves)]
        return "\n".join([*lines, self.note] if self.note else lines)

    def draw(self, title: str, output: Path) -> None:
        """A row of panels per block."""
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt

        columns = max(len(curves) for curves in self.blocks)
        figure, axes = plt.subplots(
            len(self.blocks), columns, figsize=(5 * columns, 3.2 * len(self.blocks)), squeeze=False
        )
        for number, (curves, row) in enumerate(zip(self.blocks, axes, strict=True)):
            for axis in row[len(curves) :]:
                axis.set_axis_off()
            for curve, axis in zip(curves, row, strict=False):
                axis.plot(curve.x, curve.y, ".-")
                if curve.over in ("time", "events", "items", "count"):
                    axis.set_xscale("symlog" if min(curve.x) <= 0 else "log")
                axis.set(title=curve.title, xlabel="time, s" if curve.over == "time" else curve.over)
                axis.axhline(0, color="black", linewidth=0.5)
            row[0].set_ylabel(self._name(number))
        figure.suptitle(title)
        figure.tight_layout()
        figure.savefig(output, dpi=110)
        plt.close(figure)


def by_distance(weights_P: Tensor) -> Curve:
    """Weights by distance in events."""
    shown = weights_P[:_DISTANCES].tolist()
    return Curve("weight of an event so many events before", [float(n) for n in range(len(shown))], shown, "events")


def half_lives(title: str, log_decay: Tensor, over: Literal["channel", "head"]) -> Curve:
    """The events after which half is left, longest first, of what is multiplied by e^l at every event."""
    lives = (-math.log(2) / log_decay.double().flatten()).abs().sort(descending=True).values.tolist()
    return Curve(title, [float(n) for n in range(len(lives))], lives, over)
