"""How much users repeat: the share of repeats in a history, and how far back an item was last there."""

import numpy as np

from fuxi_torchrec.events.histories import Ints

SHARES = ("0", "<=0.25", "<=0.5", "<=0.75", "<=1")
_REACHES = (0, 10, 100, 1_000)
DISTANCES = ("never", "1-10", "11-100", "101-1000", ">1000", "unknown")


def repeat_shares(items: Ints, offsets: Ints) -> Ints:
    """Which of SHARES each user is in, by how many of the events are of an item that the history had before.

    Args:
        items: (T,) of the users' events, one after another; those of unknown items, 0, are left out.
        offsets: (B + 1,) where each user begins.
    """
    users, events = len(offsets) - 1, items > 0
    owner = np.repeat(np.arange(users), np.diff(offsets))[events]
    several = int(items.max(initial=0)) + 1
    distinct = np.bincount(np.unique(owner * several + items[events]) // several, minlength=users)
    known = np.bincount(owner, minlength=users)
    return -(-4 * (known - distinct) // np.maximum(known, 1))


def distances(items: Ints, offsets: Ints, targets: Ints) -> Ints:
    """Which of DISTANCES each user is in, by how many events before the target it was last: 1 is the last event.

    Args:
        items, offsets: of the histories, as in :func:`repeat_shares`.
        targets: (B,) what comes after them, 0 if it is unknown.
    """
    lengths = np.diff(offsets)
    found = np.flatnonzero(items == np.repeat(targets, lengths))
    last = offsets[1:].copy()  # no event is there: never
    owner = np.searchsorted(offsets, found, side="right") - 1
    last[owner] = found  # of several the last one
    return np.where(targets > 0, np.searchsorted(_REACHES, offsets[1:] - last), len(DISTANCES) - 1)
