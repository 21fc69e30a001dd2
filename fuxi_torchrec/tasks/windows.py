"""Windows: the last distinct items of a user, as of every event.

Where the list of distinct items, latest first, is ``L(p − 1)`` before event p, afterwards it is p's item, then
``L(p − 1)`` without it. So slot w + 1 takes over what slot w held at every event whose item was not found in the slots
up to w, and keeps what it has at all others: slots are filled one after another, each for all events of all users at
once.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


class Windows(NamedTuple):
    """Of T events of several users, one user after another.

    Attributes:
        last: (P, W) the events at which the last W distinct items last occurred, latest first; −1 where there are no
            more. The event itself counts, and events of unknown items do not.
        counts: (T,) how often the event's item has occurred, up to and with it, since it last came into the window:
            what left the window is forgotten, so that the window alone is enough to go on from.
        previous: (T,) the event at which the item occurred before, −1 if it was not in the window.
    """

    last: Ints
    counts: Ints
    previous: Ints

    def gaps(self, events: Ints) -> Ints:
        """(T,) how many events after the one before the item occurred again, by their numbers; 0 where it did not."""
        return np.where(self.previous >= 0, events - events[self.previous], 0)


def find_windows(
    items: Ints, offsets: Ints, width: int, positions: Ints | None = None, occurrences: Ints | None = None
) -> Windows:
    """The windows of some positions, or of all events, from what precedes them in ``items``.

    Counts and previous events are those of users with positions.

    Args:
        items: (T,) dense indices; 0 is unknown.
        offsets: (B + 1,) where each user begins.
        positions: (P,) events in any order; None for all.
        occurrences: (T,) how often each event counts, once by default. A user's window, latest last, that counts as
            often as its items did stands for all that was before.

    Example:
        >>> found = find_windows(np.array([7, 5, 7, 0, 9]), np.array([0, 5]), width=2)
        >>> found.last.tolist()
        [[0, -1], [1, 0], [2, 1], [2, 1], [4, 2]]
        >>> found.counts.tolist()
        [1, 1, 2, 1, 1]
        >>> found.previous.tolist()
        [-1, -1, 0, -1, -1]
    """
    events = np.arange(len(items), dtype=np.int64)
    positions = events if positions is None else positions
    first = np.repeat(offsets[:-1], np.diff(offsets)).astype(np.int64)
    order, previous = _previous(items, first)
    last = np.full((width, len(positions)), -1, np.int64)
    # what is before a user's first event stands for an empty slot: within a slot events never go back
    empty, known = first - 1, items > 0
    slot = np.maximum.accumulate(np.where(known, events, empty))
    moves, before = known & (events != first), np.empty_like(slot)
    for number in range(width):
        filled = slot[positions]
        there = filled >= first[positions]
        if not there.any():
            break
        last[number] = np.where(there, filled, -1)
        before[1:] = slot[:-1]
        moves &= before != previous
        slot = np.maximum.accumulate(np.where(moves, before, empty))
    again = known & (previous >= 0) & ~moves  # the item was in the window
    counts = _counted(order, again, np.ones_like(items) if occurrences is None else occurrences)
    return Windows(last.T, counts, np.where(again, previous, -1))


def _previous(items: Ints, first: Ints) -> tuple[Ints, Ints]:
    """(T,) events by user and item, and the event at which the same user had the item before, −2 if never."""
    order = np.lexsort((items, first))
    same = (items[order[1:]] == items[order[:-1]]) & (first[order[1:]] == first[order[:-1]])
    previous = np.full(len(items), -2, np.int64)
    previous[order[1:][same]] = order[:-1][same]
    return order, previous


def _counted(order: Ints, again: NDArray[np.bool_], occurrences: Ints) -> Ints:
    """(T,) occurrences of the event's item since one that was not ``again``."""
    counts, begins = np.empty(len(order), np.int64), ~again[order]
    total = np.cumsum(occurrences[order])
    before = np.maximum.accumulate(np.where(begins, total - occurrences[order], 0))
    counts[order] = total - before
    return counts
