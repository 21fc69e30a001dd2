"""Repeats against counting, event by event."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from fuxi_torchrec.data.repeats import DISTANCES, SHARES, distances, repeat_shares

HISTORIES = st.lists(st.tuples(st.lists(st.integers(0, 6), max_size=30), st.integers(0, 6)), max_size=6)


def counted(history, target):
    """The names of a user's share and distance."""
    known = [item for item in history if item]
    share = sum(item in known[:n] for n, item in enumerate(known)) / max(1, len(known))
    name = next(name for name, most in zip(SHARES, (0, 0.25, 0.5, 0.75, 1), strict=True) if share <= most)
    if not target:
        return name, "unknown"
    back = next((n for n, item in enumerate(reversed(history), 1) if item == target), None)
    far = (("1-10", 10), ("11-100", 100), ("101-1000", 1000), (">1000", 10**9))
    return name, "never" if back is None else next(name for name, most in far if back <= most)


def named(users):
    items = np.array([item for history, _ in users for item in history], np.int64)
    offsets = np.cumsum([0, *(len(history) for history, _ in users)])
    targets = np.array([target for _, target in users], np.int64)
    found = zip(repeat_shares(items, offsets), distances(items, offsets, targets), strict=True)
    return [(SHARES[share], DISTANCES[distance]) for share, distance in found]


@given(HISTORIES)
def test_shares_and_distances_are_those_of_counting(users):
    assert named(users) == [counted(*user) for user in users]


def test_bounds_belong_to_the_nearer_bucket():
    backs = [1, 10, 11, 100, 101, 1000, 1001]
    users = [([7] + [n % 3 + 1 for n in range(back - 1)], 7) for back in backs]
    found = [distance for _, distance in named(users)]
    assert found == ["1-10", "1-10", "11-100", "11-100", "101-1000", "101-1000", ">1000"]
    quarters = [([1, 2, 3, 4], 1), ([1, 2, 3, 3], 1), ([1, 2, 2, 2], 1), ([1, 1, 1, 1], 1), ([1] * 5, 1), ([], 1)]
    assert [share for share, _ in named(quarters)] == ["0", "<=0.25", "<=0.5", "<=0.75", "<=1", "0"]
