"""People come back: a learned bias for the items of a user's window.

``score(u, j) = <y, e_j> / temperature + b(u, j)``, where b is 0 for items outside of the window (the last W distinct
items of what the encoder has read of the user, :mod:`fuxi_torchrec.tasks.windows`), and for those inside

    b = E[events ago] + I[distinct items ago] + C[times it occurred] + G[gap] + S[time since] + F[lead]
        + Σ_k P_k[phase of time since] + c · SiLU(A x + B y + a) + <y, r> + (y U) (V e_j)

The gap is how many events lie between the item's last two occurrences. The lead is where the item last occurred,
counted from where the user's last item occurred before its last time: 1 for what came right after it then. The tables
are over logarithmic buckets, two an octave, F over both signs; a phase is the share of a period, in 16 parts. x are
the buckets of all these, of the time since the last event, of the size of the window and of the last item's gap, times
1/12, minus 1: the hidden layer knows what they mean together. y and e_j are as the score takes them, of unit length
for ``cosine``.
Everything but A, a and V is 0 at the start, and so is b.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fuxi_torchrec.encoders.base import setting
from fuxi_torchrec.options import check_bounds

PHASES = 16  # parts of a period
TABLES = ("events_ago", "items_ago", "count", "gap", "since")
PARTS = (*TABLES, "lead", "phase", "mix", "user", "items")
_RANK = 8  # of y·U·V·e_j
_HIDDEN = 16
_OWN, _COMMON = 6, 3  # inputs of the hidden layer: of an item, and of all items of a window
_SCALE = 12  # buckets
_OCTAVES = 40  # beyond, everything is in the last bucket


@dataclass(frozen=True)
class RepeatsConfig:
    """A bias for items that the user had before."""

    window: int = setting(0, "last distinct items whose scores have a learned bias; 0 for none", least=0, most=2**16)
    periods: tuple[int, ...] = setting((), "of habits, in the dataset's time unit: [86400, 604800]")
    at_last: float = setting(
        0.25,
        "share of training targets queried at the last event's time, so that a bias learns both",
        least=0,
        most=1,
    )
    without: tuple[str, ...] = setting((), f"parts of the bias to leave out, of {', '.join(PARTS)}")

    def __post_init__(self) -> None:
        check_bounds(self, named=str)
        if not all(0 < period < 2**62 for period in self.periods):
            raise ValueError(f"periods must be positive, not {list(self.periods)}")
        unknown = sorted(set(self.without) - set(PARTS))
        if unknown:
            raise ValueError(f"without names parts that are not there: {unknown}; there are {', '.join(PARTS)}")
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
        gaps: how many events lie between its last two; 0 if there is one alone.
        since: the time since it last occurred; times that went back are 0.
    """

    there: Tensor
    events_ago: Tensor
    counts: Tensor
    gaps: Tensor
    since: Tensor

    @staticmethod
    def of(
        last: Tensor, positions: Tensor, counts: Tensor, gaps: Tensor, times: Tensor, request_times: Tensor
    ) -> "Entries":
        """Of what :func:`find_windows` gives.

        Args:
            last: (P, W) events.
            positions: (P,) the events whose windows they are.
            counts, gaps, times: (T,) of the events.
            request_times: (P,).
        """
        at = last.clamp(min=0).flatten()
        since = request_times[:, None] - times.index_select(0, at).view(last.shape)
        return Entries(
            last >= 0,
            positions[:, None] - last,
            counts.index_select(0, at).view(last.shape),
            gaps.index_select(0, at).view(last.shape),
            since.clamp(min=0),
        )

    def to(self, device: torch.device) -> "Entries":
        """On another device."""
        parts = (self.there, self.events_ago, self.counts, self.gaps, self.since)
        return Entries(*(each.to(device) for each in parts))

    @property
    def leads(self) -> Tensor:
        """How many events after the last item's occurrence before its last each one occurred; 0 if it has none."""
        gap, ago = self.gaps[:, :1], self.events_ago
        return torch.where(gap > 0, ago[:, :1] + gap - ago, 0)


class RepeatBias(nn.Module):
    """The learned part."""

    def __init__(self, config: RepeatsConfig, dim: int) -> None:
        super().__init__()
        self.config = config
        bounds = torch.tensor(edges())
        self.register_buffer("edges", bounds, persistent=False)
        self.buckets = buckets = len(bounds) + 1
        shapes: dict[str, tuple[int, ...]] = dict.fromkeys(TABLES, (buckets,))
        shapes |= {"lead": (2 * buckets,), "phase": (len(config.periods) * PHASES,)}
        shapes |= {"mix": (_HIDDEN,), "user": (dim,), "items": (dim, _RANK)}
        for name in PARTS:  # what is left out stays 0
            zeros = torch.zeros(shapes[name])
            if name in config.without or not zeros.numel():  # no periods: nothing to learn, and no gradient
                self.register_buffer(name, zeros, persistent=False)
            else:
                self.register_parameter(name, nn.Parameter(zeros))
        self.hidden = nn.Linear(_OWN + _COMMON, _HIDDEN)
        self.hidden_user = nn.Parameter(torch.zeros(dim, _HIDDEN))
        self.items_right = nn.Parameter(torch.randn(_RANK, dim) * dim**-0.5)

    def part(self, name: str) -> Tensor:
        """One of PARTS: learned, or 0 if it is left out."""
        found: Tensor = getattr(self, name)
        return found

    def bucket(self, values: Tensor) -> Tensor:
        """Of integers from 0."""
        return torch.bucketize(values.contiguous(), self.get_buffer("edges"), right=True)

    def forward(self, y_PD: Tensor, entries: Entries) -> Tensor:
        """(P, W) the bias but for its last term, which :meth:`shift` gives."""
        slots = torch.arange(entries.there.shape[1], device=y_PD.device).expand(entries.there.shape)
        values = (entries.events_ago, slots, entries.counts, entries.gaps, entries.since)
        places = [self.bucket(each) for each in values]
        leads, places_of_leads = entries.leads, self.bucket(entries.leads.abs())
        index = [(self.part(name), where) for name, where in zip(TABLES, places, strict=True)]
        index.append((self.part("lead"), torch.where(leads > 0, self.buckets + places_of_leads, places_of_leads)))
        index += [(self.part("phase"), part) for part in _phases(entries.since, self.config.periods)]
        bias_PW = self._mixed(y_PD, [*places, torch.where(leads > 0, places_of_leads, 0)], entries)
        bias_PW = bias_PW + (y_PD @ self.part("user"))[:, None]
        for table, where in index:
            bias_PW = bias_PW + table.index_select(0, where.flatten()).view(where.shape)
        return bias_PW

    def _mixed(self, y_PD: Tensor, own: Sequence[Tensor], entries: Entries) -> Tensor:
        """The hidden layer's."""
        size = self.bucket(entries.there.sum(1, keepdim=True))
        latest = {name: each[:, :1] for name, each in zip(TABLES, own, strict=False)}
        common = torch.cat((latest["since"], size, latest["gap"]), 1)
        weights = self.hidden.weight.to(y_PD.dtype)
        common_PH = F.linear(_scaled(common, y_PD), weights[:, _OWN:], self.hidden.bias) + y_PD @ self.hidden_user
        hidden_PWH = F.linear(_scaled(torch.stack(tuple(own), 2), y_PD), weights[:, :_OWN]) + common_PH[:, None]
        return F.silu(hidden_PWH) @ self.part("mix")

    def shift(self, y_PD: Tensor) -> Tensor:
        """(P, D) whose product with an item's vector is the last term: it moves the query for items of the window."""
        return (y_PD @ self.part("items")) @ self.items_right


def _scaled(buckets: Tensor, like: Tensor) -> Tensor:
    return buckets.to(like.dtype) / _SCALE - 1


def _phases(since: Tensor, periods: Sequence[int]) -> list[Tensor]:
    """Places in the table of phases."""
    return [n * PHASES + (since % period) * PHASES // period for n, period in enumerate(periods)]
