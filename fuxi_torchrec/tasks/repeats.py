"""People come back: a learned bias for the items of a user's window.

``score(u, j) = <y, e_j> / temperature + b(u, j)``, where b is 0 for items outside of the window (the last W distinct
items of what the encoder has read of the user, :mod:`fuxi_torchrec.tasks.windows`), and for those inside

    b = E[events ago] + I[distinct items ago] + C[times it occurred] + S[time since] + Σ_k P_k[phase of time since]
        + <y, r> + (y U) (V e_j)

The tables are over logarithmic buckets, two an octave; a phase is the share of a period, in 16 parts. y and e_j are as
the score takes them, of unit length for ``cosine``. Everything but V is 0 at the start, and so is b.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fuxi_torchrec.encoders.base import setting
from fuxi_torchrec.options import check_bounds

PHASES = 16  # parts of a period
_RANK = 8  # of y·A·e_j
_OCTAVES = 40  # beyond, everything is in the last bucket


@dataclass(frozen=True)
class RepeatsConfig:
    """A bias for items that the user had before."""

    window: int = setting(0, "last distinct items whose scores have a learned bias; 0 for none", least=0, most=2**16)
    periods: tuple[int, ...] = setting((), "of habits, in the dataset's time unit: [86400, 604800]")

    def __post_init__(self) -> None:
        check_bounds(self, named=str)
        if not all(0 < period < 2**62 for period in self.periods):
            raise ValueError(f"periods must be positive, not {list(self.periods)}")
        if self.periods and not self.window:
            raise ValueError("periods are used with a window alone: set repeats.window, or leave periods out")


def edges() -> list[int]:
    """Lower bounds of the buckets after the first.

    Example:
        >>> edges()[:10]
        [1, 2, 3, 4, 6, 8, 12, 16, 24, 32]
    """
    return [1, *(edge for n in range(1, _OCTAVES) for edge in (2**n, 3 * 2 ** (n - 1)))]


@dataclass(frozen=True)
class Entries:
    """The windows of P queries, each (P, W) int64.

    Attributes:
        there: bool, False for empty slots, whose other values do not matter.
        events_ago: 0 for the last event.
        counts: how often the item has occurred.
        since: the time since it last occurred; times that went back are 0.
    """

    there: Tensor
    events_ago: Tensor
    counts: Tensor
    since: Tensor

    @staticmethod
    def of(last: Tensor, positions: Tensor, counts: Tensor, times: Tensor, request_times: Tensor) -> "Entries":
        """Of what :func:`find_windows` gives.

        Args:
            last: (P, W) events.
            positions: (P,) the events whose windows they are.
            counts, times: (T,) of the events.
            request_times: (P,).
        """
        at = last.clamp(min=0).flatten()
        since = request_times[:, None] - times.index_select(0, at).view(last.shape)
        return Entries(
            last >= 0,
            positions[:, None] - last,
            counts.index_select(0, at).view(last.shape),
            since.clamp(min=0),
        )

    def to(self, device: torch.device) -> "Entries":
        """On another device."""
        return Entries(*(each.to(device) for each in (self.there, self.events_ago, self.counts, self.since)))


class RepeatBias(nn.Module):
    """The learned part."""

    def __init__(self, config: RepeatsConfig, dim: int) -> None:
        super().__init__()
        self.config = config
        bounds = torch.tensor(edges())
        self.register_buffer("edges", bounds, persistent=False)
        buckets = len(bounds) + 1
        self.events_ago, self.items_ago, self.count, self.since = (nn.Parameter(torch.zeros(buckets)) for _ in range(4))
        self.phase = nn.Parameter(torch.zeros(len(config.periods) * PHASES))
        self.repeat = nn.Parameter(torch.zeros(dim))
        self.left = nn.Parameter(torch.zeros(dim, _RANK))
        self.right = nn.Parameter(torch.randn(_RANK, dim) * dim**-0.5)

    def bucket(self, values: Tensor) -> Tensor:
        """Of integers from 0."""
        return torch.bucketize(values, self.get_buffer("edges"), right=True)

    def forward(self, y_PD: Tensor, entries: Entries) -> Tensor:
        """(P, W) the bias but for its last term, which :meth:`shift` gives."""
        slots = torch.arange(entries.there.shape[1], device=y_PD.device)
        bias_PW = self.items_ago[self.bucket(slots)] + (y_PD @ self.repeat)[:, None]
        pairs = [(self.events_ago, entries.events_ago), (self.count, entries.counts), (self.since, entries.since)]
        index = [(table, self.bucket(values)) for table, values in pairs]
        index += [(self.phase, part) for part in _phases(entries.since, self.config.periods)]
        for table, places in index:
            bias_PW = bias_PW + table.index_select(0, places.flatten()).view(places.shape)
        return bias_PW

    def shift(self, y_PD: Tensor) -> Tensor:
        """(P, D) whose product with an item's vector is the last term: it moves the query for items of the window."""
        return (y_PD @ self.left) @ self.right


def _phases(since: Tensor, periods: Sequence[int]) -> list[Tensor]:
    """Places in the table of phases."""
    return [n * PHASES + (since % period) * PHASES // period for n, period in enumerate(periods)]
