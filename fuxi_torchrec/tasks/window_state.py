"""The windows of users between events: of constant size, and enough to go on from.

Takes what :func:`fuxi_torchrec.tasks.windows.find_windows` gives for a whole history, one piece of it after another.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fuxi_torchrec.tasks.base import Correction
from fuxi_torchrec.tasks.repeats import Entries, RepeatBias
from fuxi_torchrec.tasks.windows import Ints, find_windows

_FEW = 8  # so many events of a user are taken one after another; more at once, which is faster then


@dataclass(frozen=True)
class WindowState:
    """Of B users, each (B, W), latest first; never changed in place.

    Attributes:
        items: int32; 0 for empty slots, which come last and whose other values are 0.
        events: int32, which of the user's events was the item's last one.
        counts: int32, how often it has occurred since it came into the window.
        gaps: int32, how many events lie between its last two; 0 if there is one alone.
        times: int64, of that event.
    """

    items: Tensor
    events: Tensor
    counts: Tensor
    gaps: Tensor
    times: Tensor

    @staticmethod
    def empty(users: int, width: int) -> "WindowState":
        """Of users without events."""
        none = torch.zeros(users, width, dtype=torch.int32)
        return WindowState(none, none, none, none, none.long())

    @staticmethod
    def of(items: Ints, offsets: Ints, times: Ints, width: int) -> "WindowState":
        """Of whole histories: T events of B users, one user after another."""
        users = len(offsets) - 1
        return WindowState.empty(users, width).append(items, offsets, times, np.zeros(users, np.int64))

    def __len__(self) -> int:
        return len(self.items)

    @property
    def width(self) -> int:
        return self.items.shape[1]

    def tensors(self) -> tuple[Tensor, ...]:
        """In the order of the attributes."""
        return self.items, self.events, self.counts, self.gaps, self.times

    @property
    def nbytes(self) -> int:
        return sum(each.nbytes for each in self.tensors())

    def select(self, users: Tensor) -> "WindowState":
        """Of some users, by their places."""
        return WindowState(*(each.index_select(0, users) for each in self.tensors()))

    @staticmethod
    def concatenate(several: Sequence["WindowState"]) -> "WindowState":
        """Several as one, users in the given order."""
        return WindowState(*(torch.cat(each) for each in zip(*(one.tensors() for one in several), strict=True)))

    def append_one(self, items: Tensor, events: Tensor, times: Tensor) -> "WindowState":
        """After one event more of every user, each (B,): the item, which of the user's events it is, its time."""
        slots = torch.arange(self.width, device=items.device)
        found = self.items == items[:, None]
        # what was before the item moves one slot back, what was behind it stays
        end = torch.where(found.any(1), found.int().argmax(1), self.width - 1)[:, None]
        source = torch.where(slots <= end, slots - 1, slots).clamp(min=0)
        count = (self.counts * found).sum(1) + 1
        gap = torch.where(count > 1, events - (self.events * found).sum(1), 0)
        known = (items > 0)[:, None]
        moved = []
        for old, new in zip(self.tensors(), (items, events, count, gap, times), strict=True):
            shifted = torch.where(slots == 0, new[:, None].to(old.dtype), old.gather(1, source))
            moved.append(torch.where(known, shifted, old))
        return WindowState(*moved)

    def append(self, items: Ints, offsets: Ints, times: Ints, before: Ints) -> "WindowState":
        """After more events, users one after another; some may have none.

        Args:
            items, times: (T,).
            offsets: (B + 1,).
            before: (B,) events of each user so far.
        """
        lengths = np.diff(offsets)
        if lengths.max(initial=0) > _FEW:
            return self._append_many(items, offsets, times, before)
        state = self
        for step in range(lengths.max(initial=0)):
            some = lengths > step
            place = np.where(some, offsets[:-1] + step, 0)
            new = (np.where(some, items[place], 0), before + step, times[place])
            state = state.append_one(*(torch.from_numpy(each.astype(np.int64)) for each in new))
        return state

    def _append_many(self, items: Ints, offsets: Ints, times: Ints, before: Ints) -> "WindowState":
        """The windows, latest last, stand for what was before."""
        users, lengths = len(self), np.diff(offsets)
        held, own = (self.items > 0).sum(1).numpy(), np.repeat(np.arange(users), lengths)
        bounds = np.concatenate([[0], np.cumsum(held + lengths)])
        at = np.arange(len(items)) + np.cumsum(held)[own]  # new events come behind the user's window
        user, slot = np.nonzero((self.items > 0).numpy())
        there = bounds[user] + held[user] - 1 - slot
        old = (each.numpy()[user, slot].astype(np.int64) for each in self.tensors())
        ones = np.ones(len(items), np.int64)
        new = (items, np.arange(len(items)) - offsets[own] + before[own], ones, 0 * ones, times)
        columns = []
        for window, events in zip(old, new, strict=True):
            joined = np.empty(bounds[-1], np.int64)
            joined[there], joined[at] = window, events
            columns.append(joined)
        some = np.flatnonzero(np.diff(bounds))
        found = find_windows(columns[0], bounds, self.width, bounds[some + 1] - 1, columns[2])
        last = np.full((users, self.width), -1, np.int64)
        last[some] = found.last
        columns[2] = found.counts
        columns[3] += found.gaps(columns[1])  # a window's items have theirs, and occur for the first time here
        filled = (torch.from_numpy(np.where(last < 0, 0, column[last])) for column in columns)
        return WindowState(*(each.to(like.dtype) for each, like in zip(filled, self.tensors(), strict=True)))

    def entries(self, counts: Tensor, request_times: Tensor) -> Entries:
        """As the bias takes them, of users with so many events, queried at these times: (B,) each."""
        return Entries(
            self.items > 0,
            counts[:, None] - 1 - self.events.long(),
            self.counts.long(),
            self.gaps.long(),
            (request_times[:, None] - self.times).clamp(min=0),
        )

    def correction(
        self, bias: RepeatBias, counts: Tensor, y_BD: Tensor, request_times: Tensor, temperature: float
    ) -> Correction:
        """Of users' scores: ``y_BD`` as scores take them, ``counts`` and ``request_times`` as :meth:`entries`."""
        entries = self.entries(counts.to(self.items.device), request_times.to(self.items.device)).to(y_BD.device)
        return Correction(self.items.long(), temperature * bias(y_BD, entries), temperature * bias.shift(y_BD))

    def to_bytes(self) -> Tensor:
        """(B, :func:`window_bytes`) uint8."""
        return torch.cat([each.contiguous().view(torch.uint8) for each in self.tensors()], dim=1)

    @staticmethod
    def from_bytes(records: Tensor, width: int) -> "WindowState":
        """Back from :meth:`to_bytes`."""
        like = WindowState.empty(0, width).tensors()
        ends = [0, *itertools.accumulate(each.element_size() * math.prod(each.shape[1:]) for each in like)]
        pieces = (records[:, begin:end] for begin, end in itertools.pairwise(ends))
        parts = (piece.clone(memory_format=torch.contiguous_format) for piece in pieces)  # aligned
        return WindowState(*(part.view(each.dtype) for part, each in zip(parts, like, strict=True)))


def window_bytes(width: int) -> int:
    """Of a user's window as a record.

    Example:
        >>> window_bytes(64)
        1536
    """
    return 24 * width
